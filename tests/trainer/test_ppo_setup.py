"""What only this machine, the model and the user's code can tell is said before models load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.trainer.ppo_run import run_ppo_local
from openrlhf.trainer.ppo_setup import prepare_inputs
from openrlhf.trainer.ray import vllm_engine
from openrlhf.trainer.ray.cluster import engine_config, policy_dtype
from openrlhf.trainer.ray.vllm_engine import create_vllm_engines
from tests.tiny import make_model, write_jsonl


def problem(model: Path, folder: Path, flags: str) -> str:
    """What the first check that fails says."""
    data = write_jsonl(folder / "rows.jsonl", [{"input": "q"}])
    words = f"--pretrain {model} --prompt_data {data} --save_path {folder / 'run'} "
    words += f"--remote_rm_url {folder / 'no_reward.py'} {flags}"
    with pytest.raises(ConfigError) as caught:
        prepare_inputs(parse_config(PPOConfig, words.split()).config, has_engines=False)
    return caught.value.problems[0]


def test_lengths_do_not_hide_a_column_that_is_not_there(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", max_position_embeddings=64)
    data = write_jsonl(tmp_path / "data.jsonl", [{"input": "a", "answer": "b"}])
    words = f"--pretrain {model} --prompt_data {data} --remote_rm_url r.py --label_key gold "
    words += "--prompt_max_len 32 --generate_max_len 64 --aux_loss_coef 0.1 --input_key question"
    config = parse_config(PPOConfig, words.split()).config
    with pytest.raises(ConfigError) as caught:
        prepare_inputs(config, has_engines=False)
    experts, lengths, question, gold, reward = caught.value.problems
    assert "32 + --generate_max_len 64 is more than the 64 positions" in lengths
    assert "has no experts" in experts
    assert question.startswith("column 'question' is not in the data set")
    assert gold.startswith("column 'gold' is not in the data set; columns found: input, answer.")
    assert reward.startswith("r.py is not a Python file that exists")


LOSS_CODE = """
from openrlhf.algorithms.policy_loss import PolicyLossTerms, ppo_loss

def two(logprobs_N, old_logprobs_N):
    return logprobs_N

def fails(logprobs_N, old_logprobs_N, *, advantages_N, num_actions_B, clip):
    return logprobs_N + 1 / int(num_actions_B[0] - 2)

def mean(*args, **named):
    return PolicyLossTerms(*(part.mean() for part in ppo_loss(*args, **named)[:1]), *[0] * 3)

def no_gradient(logprobs_N, *args, **named):
    return ppo_loss(logprobs_N.detach(), *args, **named)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("two", "{file}: TypeError: two() got an unexpected keyword argument"),
        ("fails", "{file}:8: ZeroDivisionError: division by zero"),
        ("mean", "{file}:mean must return PolicyLossTerms"),
        (
            "no_gradient",
            "{file}:no_gradient must return PolicyLossTerms",
        ),
    ],
)
def test_a_users_loss_is_tried_before_models_load(
    name: str, said: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "losses.py"
    file.write_text(LOSS_CODE)
    found = problem(tiny_model_dir, tmp_path, f"--policy_loss_type {file}:{name}")
    assert found.startswith(said.format(file=file)), found


@pytest.mark.parametrize(
    "flags",
    ["--generate_max_len 100000", "--prompt_max_len 100000 --generate_max_len 8"],
)
def test_lengths_that_are_said_to_fit_the_model_do(
    tiny_model_dir: Path, tmp_path: Path, flags: str
) -> None:
    said = problem(tiny_model_dir, tmp_path, flags)
    assert "positions of the model" in said
    remedy = said.partition("Type ")[2].rstrip(".").partition(" or ")[0]
    assert "positions" not in problem(tiny_model_dir, tmp_path, f"{flags} {remedy}")


@pytest.mark.parametrize(("has_gpus", "stored", "flags", "expected"), [
    (True, "float32", "", torch.float32),
    (False, "bfloat16", "", torch.float32),
    (True, "float32", "--bf16", torch.bfloat16),
])  # fmt: skip
def test_the_engine_holds_the_type_of_the_trainer(
    tmp_path: Path, has_gpus: bool, stored: str, flags: str, expected: torch.dtype
) -> None:
    LlamaConfig(dtype=stored).save_pretrained(tmp_path)
    words = f"--pretrain {tmp_path} --prompt_data d --remote_rm_url r.py {flags}"
    config = parse_config(PPOConfig, words.split()).config
    assert policy_dtype(config, has_gpus=has_gpus) == expected
    assert engine_config(config, dtype=expected).dtype == str(expected).removeprefix("torch.")


def test_train_ppo_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--pretrain m --prompt_data d --remote_rm_url r.py"
    config = parse_config(PPOConfig, words.split()).config
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="started as 2 processes, and trains in one"):
        run_ppo_local(config)


def test_every_engine_draws_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start_actor(kind: type, arguments: tuple, slot: object, **options: object) -> None:
        started.append(arguments[0].seed)

    monkeypatch.setattr(vllm_engine, "start_actor", start_actor)
    words = ["--pretrain", "m", "--prompt_data", "d", "--remote_rm_url", "r.py"]
    config = parse_config(PPOConfig, words).config
    slots: list[Any] = [None] * 4
    for resume_step in range(3):
        settings = engine_config(config, dtype=torch.float32, resume_step=resume_step)
        create_vllm_engines(settings, slots, run_dir="run")
    assert len(set(started)) == 12
