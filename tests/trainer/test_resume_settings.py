"""What may be changed on a command that goes on from a checkpoint, what may not, what is said."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from openrlhf.config.cli import check_settings, parse_config, settings_of
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.errors import ConfigError
from openrlhf.trainer.dpo_trainer import DPOTrainer
from tests.distributed.spawn import run_ranks
from tests.helpers.configs import rl_config
from tests.helpers.stopped_runs import records, stopping_behind
from tests.helpers.supervised_runs import make_inputs, start
from tests.integration.commands import exit_code


def sft(flags: str) -> SFTConfig:
    return parse_config(SFTConfig, f"--pretrain m --dataset d {flags}".split()).config


def saved(make: Callable[[str], SFTConfig | PPOConfig] = sft) -> dict:
    """Settings as a checkpoint keeps them."""
    return json.loads(json.dumps(settings_of(make(""))))


@pytest.mark.parametrize(
    ("make", "flags", "remedy"),
    [
        (sft, "--train_batch_size 64", "--train_batch_size 128"),
        (sft, "--lr_scheduler linear", "--lr_scheduler cosine_with_min_lr"),
        (sft, "--bf16", "--param_dtype auto"),
        (sft, "--pretrain n", "--pretrain m"),
        (sft, "--target_modules q_proj v_proj --lora_rank 0", "--target_modules all-linear"),
        (rl_config, "--rollout_batch_size 512", "--rollout_batch_size 1024"),
        (rl_config, "--advantage_estimator reinforce", "--advantage_estimator gae"),
        (rl_config, "--enable_ema", "--enable_ema false"),
        (rl_config, "--optim muon", "--optim adam"),
    ],
)
def test_a_change_the_checkpoint_depends_on_is_refused_with_what_to_type(
    make: Callable, flags: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(make(flags), saved(make), path="ckpt/global_step7")
    [problem] = caught.value.problems
    assert problem.endswith(f"Type {remedy}, or leave --load_checkpoint out.")


@pytest.mark.parametrize(
    ("make", "flags", "said"),
    [
        (sft, "--learning_rate 1", "--learning_rate 1.0 has no effect: 5e-06 goes on with the"),
        (
            rl_config,
            "--actor_learning_rate 1",
            "--actor_learning_rate 1.0 has no effect: 1e-06 goes on",
        ),
    ],
)
def test_a_value_that_the_checkpoint_keeps_is_said(make: Callable, flags: str, said: str) -> None:
    [line] = check_settings(make(flags), saved(make), path="ckpt/global_step7").values()
    assert line.startswith(said) and line.endswith("Add --reset_lr to change it.")
    assert check_settings(make(f"{flags} --reset_lr"), saved(make), path="p") == {}


def test_what_may_change_and_what_a_checkpoint_does_not_know_are_not_said() -> None:
    free = "--max_epochs 5 --max_norm 7 --save_steps 9 --logging_steps 4 --eval_dataset e "
    free += "--adam_betas 0.8 0.9 --save_path x --use_wandb true --zero_stage 3"
    assert check_settings(sft(free), saved(), path="p") == {}
    assert check_settings(sft("--l2 7"), {}, path="p") == {}


def test_the_same_model_may_be_typed_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved_with(path: object) -> dict:
        return saved() | {"model.model_name_or_path": str(path)}

    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert check_settings(sft(""), saved_with(f"{tmp_path}/m/"), path="p") == {}
    with pytest.raises(ConfigError, match=r"--pretrain m: p was written with .*other\. Type"):
        check_settings(sft(""), saved_with(tmp_path / "other"), path="p")


CASE = "dpo_precomputed"
SAVING = ("--save_steps", "2", "--load_checkpoint")


def ended(root: Path, *more: str) -> int:
    """How a command ends that goes on with changed settings."""
    run = root / "run"
    return exit_code(lambda words: start(root, run, CASE, *words), [*SAVING, *more])


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
        "batch": ended(root, "--train_batch_size", "2"),
        "micro": ended(root, "--micro_train_batch_size", "1"),
    }
    exported = (root / "run" / "model.safetensors").stat().st_mtime_ns
    results["again"] = ended(root)
    results["untouched"] = exported == (root / "run" / "model.safetensors").stat().st_mtime_ns
    (root / "run" / "ended.json").unlink()  # as a kill leaves it behind the last checkpoint
    (root / "run" / "model.safetensors").unlink()
    results["export"] = ended(root)
    results["exported"] = (root / "run" / "model.safetensors").is_file()
    results["asked"] = list(asked)
    results["longer"] = ended(root, "--max_epochs", "3")
    results["slower"] = ended(root, "--max_epochs", "4", "--learning_rate", "5e-4")
    flags = ("--max_epochs", "5", "--learning_rate", "5e-4", "--reset_lr")
    results["slower"] += ended(root, *flags)
    return results


def test_a_command_typed_again_does_what_is_left(tmp_path: Path) -> None:
    root = make_inputs(tmp_path)
    [results] = run_ranks(run_commands, 1, root)
    assert (results["batch"], results["micro"]) == (2, 0)
    assert (results["again"], results["untouched"]) == (0, True)  # a finished run does no work
    assert (results["export"], results["exported"]) == (0, True)
    assert results["asked"] == [0, 2]  # of the reference, by the two starts that trained
    assert (results["longer"], results["slower"]) == (0, 0)
    rates = {record["step"]: record["lr"] for record in records(root / "run") if "lr" in record}
    assert list(rates) == [3, 6, 9, 12, 15]

    # Cosine from 1e-3 to a tenth of it; a line has the largest rate behind its three updates.
    def expected(k: int, num: int) -> float:
        return 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * k / num)) / 2)

    assert rates[6] == pytest.approx(expected(4, 6))
    assert rates[9] == pytest.approx(expected(7, 9))
    assert rates[12] == pytest.approx(expected(10, 12))  # that of the checkpoint, whatever is typed
    assert rates[15] == pytest.approx(expected(13, 15) / 2)
