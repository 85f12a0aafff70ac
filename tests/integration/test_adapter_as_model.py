"""The folder an adapter was saved in is given where a model is asked for: base and adapter load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from openrlhf.cli.train_ppo import main as train_ppo
from openrlhf.distributed.backend import shut_down
from openrlhf.models.loading import load_causal_lm
from tests.distributed.spawn import run_ranks
from tests.integration.test_resume_methods import make_inputs, records, start

pytestmark = pytest.mark.slow

LORA = ("--max_epochs", "4", "--learning_rate", "1e-2")
PPO = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "
    "--vllm_num_engines 0 --micro_train_batch_size 4 --train_batch_size 8 "
    "--micro_rollout_batch_size 4 --rollout_batch_size 4 --prompt_max_len 64 "
    "--generate_max_len 8 --max_samples 4 --input_key input"
)


def run_commands(root: Path) -> dict:
    """SFT, SFT on what it left, a reward model on that; then RL of the one with the other."""
    start(root, root / "first", "sft_lora", *LORA)
    start(root, root / "second", "sft_lora", *LORA, "--pretrain", f"{root}/first")
    start(root, root / "reward", "rm_lora", "--pretrain", f"{root}/second")
    models = f"--pretrain {root}/second --reward_pretrain {root}/reward"
    paths = f"{models} --prompt_data {root}/rows.jsonl --save_path {root}/ppo"
    train_ppo(f"{paths} {PPO}".split())
    shut_down()
    refused = 0
    try:
        vllm = PPO.replace("--vllm_num_engines 0", "--vllm_num_engines 1")
        train_ppo(f"{paths} {vllm}".split())
    except SystemExit as stop:
        refused = int(stop.code or 0)
    return {"refused": refused}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def results(root: Path) -> dict:
    [results] = run_ranks(run_commands, 1, root)
    return results  # type: ignore[return-value]


def test_training_on_an_adapter_goes_on_from_what_it_learned(root: Path, results: dict) -> None:
    first, second = (
        [record["gpt_loss"] for record in records(root / name) if "gpt_loss" in record]
        for name in ("first", "second")
    )
    assert second[0] < first[0] - 0.1
    config = json.loads((root / "second" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == f"{root}/first"


def test_reinforcement_learning_starts_from_the_adapters_of_policy_and_reward(
    root: Path, results: dict
) -> None:
    [record, *_] = [json.loads(line) for line in (root / "ppo" / "metrics.jsonl").open()]
    assert record["reward"] != 0
    trained, start_model = load_causal_lm(root / "ppo"), load_causal_lm(root / "second")
    gaps = [
        (a - b).abs().max()
        for a, b in zip(trained.parameters(), start_model.parameters(), strict=True)
    ]
    assert 0 < max(gaps) < 1e-3
    assert torch.isfinite(torch.stack(gaps)).all()


def test_vllm_refuses_what_it_cannot_read(results: dict) -> None:
    assert results["refused"] == 2
