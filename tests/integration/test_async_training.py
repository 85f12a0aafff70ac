"""--async_train on real Ray, vLLM and DeepSpeed: bounded, balanced, resumed."""

import itertools
import math
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from openrlhf.cli import train_ppo_ray
from openrlhf.rollout.rollout_queue import RolloutQueue
from openrlhf.trainer.ppo_trainer_async import PPOTrainerAsync
from openrlhf.utils.tracker import read_metrics
from tests.helpers.processes import workers
from tests.integration.commands import argv, steps_of

FLAGS = (
    "--async_train --n_samples_per_prompt 2 --rollout_batch_size 4 --train_batch_size 8 "
    "--micro_train_batch_size 8 --actor_learning_rate 1e-3 --vllm_num_engines 1 --enforce_eager "
    "--advantage_estimator reinforce_baseline --init_kl_coef 0 "
)


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[PPOTrainerAsync]:
    """Every asynchronous trainer that a command has run."""
    seen: list[PPOTrainerAsync] = []
    fit = PPOTrainerAsync.fit

    def fit_and_tell(trainer: PPOTrainerAsync, *lost: Any) -> None:
        seen.append(trainer)
        fit(trainer, *lost)

    monkeypatch.setattr(PPOTrainerAsync, "fit", fit_and_tell)
    return seen


def run(flags: str, **given: Path | str) -> list[dict[str, float]]:
    """Run the command; the records of its steps."""
    train_ppo_ray.main([*argv("", **given), *flags.split()])  # later flags win
    return steps_of(Path(given["save_path"]))


def histogram(steps: list[dict[str, float]]) -> dict[int, int]:
    """Samples by staleness."""
    found: dict[int, int] = {}
    for step in steps:
        for name, value in step.items():
            if name.startswith("num_samples/stale_"):
                staleness = int(name.rpartition("_")[2])
                found[staleness] = found.get(staleness, 0) + int(value)
    return found


def trained_rows(run_dir: Path) -> list[int]:
    """The row of every sample that was trained on."""
    files = sorted((run_dir / "rollouts").glob("step_*.parquet"))
    return [row for path in files for row in pq.read_table(path)["row"].to_pylist()]


def check(steps: list[dict[str, float]], trainer: PPOTrainerAsync, *, limit: int) -> None:
    """Staleness is within its limit, every prompt was trained on once, and what is fresh agrees
    with the trainer to rounding.
    """
    ledger = trainer.sampler.ledger
    num_prompts = ledger.num_drawn
    assert ledger.outcomes == {"trained": num_prompts} and not ledger.pending
    batch_size = trainer.queue.limits.batch_size
    assert len(steps) == trainer.num_steps == math.ceil(num_prompts / batch_size)
    assert trainer.state.weight_version == len(steps)
    found = histogram(steps)
    assert sum(found.values()) == 2 * num_prompts
    assert max(found) <= limit
    assert steps[0]["staleness_max"] == 0 and steps[0].get("vllm_kl", 0.0) < 1e-6
    # A step whose rewards are all equal trains on nothing and compares nothing.
    compared = [step for step in steps if "vllm_kl" in step]
    assert compared
    for step in compared:
        by_age = {name: v for name, v in step.items() if name.startswith("vllm_kl/")}
        oldest = int(step["staleness_max"])  # token by token: some of a sample are younger
        assert by_age.keys() <= {f"vllm_kl/stale_{age}" for age in range(oldest + 1)}
        assert by_age and all(math.isfinite(value) for value in by_age.values())
        assert by_age.get("vllm_kl/stale_0", 0.0) < 1e-6


def test_an_asynchronous_run_is_bounded_and_balanced(
    ray_cluster: None, given: dict, tmp_path: Path, trainers: list[PPOTrainerAsync]
) -> None:
    steps = run(
        FLAGS + "--num_episodes 1 --eval_temperature 0 --eval_n_samples_per_prompt 1 "
        "--eval_steps 2 --async_queue_size 2",
        eval_dataset=given["prompt_data"],
        **given,
    )
    check(steps, trainers[0], limit=2)
    assert all(step["mixed_version_ratio"] == 0 for step in steps)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert any("eval/eval_odd_pass1" in record for record in records)
    assert sorted(trained_rows(tmp_path / "run")) == sorted([*range(1, 12)] * 2)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(
    ("title", "who"), [("LLMRayActor", "vllm-0"), ("PolicyModelActor", "actor rank 0 of 1")]
)
def test_a_killed_process_is_named_and_the_same_command_goes_on(
    ray_cluster: None,
    given: dict,
    trainers: list[PPOTrainerAsync],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    title: str,
    who: str,
) -> None:
    flags = FLAGS + "--num_episodes 2 --save_steps 2 --partial_rollout --async_queue_size 2 "
    flags += "--max_restarts 0"
    given["ckpt_path"] = given["save_path"] / "ckpt"
    struck_at, num_settled, settle = list[float](), itertools.count(1), RolloutQueue.settle

    def settle_and_strike(queue: RolloutQueue, trained_groups: set[int]) -> None:
        settle(queue, trained_groups)
        if next(num_settled) == 3:
            [process] = workers(title)
            process.kill()
            struck_at.append(time.monotonic())

    monkeypatch.setattr(RolloutQueue, "settle", settle_and_strike)
    with pytest.raises(SystemExit) as stopped:
        run(flags, **given)
    assert time.monotonic() - struck_at[0] < 30
    said = capsys.readouterr().err
    assert stopped.value.code == 3 and f"error: {who}" in said and "died" in said, said
    steps = run(f"{flags} --load_checkpoint", **given)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert max(histogram(steps)) <= 2
    ledger = trainers[-1].sampler.ledger
    assert ledger.outcomes == {"trained": 22} and not ledger.pending
    assert len(trained_rows(given["save_path"])) == 44
