"""Every training script runs to its end with tiny local models, through its variables."""

import os
import sys
from pathlib import Path

import pytest

from tests.examples.test_scripts import SCRIPTS, TRAINING_SCRIPTS
from tests.integration.commands import run_command
from tests.rewards.servers import RewardServer
from tests.tiny import as_openrlhf_saves, make_model, make_reward_model, write_jsonl

pytestmark = pytest.mark.slow


OWN_ROWS = {
    "train_dpo_llama.sh": "pairs.jsonl",
    "train_dpo_ring_llama.sh": "pairs.jsonl",
    "train_kto_llama.sh": "labelled.jsonl",
    "train_prm_mistral.sh": "steps.jsonl",
    "train_rm.sh": "pairs.jsonl",
}
SUPERVISED = {
    "train_sft.sh",
    "train_sft_llama_tensor_parallelism.sh",
    "train_sft_ring_llama.sh",
    "train_knowledge_distillation.sh",
    "train_sft_mixtral_lora.sh",
    *OWN_ROWS,
}
TINY_SUPERVISED = "--train_batch_size 4 --micro_train_batch_size 2 --max_len 64"
TINY_RL = (
    "--rollout_batch_size 4 --micro_rollout_batch_size 4 --train_batch_size 4 "
    "--micro_train_batch_size 4 --prompt_max_len 32 --generate_max_len 8 --save_steps -1 "
    "--enforce_eager"
)
SPREAD_REWARD = """
def reward_func(queries, prompts, labels):
    return [0.1 + sum(map(ord, query)) % 8 / 10 for query in queries]
"""


def chat(number: int, answer: int) -> list[dict[str, str]]:
    question = {"role": "user", "content": f"{number}+1=?"}
    return [question, {"role": "assistant", "content": str(answer)}]


@pytest.fixture(scope="module")
def tiny_variables(tmp_path_factory) -> dict[str, str]:
    """A policy, a reward model as OpenRLHF saves it, and eight rows."""
    folder = tmp_path_factory.mktemp("script_models")
    model = make_model(folder / "model", hidden_size=128)
    made = make_reward_model(folder / "made", hidden_size=128)
    as_openrlhf_saves(made, folder / "reward_model", head="value_head")
    rows = [{"question": f"{n}+1=?", "answer": str(n + 1)} for n in range(8)]
    labelled = [{**row, "label": n % 2} for n, row in enumerate(rows)]
    steps = [{"question": f"{n}+1=#{n + 1}#", "label": ["+", "-"]} for n in range(8)]
    pairs = [{"chosen": chat(n, n + 1), "rejected": chat(n, n)} for n in range(8)]
    make_model(folder / "mixture", "mixtral")
    make_model(folder / "two_heads", "llama", num_kv_heads=2)
    (folder / "reward.py").write_text(SPREAD_REWARD)
    write_jsonl(folder / "pairs.jsonl", pairs)
    write_jsonl(folder / "labelled.jsonl", labelled)
    write_jsonl(folder / "steps.jsonl", steps)
    return {
        "TEACHER": str(model),
        "MARKER": "#",
        "MODEL": str(model),
        "REWARD_MODEL": str(folder / "reward_model"),
        "DATA": str(write_jsonl(folder / "rows.jsonl", rows)),
        "INPUT_KEY": "question",
        "OUTPUT_KEY": "answer",
        "LABEL_KEY": "answer",
        "NODES": "1",
        "GPUS": "1",
        "ENGINES": "1",
        "TENSOR_PARALLEL": "1",
    }


def own_variables(name: str, folder: Path) -> dict[str, str]:
    """What one script needs instead of what all get."""
    variables = {"EXTRA_ARGS": TINY_SUPERVISED if name in SUPERVISED else TINY_RL}
    if name in OWN_ROWS:
        variables |= {"DATA": str(folder / OWN_ROWS[name]), "LABEL_KEY": "label"}
    if "_ring_" in name:
        variables |= {"GPUS": "2", "RING": "2"}
    if "tensor_parallelism" in name:
        variables |= {"GPUS": "2", "TENSOR_PARALLEL": "2", "MODEL": str(folder / "two_heads")}
    if name == "train_sft_mixtral_lora.sh":
        variables["MODEL"] = str(folder / "mixture")
    if name == "train_dapo_hybrid.sh":  # of an untrained model, no answer is right
        variables |= {"REWARD_FUNC": str(folder / "reward.py"), "OVERLONG_BUFFER": "4"}
    return variables


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRAINING_SCRIPTS)
def test_a_script_trains_and_exports(name, tiny_variables, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = own_variables(name, Path(tiny_variables["DATA"]).parent)
    with RewardServer() as server:
        places = {"PATH": path, "OUT": str(tmp_path), "REWARD_URL": server.url}
        env = {**os.environ, **tiny_variables, **own, **places}
        run_command("bash", SCRIPTS / name, env=env, timeout=560)
    is_adapter = name == "train_sft_mixtral_lora.sh"
    assert (
        (tmp_path / ("adapter_model" if is_adapter else "model"))
        .with_suffix(".safetensors")
        .exists()
    )
    assert (tmp_path / "metrics.jsonl").read_text()
    assert bool(server.requests) == (name == "train_ppo_with_remote_rm.sh")
