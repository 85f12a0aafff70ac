"""What may be changed on a command that goes on from a checkpoint, what may not, what is said."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.resume_settings import check_settings, settings_of
from openrlhf.config.supervised import SFTConfig
from openrlhf.distributed.backend import shut_down
from openrlhf.errors import ConfigError
from openrlhf.trainer.dpo_trainer import DPOTrainer
from tests.distributed.spawn import run_ranks
from tests.integration.test_resume_methods import make_inputs, start
from tests.stopped_runs import records, stopping_behind

NEEDED = "--pretrain m --dataset d"
REFUSED = {
    "--train_batch_size 64": "--train_batch_size 128",
    "--lr_scheduler linear": "--lr_scheduler cosine_with_min_lr",
    "--bf16": "--ds.param_dtype auto",
    "--pretrain n": "--pretrain m",
    "--lora_rank 0 --target_modules q_proj v_proj": "--target_modules all-linear",
}
SAID = {
    "--learning_rate 1": "--learning_rate 1.0 has no effect: 5e-06 goes on with the checkpoint",
    "--adam_betas 0.8 0.9": "--adam_betas 0.8 0.9 has no effect: 0.9 0.95 goes on",
}
FREE = (
    "--max_epochs 5 --max_norm 7 --save_steps 9 --logging_steps 4 --eval_dataset e --save_path x "
    "--use_wandb true --zero_stage 3"
)


def sft(flags: str) -> SFTConfig:
    return parse_config(SFTConfig, f"{NEEDED} {flags}".split()).config


def saved() -> dict:
    """Settings as a checkpoint keeps them."""
    return json.loads(json.dumps(settings_of(sft(""))))


@pytest.mark.parametrize("flags", REFUSED)
def test_a_change_the_checkpoint_depends_on_is_refused_with_what_to_type(flags: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Type {REFUSED[flags]}, or leave")):
        check_settings(sft(flags), saved(), path="ckpt/global_step7")


@pytest.mark.parametrize("flags", SAID)
def test_a_value_that_the_checkpoint_keeps_is_said(flags: str) -> None:
    [line] = check_settings(sft(flags), saved(), path="ckpt/global_step7")
    assert line.startswith(SAID[flags])


REFUSED_IN_RL = {
    "--rollout_batch_size 512": "--rollout_batch_size 1024",
    "--advantage_estimator reinforce": "--advantage_estimator gae",
    "--enable_ema": "--enable_ema false",
    "--optim muon": "--optim adam",
    "--pretrain n": "--pretrain m",
}
SAID_IN_RL = {
    "--actor_learning_rate 1": "--actor_learning_rate 1.0 has no effect: 1e-06 goes on with",
}


def ppo(flags: str) -> PPOConfig:
    line = f"--pretrain m --prompt_data d --remote_rm_url r.py {flags}"
    return parse_config(PPOConfig, line.split()).config


@pytest.mark.parametrize("flags", REFUSED_IN_RL)
def test_what_updates_are_counted_in_is_refused_in_reinforcement_learning(flags: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(ppo(flags), settings_of(ppo("")), path="ckpt/global_step7")
    [problem] = caught.value.problems
    assert problem.endswith(f"Type {REFUSED_IN_RL[flags]}, or leave --load_checkpoint out.")


@pytest.mark.parametrize("flags", SAID_IN_RL)
def test_what_the_checkpoint_keeps_is_said_in_reinforcement_learning(flags: str) -> None:
    [line] = check_settings(ppo(flags), settings_of(ppo("")), path="p")
    assert line.startswith(SAID_IN_RL[flags])


def test_what_may_change_and_what_a_checkpoint_does_not_know_are_not_said() -> None:
    assert check_settings(sft(FREE), saved(), path="p") == []
    assert check_settings(sft("--l2 7"), {}, path="p") == []


def test_the_same_model_may_be_typed_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved_with(path: object) -> dict:
        return saved() | {"model.model_name_or_path": str(path)}

    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert check_settings(sft(""), saved_with(f"{tmp_path}/m/"), path="p") == []
    with pytest.raises(ConfigError, match=r"--pretrain m: p was written with .*other\. Type"):
        check_settings(sft(""), saved_with(tmp_path / "other"), path="p")


def test_all_refused_changes_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(sft("--train_batch_size 64 --bf16"), saved(), path="p")
    assert len(caught.value.problems) == 2


CASE = "dpo_precomputed"
SAVING = ("--save_steps", "2", "--load_checkpoint")


def exit_code(root: Path, *more: str) -> int:
    """How a command ends that goes on with changed settings."""
    try:
        start(root, root / "run", CASE, *SAVING, *more)
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        shut_down()
    return 0


def run_commands(root: Path) -> dict:
    """One run that is stopped, refused, finished, started again, exported again, made longer."""
    asked: list[int] = []
    precompute = DPOTrainer.precompute_reference

    def count(self: DPOTrainer) -> None:
        asked.append(self.global_step)
        precompute(self)

    DPOTrainer.precompute_reference = count  # type: ignore[method-assign]
    with stopping_behind(2):
        start(root, root / "run", CASE, *SAVING)
    results: dict = {
        "batch": exit_code(root, "--train_batch_size", "2"),
        "micro": exit_code(root, "--micro_train_batch_size", "1"),
    }
    exported = (root / "run" / "model.safetensors").stat().st_mtime_ns
    results["again"] = exit_code(root)
    results["untouched"] = exported == (root / "run" / "model.safetensors").stat().st_mtime_ns
    (root / "run" / "finished.json").unlink()  # as a kill leaves it behind the last checkpoint
    (root / "run" / "model.safetensors").unlink()
    results["export"] = exit_code(root)
    results["exported"] = (root / "run" / "model.safetensors").is_file()
    results["asked"] = list(asked)
    results["longer"] = exit_code(root, "--max_epochs", "3")
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("settings"))


@pytest.fixture(scope="module")
def results(root: Path) -> dict:
    [results] = run_ranks(run_commands, 1, root)
    return results


def test_a_command_with_another_batch_size_is_refused_with_exit_code_2(results: dict) -> None:
    assert (results["batch"], results["micro"]) == (2, 0)


def test_a_finished_command_typed_again_does_no_work(results: dict) -> None:
    assert (results["again"], results["untouched"]) == (0, True)


def test_a_command_that_died_before_its_export_exports_without_asking_the_reference(
    results: dict,
) -> None:
    assert (results["export"], results["exported"]) == (0, True)
    assert results["asked"] == [0, 2]  # by the two starts that trained


def test_more_epochs_go_on_behind_the_last_step_at_the_rate_of_the_longer_run(
    results: dict, root: Path
) -> None:
    assert results["longer"] == 0
    rates = {record["step"]: record["lr"] for record in records(root / "run") if "lr" in record}
    assert list(rates) == [3, 6, 9]

    # Cosine from 1e-3 to a tenth of it; a line has the largest rate behind its three updates.
    def expected(k: int, num: int) -> float:
        return 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * k / num)) / 2)

    assert rates[6] == pytest.approx(expected(4, 6))
    assert rates[9] == pytest.approx(expected(7, 9))
