"""What only this machine, the model and the user's code can tell is said before models load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.trainer.ppo_run import run_ppo_local
from openrlhf.trainer.ppo_setup import make_schedule, prepare_inputs, schedule_notes
from tests.tiny import write_jsonl


def problem(model: Path, folder: Path, flags: str) -> str:
    """What the first check that fails says."""
    data = write_jsonl(folder / "rows.jsonl", [{"input": "q"}])
    words = f"--pretrain {model} --prompt_data {data} --save_path {folder / 'run'} "
    words += f"--remote_rm_url {folder / 'no_reward.py'} {flags}"
    with pytest.raises(ConfigError) as caught:
        prepare_inputs(parse_config(PPOConfig, words.split()).config, has_engines=False)
    return caught.value.problems[0]


def test_kernels_that_this_machine_lacks(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = f"--pretrain {tiny_model_dir} --prompt_data data --remote_rm_url reward.py "
    words += "--attn_implementation flash_attention_3"
    with pytest.raises(ConfigError, match=r"flash_attention_3.*torch sees no CUDA device"):
        run_ppo_local(parse_config(PPOConfig, words.split()).config)


def test_a_policy_loss_that_the_file_does_not_have(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text("def mine():\n    pass\n")
    where = tmp_path / "losses.py"
    said = problem(tiny_model_dir, tmp_path, f"--policy_loss_type {where}:missing")
    assert said == f"{where} has no missing; found: mine. Define missing in it."


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


@pytest.mark.parametrize(
    ("flags", "is_said"),
    [("", False), ("--freezing_actor_steps 1", False), ("--freezing_actor_steps 2", True)],
)
def test_a_policy_that_is_frozen_to_the_end_is_said(flags: str, is_said: bool) -> None:
    words = "--pretrain m --prompt_data d --remote_rm_url r.py --rollout_batch_size 4 "
    words += f"--train_batch_size 4 {flags}"
    config = parse_config(PPOConfig, words.split()).config
    notes = schedule_notes(config, make_schedule(config, num_prompts=8))
    assert bool(notes) is is_said
    assert not is_said or notes[0].endswith("the run has 2 steps, so the policy is never trained")
