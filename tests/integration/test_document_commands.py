"""The documents' commands from a shell, with a reward model and a critic as OpenRLHF saves them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import GRPO, PPO_HYBRID, SMALL
from tests.tiny import as_openrlhf_saves, make_reward_model, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OFFLINE = """
set -e
infer="python3 -m openrlhf.cli.batch_inference"
$infer --eval_task generate_vllm --pretrain $MODEL --dataset $PROMPTS --input_key context_messages \
   --apply_chat_template --max_new_tokens 8 --prompt_max_len 64 --best_of_n 4 --temperature 1.0 \
   --enable_prefix_caching --tp_size 1 --max_num_seqs 64 --iter 0 --rollout_batch_size 64 \
   --output_path answers.jsonl
$infer --eval_task rm --pretrain $RM --bf16 --max_len 2048 --dataset answers.jsonl \
   --dataset_probs 1.0 --zero_stage 0 --post_processor rs --micro_batch_size 4 \
   --output_path best.jsonl
$infer --eval_task rm --pretrain $RM --bf16 --max_len 2048 --dataset answers.jsonl \
   --dataset_probs 1.0 --zero_stage 0 --post_processor iter_dpo --micro_batch_size 4 \
   --output_path pairs.jsonl
$infer --eval_task rm --pretrain $RM --bf16 --max_len 2048 --dataset answers.jsonl \
   --dataset_probs 1.0 --zero_stage 0 --post_processor csft --normalize_reward \
   --micro_batch_size 4 --output_path conditional.jsonl
for rows in best conditional; do
   python3 -m openrlhf.cli.train_sft --max_len 2048 --dataset $rows.jsonl --dataset_probs 1.0 \
      --input_key input --output_key output --train_batch_size 4 --micro_train_batch_size 2 \
      --pretrain $MODEL --save_path ./$rows --zero_stage 2 --max_epochs 1 --bf16 \
      --learning_rate 2e-6
done
python3 -m openrlhf.cli.train_dpo --max_len 2048 --dataset pairs.jsonl --dataset_probs 1.0 \
   --prompt_key prompt --train_batch_size 4 --micro_train_batch_size 2 --pretrain $MODEL \
   --save_path ./pairs --zero_stage 3 --max_epochs 1 --bf16 --learning_rate 5e-7 --beta 0.1
"""


@pytest.fixture(scope="module")
def names(
    tiny_model_dir: Path,
    reward_model_dir: Path,
    prompt_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """What the commands call models and data."""
    made = make_reward_model(tmp_path_factory.mktemp("critic") / "made")
    critic = as_openrlhf_saves(made, made.with_name("c"), head="value_head", kind="CriticModel")
    rows = [json.loads(line) for line in prompt_file.read_text().splitlines()]
    texts = [{"context_messages": row["input"], "answer": row["answer"]} for row in rows]
    return {
        "MODEL": str(tiny_model_dir),
        "RM": str(reward_model_dir),
        "CRITIC": str(critic),
        "DIALOGUES": str(prompt_file),
        "PROMPTS": str(write_jsonl(made.with_name("texts.jsonl"), texts)),
    }


def shell(text: str, folder: Path, names: dict[str, str]) -> None:
    """Run a script as a person does, in a folder of its own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **names, "PATH": path}
    command = ["bash", "-c", text]
    result = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=850
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.parametrize(
    "flags",
    [f"{PPO_HYBRID} --critic_pretrain $CRITIC", f"{GRPO} --n_samples_per_prompt 4"],
    ids=["ppo", "grpo"],
)
def test_rl_with_a_reward_model(names: dict[str, str], tmp_path: Path, flags: str) -> None:
    places = "--pretrain $MODEL --reward_pretrain $RM --prompt_data $DIALOGUES --save_path ./run"
    shell(f"python3 -m openrlhf.cli.train_ppo_ray {flags} {SMALL} {places}", tmp_path, names)
    steps = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in r]
    assert steps and ("critic_loss" in steps[0]) == ("critic" in flags)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")


def test_rejection_sampling_iterative_dpo_and_conditional_sft(
    names: dict[str, str], tmp_path: Path
) -> None:
    shell(OFFLINE, tmp_path, names)
    rows = [json.loads(line) for line in (tmp_path / "best.jsonl").read_text().splitlines()]
    assert len(rows) == 11
    assert all(row["input"] == f"<|user|>{row['context_messages']}<|end|><|assistant|>"
               and row["answer"] for row in rows)  # fmt: skip
    for name in ("best", "conditional", "pairs"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
