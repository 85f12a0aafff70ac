"""Every training script runs to its end with tiny local models, through its variables."""

import os
from pathlib import Path

import pytest

from tests.helpers.scripts import SCRIPTS, TINY_RL, TRAINING_SCRIPTS
from tests.integration.commands import run_command
from tests.rewards.servers import RewardServer

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


def own_variables(name: str, folder: Path) -> dict[str, str]:
    """What one script needs instead of what all get."""
    variables = {"EXTRA_ARGS": TINY_SUPERVISED if name in SUPERVISED else TINY_RL}
    if name in OWN_ROWS:
        variables |= {"DATA": str(folder / OWN_ROWS[name]), "LABEL_KEY": "label"}
    if "_ring_" in name:
        variables |= {"GPUS": "2", "RING": "2"}
    if "tensor_parallelism" in name:
        variables |= {"GPUS": "2", "TENSOR_PARALLEL": "2", "MODEL": str(folder / "two_heads")}
    if "_vlm_" in name:
        variables |= {"MODEL": str(folder / "vision"), "DATA": str(folder / "images.jsonl")}
    if name == "train_sft_mixtral_lora.sh":
        variables["MODEL"] = str(folder / "mixture")
    if name == "train_dapo_hybrid.sh":  # of an untrained model, no answer is right
        variables |= {"REWARD_FUNC": str(folder / "reward.py"), "OVERLONG_BUFFER": "4"}
    return variables


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRAINING_SCRIPTS)
def test_a_script_trains_and_exports(name, tiny_variables, tmp_path):
    own = own_variables(name, Path(tiny_variables["DATA"]).parent)
    with RewardServer() as server:
        places = {"OUT": str(tmp_path), "REWARD_URL": server.url}
        env = {**os.environ, **tiny_variables, **own, **places}
        run_command("bash", SCRIPTS / name, env=env, timeout=560)
    weights = "adapter_model" if name == "train_sft_mixtral_lora.sh" else "model"
    assert (tmp_path / f"{weights}.safetensors").exists()
    assert (tmp_path / "metrics.jsonl").read_text()
    assert bool(server.requests) == (name == "train_ppo_with_remote_rm.sh")
