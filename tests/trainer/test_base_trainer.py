"""A run that is stopped and resumed is the run that was not: weights, samples, rates and log lines,
bit for bit.
"""

import json
import os
import resource
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO

import pytest
import torch

from openrlhf.commands.train_supervised import Checkpointer
from openrlhf.config.common import DeepSpeedConfig
from openrlhf.distributed.checkpoints import open_checkpoints
from openrlhf.distributed.collectives import shut_down
from openrlhf.distributed.folders import Write, verify
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.errors import CheckpointError
from openrlhf.utils import stopping
from openrlhf.utils.callbacks import Callback
from openrlhf.utils.metrics import STDERR
from tests.distributed.spawn import run_ranks
from tests.helpers.processes import wait_until
from tests.trainer.fakes import EndsAt
from tests.trainer.small_run import (
    IDENTITY,
    NUM_STEPS,
    config_of,
    make_trainer,
    run,
    weights_of,
)

ZERO2 = {"zero_stage": 2, "adam_offload": True}  # without it one rank would run stage 0
# Ranks -> options and the step at which the first start is stopped.
CASES = {
    2: {"zero2": (ZERO2, 2), "zero3": ({"zero_stage": 3}, 3)},
    1: {"zero0": ({"zero_stage": 0}, 2)},
}


def fail_to_save(options: dict, root: Path) -> dict:
    """The last rank cannot write more than a few bytes, three times."""
    checkpoints = open_checkpoints(config_of(root, save_steps=1), IDENTITY)
    trainer = make_trainer(options, root / "run", None, 1)
    checkpointer = Checkpointer(trainer, checkpoints)
    checkpoints.save(checkpointer)
    answers: list[object] = [bool(checkpoints.wait_for_save())]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    take_states = trainer.engine.take_states

    def take_for_full_disk(folder: Path) -> Write:
        write = take_states(folder)

        def write_to_full_disk() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            try:
                write()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

        return write_to_full_disk

    if trainer.strategy.topology.rank == trainer.strategy.topology.world_size - 1:
        trainer.engine.take_states = take_for_full_disk  # type: ignore[method-assign]
    trainer.global_step = 1
    for _ in range(3):
        checkpoints.save(checkpointer)
        try:
            answers.append(bool(checkpoints.wait_for_save()))
        except CheckpointError as error:
            answers.append(str(error))
    latest = checkpoints.store.latest()
    names = sorted(path.name for path in root.iterdir() if path.name != "run")
    is_main = trainer.strategy.is_main
    return {
        "answers": answers,
        "latest": latest and latest.step,
        "names": names,
        "is_main": is_main,
    }


def save_slowly(options: dict, root: Path) -> list[object]:
    """Train while the last rank does not get on with its file of step 2."""
    checkpoints = open_checkpoints(config_of(root, save_steps=2), IDENTITY)
    trainer = make_trainer(options, root / "run", None, 1)
    checkpointer = Checkpointer(trainer, checkpoints)
    is_last = trainer.strategy.topology.rank == trainer.strategy.topology.world_size - 1
    take_states, found = trainer.engine.take_states, list[object]()

    def take_slowly(folder: Path) -> Write:
        write = take_states(folder)

        def write_slowly() -> None:
            wait_until(lambda: trainer.global_step > 3 or not is_last)
            write()

        return write_slowly

    class Saves(Callback):
        """Notes what is there after each step, and what is told of."""

        def on_step_end(self, trainer: object, step: int, metrics: object) -> None:
            found.append((step, checkpoints.store.steps()))

        def on_save(self, trainer: object, step: int, path: Path) -> None:
            found.append((path.name, step, (path / "state.json").is_file()))

    trainer.engine.take_states = take_slowly  # type: ignore[method-assign]
    trainer.callbacks = [Saves()]
    trainer.fit(after_step=checkpointer.after_step)
    return found


def refusal(options: dict, root: Path) -> str:
    """What the resume of another world's checkpoint says; empty where it works."""
    config = config_of(root / "ckpt", load_enable=True)
    checkpoints = open_checkpoints(config, IDENTITY)
    trainer = make_trainer(options, root / "other-world", None, 1)
    try:
        Checkpointer(trainer, checkpoints).resume()
    except CheckpointError as error:
        return str(error)
    return ""


def run_two_ranks(folder: Path) -> dict:
    results = run_cases(folder, 2)
    results["full disk"] = fail_to_save(ZERO2, folder / "full")
    results["slow disk"] = save_slowly(ZERO2, folder / "slow")
    root, options = folder / "zero3", {"zero_stage": 3}
    config = config_of(root / "stopped" / "ckpt", load_enable=True, save_steps=1)
    results["finished"] = run(options, root / "stopped", config)
    return results


