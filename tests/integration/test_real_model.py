"""RL of a model that people know: what engine, trainer and exported model say is the same."""

from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.utils.tracker import read_metrics
from tests.integration.commands import run_command

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "smollm2-135m"  # of `make real-model`
NUM_STEPS, NUM_ASKED = 6, 12


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_six_steps_agree_between_engine_and_trainer_and_the_export_answers_as_the_engine(
    tmp_path: Path,
) -> None:
    run_command("python", ROOT / "examples/results/make_sums.py", tmp_path, str(4 * NUM_STEPS))
    asked = (tmp_path / "held_out.jsonl").read_text().splitlines()[:NUM_ASKED]
    (tmp_path / "asked.jsonl").write_text("\n".join(asked))
    flags = (
        "--input_key question --label_key answer --apply_chat_template --param_dtype fp32 "
        "--advantage_estimator group_norm --n_samples_per_prompt 4 --init_kl_coef 0 "
        "--rollout_batch_size 4 --train_batch_size 16 --micro_train_batch_size 8 "
        "--prompt_max_len 64 --generate_max_len 16 --vllm_num_engines 1 --enforce_eager "
        "--actor_learning_rate 2e-5 --eval_temperature 0 --eval_n_samples_per_prompt 1"
    )
    paths = {
        "--pretrain": MODEL,
        "--prompt_data": tmp_path / "prompts.jsonl",
        "--eval_dataset": tmp_path / "asked.jsonl",
        "--remote_rm_url": ROOT / "examples/results/sums_reward.py",
        "--save_path": tmp_path / "rl",
    }
    words = [word for pair in paths.items() for word in pair]
    ends = ("--eval_steps", str(NUM_STEPS))
    run_command("openrlhf", "ppo-local", *words, *flags.split(), *ends, timeout=560)

    records = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    steps = [record for record in records if "actor_lr" in record]
    assert [record["step"] for record in steps] == [*range(1, NUM_STEPS + 1)]
    # A step whose rewards are all equal has nothing to learn, and compares nothing.
    compared = [abs(record["vllm_kl"]) for record in steps if "vllm_kl" in record]
    assert len(compared) >= NUM_STEPS // 2 and max(compared) < 1e-5

    file = tmp_path / "rl" / "rollouts" / f"eval_step_{NUM_STEPS:06}.parquet"
    said = pyarrow.parquet.read_table(file, columns=["token_ids", "num_actions"]).to_pylist()
    assert len(said) == NUM_ASKED
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "rl", dtype=torch.float32)
    for row in said:
        prompt, answer = (
            row["token_ids"][: -row["num_actions"]],
            row["token_ids"][-row["num_actions"] :],
        )
        found = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)
        assert found[0, len(prompt) :].tolist() == answer