def run_one_rank(folder: Path) -> dict:
    results = run_cases(folder, 1)
    results["refusals"] = [
        refusal(options, folder / case / "stopped") for case, (options, _) in CASES[2].items()
    ]
    return results


def run_cases(folder: Path, size: int) -> dict:
    results: dict = {}
    for case, (options, stop) in CASES[size].items():
        root = folder / case
        results[case, "straight"] = run(options, root / "straight", config_of(root / "none"))
        # The start that is stopped; the next begins with another model and other random numbers.
        root = root / "stopped"
        config = config_of(root / "ckpt", save_steps=stop, load_enable=True, save_hf=True)
        starts = ({"stop": stop}, {"seed": 99})
        results[case, "stopped"] = [run(options, root, config, **start) for start in starts]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def worlds(folder: Path) -> dict[int, list[dict]]:
    """Two ranks first: one rank then tries to go on from their checkpoints."""
    return {2: run_ranks(run_two_ranks, 2, folder), 1: run_ranks(run_one_rank, 1, folder)}  # type: ignore[dict-item]


def metrics_of(folder: Path) -> list[dict]:
    """The log without what a clock decides."""
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    clocked = ("time", "tokens_per_s", "load_per_core", "memory/peak_gib")
    return [
        {k: v for k, v in r.items() if k not in clocked and "timing/" not in k} for r in records
    ]


@pytest.mark.parametrize(("size", "case"), [(1, "zero0"), (2, "zero2"), (2, "zero3")])
def test_a_resumed_run_is_bitwise_the_run_that_was_not_stopped(
    worlds: dict, folder: Path, size: int, case: str
) -> None:
    _, stop = CASES[size][case]
    for results in worlds[size]:
        straight, (first, second) = results[case, "straight"], results[case, "stopped"]
        assert (first["resume_step"], second["resume_step"]) == (None, stop)
        assert first["seen"] + second["seen"] == straight["seen"]
        assert first["lrs"] + second["lrs"] == straight["lrs"]
        assert all(map(torch.equal, second["weights"], straight["weights"]))
        assert not any(map(torch.equal, first["weights"], second["weights"]))
        assert second["random"] == straight["random"]
        assert second["num_updates"] == NUM_STEPS
        seen = [row for rows in straight["seen"] for row in rows]
        assert sorted(seen[:21]) == sorted(seen[21:]) == list(range(21))
    assert metrics_of(folder / case / "stopped") == metrics_of(folder / case / "straight")


def test_checkpoints_are_of_every_interval_and_the_end(worlds: dict, folder: Path) -> None:
    assert worlds[1][0]["zero0", "stopped"][1]["steps"] == [2, 4, 6]
    verify(folder / "zero2" / "stopped" / "ckpt" / "global_step4_hf")
    state = json.loads((folder / "zero2/stopped/ckpt/global_step4/state.json").read_text())
    assert state["run"]["place"] == "step 4, epoch 2, 8 samples into it"
    assert state["data"] == asdict(IDENTITY)


def test_two_ranks_agree_on_what_is_finished_and_what_failed(worlds: dict) -> None:
    for results in worlds[2]:
        again = results["finished"]
        assert (again["resume_step"], again["seen"], again["steps"]) == (6, [], [3, 6])
        assert all(map(torch.equal, again["weights"], results["zero3", "straight"]["weights"]))
        # A save that fails on one rank fails on all, and three in a row stop the run.
        done, first, second, third = results["full disk"]["answers"]
        assert (done, first, second) == (True, False, False)
        assert "failure 3 in a row" in third and "step 1" in third
        assert results["full disk"]["latest"] == 0
        assert results["full disk"]["names"] == ["global_step0"]


def test_training_goes_on_while_a_rank_writes_and_the_next_save_waits_for_it(worlds: dict) -> None:
    for results in worlds[2]:
        found = results["slow disk"]
        # The file of step 2 is written once step 4 is done, whose own save waits for that.
        assert found[:5] == [(1, []), (2, []), (3, []), (4, []), ("global_step2", 2, True)]
        assert [each[0] for each in found if len(each) == 3] == [
            f"global_step{step}" for step in (2, 4, 6)
        ]


def test_shards_of_another_number_of_ranks_are_refused_in_words(worlds: dict) -> None:
    for text in worlds[1][0]["refusals"]:
        assert "was written by 2 ranks" in text and "or start 2 ranks" in text


def die_while_saving(folder: Path) -> None:
    """Train two ranks; the second is killed in the middle of its shard of step 4."""
    root, options = folder / "killed", ZERO2
    strategy = DeepSpeedStrategy(DeepSpeedConfig())
    strategy.setup()
    save = torch.save

    def torn_save(state: object, path: IO[bytes]) -> None:
        save(state, path)
        if "global_step4" in str(path) and strategy.topology.rank == 1:
            os.truncate(path.name, 100)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = torn_save
    run(options, root, config_of(root / "ckpt", save_steps=2))


def resume_after_death(folder: Path) -> dict:
    strategy = DeepSpeedStrategy(DeepSpeedConfig())
    strategy.setup()
    root, options = folder / "killed", ZERO2
    config = config_of(root / "ckpt", save_steps=2, load_enable=True)
    results = {
        "resumed": run(options, root, config, seed=99),
        "straight": run(options, folder / "straight", config_of(folder / "none")),
    }
    shut_down()
    return results


@pytest.mark.faults
def test_a_rank_killed_while_it_saves_costs_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessExitedException):
        run_ranks(die_while_saving, 2, tmp_path)
    assert (tmp_path / "killed" / "ckpt" / "tmp-global_step4").is_dir()
    for results in run_ranks(resume_after_death, 2, tmp_path):
        assert results["resumed"]["resume_step"] == 2
        assert results["resumed"]["steps"] == [2, 4, 6]
        weights = results["resumed"]["weights"], results["straight"]["weights"]
        assert all(map(torch.equal, *weights))
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "straight")


@pytest.mark.parametrize(("asked_at", "saved"), [(2, [2]), (3, [2, 3])])
def test_a_run_that_is_asked_to_stop_waits_for_the_save_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_at: int, saved: list[int]
) -> None:
    checkpoints = open_checkpoints(config_of(tmp_path / "ckpt", save_steps=2), IDENTITY)
    trainer = make_trainer({"zero_stage": 0}, tmp_path / "run", None, 1)
    take_states = trainer.engine.take_states

    def take_slowly(folder: Path) -> Write:
        write = take_states(folder)
        return lambda: (time.sleep(0.5), write())[1]

    trainer.engine.take_states = take_slowly  # type: ignore[method-assign]
    monkeypatch.setattr(stopping, "is_asked", lambda: trainer.global_step == asked_at)
    with pytest.raises(
        stopping.Interrupted, match=f"step {asked_at} is done, it was saved in {tmp_path}/ckpt"
    ):
        trainer.fit(after_step=Checkpointer(trainer, checkpoints).after_step)
    assert checkpoints.store.steps() == saved
    assert checkpoints.store.latest().step == asked_at  # type: ignore[union-attr]


def end_on_one_of_two(root: Path) -> list[float]:
    checkpoints = open_checkpoints(config_of(root), IDENTITY)
    trainer = make_trainer({"zero_stage": 3}, root / "run", checkpoints.resume_step, 1)
    topology = trainer.strategy.topology
    trainer.callbacks = [EndsAt(2 if topology.rank == topology.world_size - 1 else 99)]
    trainer.fit()
    return [len(trainer.seen), trainer.global_step, trainer.engine.update_ratio]


def test_ranks_end_together_when_one_is_told_to(tmp_path: Path) -> None:
    for num_seen, step, update_ratio in run_ranks(end_on_one_of_two, 2, tmp_path):
        assert (num_seen, step) == (2, 2)
        assert 1e-3 < update_ratio < 1  # measured on what each rank holds


def test_the_size_of_an_update_is_that_of_the_change_of_the_weights(tmp_path: Path) -> None:
    trainer = make_trainer({"zero_stage": 0}, tmp_path, None, 1)
    before = torch.cat([weights.flatten() for weights in weights_of(trainer)])
    metrics = trainer.train_step(range(8))
    after = torch.cat([weights.flatten() for weights in weights_of(trainer)])
    ratio = ((after - before).norm() / before.norm()).item()
    assert metrics["update_ratio"] == pytest.approx(ratio, rel=1e-5)
    assert ratio > 1e-3


def test_an_evaluation_in_one_micro_batch_has_a_standard_error_too(tmp_path: Path) -> None:
    trainer = make_trainer({}, tmp_path, None, 1)
    losses = []
    for size, max_tokens in ((1, None), (64, None), (64, 192)):
        trainer.batch_size, trainer.micro_batch_size, trainer.max_tokens = 64, size, max_tokens
        found = trainer.evaluate()
        losses.append(found["eval/loss"])
        assert 0.05 < found["eval/loss" + STDERR] / found["eval/loss"] < 0.5
    assert losses == pytest.approx(losses[:1] * 3)
