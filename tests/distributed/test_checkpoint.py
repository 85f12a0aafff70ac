"""A folder counts as a checkpoint only when it is whole; the newest that is whole is never lost."""

import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from openrlhf.cli import train_sft
from openrlhf.config.common import CheckpointConfig
from openrlhf.distributed import folders
from openrlhf.distributed.checkpoints import (
    MAX_FAILED_SAVES,
    CheckpointStore,
    DataIdentity,
    RunCheckpoints,
    open_checkpoints,
    random_state,
    set_random_state,
)
from openrlhf.distributed.folders import holding, verify
from openrlhf.errors import CheckpointError, ConfigError, DataError, EngineError, LostRankError
from openrlhf.utils.run_folder import HOLDER_FILE
from tests.helpers.processes import wait_until
from tests.tiny import write_jsonl
from tests.trainer.small_run import IDENTITY, config_of


def fill(folder: Path, text: str = "weights") -> Path:
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "shard.pt").write_text(text)
    (folder / "empty").write_text("")
    return folder


def make_store(root: Path, max_num: int = 3, max_gib: float = 1.0) -> CheckpointStore:
    return CheckpointStore(root, max_num=max_num, max_gib=max_gib)


def save(store: CheckpointStore, step: int, *, has_export: bool = False) -> None:
    states, export, _ = store.stage(step)
    (states / "shard.pt").write_text(f"weights of {step}")
    if has_export:
        export.mkdir()
        (export / "config.json").write_text("{}")
    store.commit(step, {"cursor": step})


def latest_step(store: CheckpointStore) -> int | None:
    saved = store.latest()
    return None if saved is None else saved.step


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: (path / "model" / "shard.pt").write_text("wei"),
    "flipped": lambda path: (path / "model" / "shard.pt").write_text("weighty"),
    "missing": lambda path: (path / "model" / "shard.pt").unlink(),
    "foreign file": lambda path: (path / "model" / "more.pt").write_text("x"),
    "link": lambda path: (path / "model" / "link.pt").symlink_to("/etc/passwd"),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "outside": lambda path: (path / "manifest.json").write_text(
        json.dumps({"files": {"../../x": ""}})
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture, damage: str
) -> None:
    store = make_store(tmp_path)
    for step in (1, 2):
        fill(store.stage(step)[0])
        store.commit(step, {"cursor": step})
    DAMAGES[damage](tmp_path / "global_step2")
    with pytest.raises(CheckpointError, match="global_step2"):
        verify(tmp_path / "global_step2")
    saved = store.latest()
    assert saved is not None and (saved.step, saved.state) == (1, {"cursor": 1})
    assert "global_step2 is damaged" in " ".join(capsys.readouterr().err.split())


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(moment: str, root: Path) -> None:
    """Save step 2 with an export and be killed at a moment of it."""
    store, rename = make_store(root), os.rename
    if moment == "between files":
        states, *_ = store.stage(2)
        (states / "shard.pt").write_text("half of")
        die()
    if moment == "before the rename":
        os.rename = die  # type: ignore[assignment]
    if moment == "between export and states":
        os.rename = lambda a, b: die() if not str(b).endswith("_hf") else rename(a, b)
    save(store, 2, has_export=True)


@pytest.mark.parametrize(
    "moment", ["between files", "before the rename", "between export and states"]
)
def test_a_save_that_is_killed_leaves_the_checkpoint_before(tmp_path: Path, moment: str) -> None:
    store = make_store(tmp_path)
    save(store, 1, has_export=True)
    process = multiprocessing.get_context("fork").Process(target=die_at, args=(moment, tmp_path))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert any(path.name.startswith("tmp-") for path in tmp_path.iterdir())
    assert latest_step(store) == 1
    store.remove_torn()
    assert not any(path.name.startswith("tmp-") for path in tmp_path.iterdir())
    store.set_aside(after_step=1)
    assert store.steps() == [1]
    save(store, 2, has_export=True)
    assert latest_step(store) == 2


@pytest.mark.parametrize(
    ("sizes", "max_kib", "left"),
    [
        ([5, 5, 5, 5], 100, [1, 2, 3]),
        ([5, 5, 5], 12, [1, 2]),
        ([1, 50, 5], 12, [2]),  # an old one is not kept for being small
        ([5, 500], 12, [1]),  # the newest stays, whatever its size
    ],
)
def test_the_oldest_beyond_the_budget_go(
    tmp_path: Path, sizes: list[int], max_kib: int, left: list[int]
) -> None:
    store = make_store(tmp_path, max_gib=max_kib / 1024**2)
    for step, size in enumerate(sizes):
        (store.stage(step)[0] / "shard.pt").write_bytes(bytes(1024 * size))
        store.commit(step, {})
    store.rotate()
    assert store.steps() == left


def test_a_run_may_keep_models_alone(tmp_path: Path) -> None:
    config = CheckpointConfig(path=str(tmp_path), save_hf=True, disable_ds=True, max_num=1)
    checkpoints = RunCheckpoints(config, DataIdentity("x", 1))
    for step in (1, 2):
        checkpoints.save(SimpleNamespace(global_step=step, state_dict=dict, export=fill))
        assert checkpoints.wait_for_save() == (step, tmp_path / f"global_step{step}_hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step2_hf"]


class Run:
    """A run at a step, whose states take the time to write that a test gives them."""

    def __init__(self, step: int, write: Callable[[Path], object]) -> None:
        self.global_step, self.write = step, write

    def state_dict(self) -> dict[str, int]:
        return {"step": self.global_step}

    def take(self, folder: Path) -> Callable[[], object]:
        return lambda: self.write(folder)


def saver(root: Path, **flags: bool) -> RunCheckpoints:
    config = CheckpointConfig(path=str(root), save_steps=1, **flags)
    return RunCheckpoints(config, DataIdentity("x", 1))


def test_a_save_goes_on_beside_the_run_and_counts_once_it_is_whole(tmp_path: Path) -> None:
    checkpoints, may_end = saver(tmp_path), threading.Event()

    def write(folder: Path) -> None:
        fill(folder)
        assert may_end.wait(20)

    run = Run(1, write)
    checkpoints.save(run)
    assert not checkpoints.is_written and not checkpoints.holds(run)
    assert checkpoints.store.steps() == [] and checkpoints.last() is None
    run.global_step = 2  # its state is that of step 1 all the same
    may_end.set()
    assert checkpoints.wait_for_save() == (1, tmp_path / "global_step1")
    assert checkpoints.last().state["run"] == {"step": 1}
    assert checkpoints.wait_for_save() is None and checkpoints.is_written


def test_a_save_under_way_is_waited_for_where_an_error_ends_the_run(tmp_path: Path) -> None:
    checkpoints = saver(tmp_path)

    def write(folder: Path) -> None:
        time.sleep(0.3)
        fill(folder)

    def break_down(step: int, error: Exception) -> None:
        with pytest.raises(type(error)), checkpoints.finishing():
            checkpoints.save(Run(step, write))
            raise error

    break_down(1, ValueError("a bug"))
    assert checkpoints.store.steps() == [1] and checkpoints.wait_for_save()
    break_down(2, EngineError("an engine is lost: the ranks, and what they write, are well"))
    assert checkpoints.store.steps() == [1, 2] and checkpoints.wait_for_save()
    break_down(3, LostRankError("a rank is lost, and may be in the save"))
    assert checkpoints.store.steps() == [1, 2]
    assert checkpoints.wait_for_save() is None  # nor does it count once the run has ended
    assert checkpoints.store.steps() == [1, 2]


def test_a_save_that_fails_behind_another_error_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoints = saver(tmp_path)

    def write(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match="a bug"), checkpoints.finishing():
        checkpoints.save(Run(4, write))
        raise ValueError("a bug")
    said = " ".join(capsys.readouterr().err.split())
    assert "checkpoint of step 4 was not saved: [Errno 28] No space left on device" in said


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("exp_avg")])
def test_any_error_behind_a_save_is_a_failed_save(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoints = saver(tmp_path)
    checkpoints.save(Run(1, fill))
    assert checkpoints.wait_for_save()

    def write(folder: Path) -> None:
        raise error

    checkpoints.save(Run(2, write))
    assert checkpoints.wait_for_save() is None
    said = " ".join(capsys.readouterr().err.split())
    what = f"[Errno 28] {error.args[1]}" if len(error.args) == 2 else "KeyError('exp_avg')"
    assert said == (
        f"warning: checkpoint of step 2 was not saved: {what} The last one is "
        f"{tmp_path}/global_step1. It is failure 1 of 3 in a row."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["global_step1"]


def test_a_save_that_does_not_end_is_named_and_has_failed_but_may_end_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("openrlhf.utils.progress.SAY_AFTER_S", 0.1)
    checkpoints, may_end = saver(tmp_path), threading.Event()
    checkpoints.limit_s = 0.5

    def write(folder: Path) -> None:
        fill(folder)
        assert may_end.wait(20)  # the disk takes no more

    checkpoints.save(Run(1, write))
    assert checkpoints.wait_for_save() is None
    said = " ".join(capsys.readouterr().err.split())
    what = f"the checkpoint of step 1, which is being written to {tmp_path}"
    assert f"warning: waited 0 s for {what}" in said
    assert "step 1 was not saved: it was not written in 0.5 s (3 times --rank_timeout_s): " in said
    assert said.endswith("There is no other one. It is failure 1 of 3 in a row.")
    checkpoints.save(Run(2, fill))  # not beside it
    may_end.set()
    wait_until(lambda: checkpoints.is_written)
    assert checkpoints.wait_for_save() == (1, tmp_path / "global_step1")
    assert checkpoints.num_failed == 0 and checkpoints.store.steps() == [1]


def test_a_disk_that_takes_no_more_is_waited_for_once_and_ends_the_run(tmp_path: Path) -> None:
    checkpoints, may_end = saver(tmp_path), threading.Event()
    checkpoints.limit_s = 0.1
    with pytest.raises(CheckpointError, match="failure 3 in a row"), checkpoints.finishing():
        checkpoints.save(Run(1, lambda folder: may_end.wait(20)))
        thread = checkpoints.under_way.thread
        assert (
            checkpoints.wait_for_save() is None and checkpoints.wait_for_save() is None
        )  # counted once
        checkpoints.limit_s = 3600
        for step in (2, 3):
            checkpoints.save(Run(step, fill))
            assert checkpoints.wait_for_save() is None
    may_end.set()  # what is written behind the end does not count
    thread.join(20)
    assert not thread.is_alive() and not list(tmp_path.iterdir())


def test_a_late_save_that_the_best_model_met_first_is_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoints, may_end = saver(tmp_path), threading.Event()
    checkpoints.limit_s = 0.1
    with pytest.raises(ValueError, match="a bug"), checkpoints.finishing():
        checkpoints.save(Run(1, lambda folder: may_end.wait(20)))
        assert not checkpoints.save_best(1, fill)
        capsys.readouterr()
        raise ValueError("a bug")
    named = "checkpoint of step 1 was not saved: it was not written in 0.1 s"
    assert named in " ".join(capsys.readouterr().err.split())
    assert checkpoints.wait_for_save() is None and checkpoints.num_failed == 1
    assert named in " ".join(capsys.readouterr().err.split())
    may_end.set()
    checkpoints.under_way.thread.join(20)
    assert (
        checkpoints.wait_for_save() is None and checkpoints.num_failed == 1
    )  # it is over, and counted


def test_a_late_save_that_was_counted_does_not_bring_up_the_loss_of_its_rank_again(
    tmp_path: Path,
) -> None:
    checkpoints, may_end = saver(tmp_path), threading.Event()
    checkpoints.limit_s = 0.1

    def write(folder: Path) -> None:
        may_end.wait(20)
        raise LostRankError("a rank is lost")

    checkpoints.save(Run(1, write))
    assert checkpoints.wait_for_save() is None and checkpoints.num_failed == 1
    may_end.set()
    checkpoints.under_way.thread.join(20)
    assert checkpoints.wait_for_save() is None and checkpoints.num_failed == 1
    assert checkpoints.under_way is None


def test_what_lost_ranks_left_takes_no_room_of_the_next_save(tmp_path: Path) -> None:
    checkpoints = saver(tmp_path)

    def write(folder: Path) -> None:
        fill(folder)
        raise LostRankError("a rank is lost")

    checkpoints.save(Run(1, write))
    with pytest.raises(LostRankError):
        checkpoints.wait_for_save()
    assert list(tmp_path.glob("tmp-*"))
    checkpoints.save(Run(2, fill))
    assert checkpoints.wait_for_save() and not list(tmp_path.glob("tmp-*"))


def die_with_two_names(root: Path) -> None:
    """Save step 1 again, and be killed when the old one has lost its name."""
    rename, calls = os.rename, list[object]()

    def once(old: object, new: object) -> None:
        calls.append(rename(old, new) if not calls else die())

    os.rename = once  # type: ignore[assignment]
    save(make_store(root, max_num=1), 1)


def test_a_step_that_is_saved_again_is_not_lost_by_a_kill(tmp_path: Path) -> None:
    store = make_store(tmp_path, max_num=1)
    save(store, 1)
    process = multiprocessing.get_context("fork").Process(
        target=die_with_two_names, args=(tmp_path,)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and latest_step(store) is None
    store.remove_torn()
    assert latest_step(store) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["global_step1"]


def save_for_ever(root: Path, step: int) -> None:
    """Train without computing anything: every step is saved beside the next one."""
    checkpoints = saver(root)
    checkpoints.store.remove_torn()
    while True:
        step += 1
        checkpoints.wait_for_save()
        checkpoints.save(Run(step, partial(fill, text=f"weights of {step}" * 1000)))


@pytest.mark.faults
def test_there_is_a_whole_checkpoint_after_each_of_fifty_kills(tmp_path: Path) -> None:
    store, draw, num_torn, step = make_store(tmp_path), random.Random(0), 0, 0
    for _ in range(50):
        context = multiprocessing.get_context("fork")
        process = context.Process(target=save_for_ever, args=(tmp_path, step))
        process.start()
        wait_until(lambda last=step: (store.steps() or [0])[-1] > last)
        time.sleep(draw.random() / 20)
        process.kill()
        process.join()
        num_torn += any(tmp_path.glob("tmp-*"))
        before, saved = step, store.latest()
        assert saved is not None and saved.step > before
        step = saved.step
        assert saved.state["run"] == {"step": step}
        shard = saved.path / "model" / "shard.pt"
        assert shard.read_text() == f"weights of {step}" * 1000
    assert num_torn > 10  # in the middle of a save


def test_a_save_without_room_is_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    checkpoints = saver(tmp_path)
    with pytest.raises(ConfigError, match=rf"^--ckpt_path {tmp_path} has .* free, and a check"):
        checkpoints.check_room(10**18, 0)
    for _ in range(MAX_FAILED_SAVES - 1):
        checkpoints.save(Run(1, fill))
        assert checkpoints.wait_for_save() is None
    said = " ".join(capsys.readouterr().err.split())
    assert "checkpoint of step 1 was not saved: it takes 1000000000.0 GB, " in said
    checkpoints.save(Run(1, fill))
    with pytest.raises(CheckpointError, match="failure 3 in a row"):
        checkpoints.wait_for_save()
    assert not list(tmp_path.iterdir())


def test_logs_and_rollouts_may_grow_beside_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "free_bytes", lambda path: 1050)
    checkpoints = saver(tmp_path)
    checkpoints.check_room(1000, 7)
    checkpoints.save(Run(1, fill))
    assert checkpoints.wait_for_save()
    with pytest.raises(ConfigError, match="; 5% more must be free, for logs and rollouts"):
        checkpoints.check_room(1001, 0)
    checkpoints.save(Run(2, fill))
    assert checkpoints.wait_for_save() is None


@pytest.mark.parametrize(
    ("flags", "needed"), [({}, 3000), ({"save_hf": True}, 3700), ({"disable_ds": True}, 0)]
)
def test_the_room_asked_for_is_that_of_what_a_checkpoint_holds(
    flags: dict[str, bool], needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saver(tmp_path, **flags)
    monkeypatch.setattr(folders, "free_bytes", lambda path: math.ceil(1.05 * needed))
    checkpoints.check_room(3000, 700)
    assert checkpoints.num_bytes == needed
    if needed:
        monkeypatch.setattr(folders, "free_bytes", lambda path: 1.05 * needed - 1)
        with pytest.raises(ConfigError, match="a checkpoint takes"):
            checkpoints.check_room(3000, 700)


def test_states_are_written_at_once_where_a_copy_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = torch.zeros(1000)

    def taken(free: int) -> float:
        monkeypatch.setattr(folders, "free_memory", lambda: free)
        write = folders.take_tensors({"weights": weights}, tmp_path / "file.pt", num_sharing=2)
        weights.add_(1)
        write()
        return torch.load(tmp_path / "file.pt")["weights"].max().item()

    assert taken(16_000) == 0
    assert capsys.readouterr().err == ""
    assert taken(15_999) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: the step waits while {tmp_path}/file.pt is written: copies ")
    folders.take_tensors({"weights": weights}, tmp_path / "file.pt", num_sharing=2, is_first=False)
    assert capsys.readouterr().err == ""


def test_copies_of_several_models_on_a_node_count_together(tmp_path: Path) -> None:
    weights = {"weights": torch.zeros(1000)}

    def is_copied(free_now: int) -> bool:
        write = folders.take_tensors(
            weights, tmp_path / "f.pt", free_at_start=16_000, free_now=free_now
        )
        return write is not folders.nothing

    assert is_copied(free_now=12_000)  # a copy of 4,000 bytes is there already
    assert not is_copied(free_now=11_999)


UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(
    ("groups", "limits", "room"),
    [
        ("0::/\n", {"": "max"}, None),
        ("0::/\n", {"": "10000"}, 8000),
        # A job of SLURM is limited above the step that the process is in.
        ("0::/job_1/step_0\n", {"job_1": "10000", "job_1/step_0": "max"}, 8000),
        ("0::/job_1/step_0\n", {"job_1": "10000", "job_1/step_0": "7000"}, 5000),
        ("9:cpu:/a\n4:memory:/a/b\n0::/\n", {"memory/a": "6000", "memory": UNLIMITED}, 4000),
        # A container of version 1 sees its own group as the root, and the path of the host.
        ("4:memory:/docker/1f\n", {"memory": "6000"}, 4000),
        ("4:memory:/\n", {"memory": UNLIMITED}, None),
    ],
)
def test_free_memory_is_that_of_the_container_or_job(
    groups: str, limits: dict, room: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "CGROUPS", tmp_path)
    monkeypatch.setattr(folders, "OWN_CGROUPS", tmp_path / "own")
    whole = folders.free_memory()
    (tmp_path / "own").write_text(groups)
    for name, limit in limits.items():
        is_first_version = name.startswith("memory")
        stat = (
            "total_rss 1500\ntotal_shmem 500\nrss 9" if is_first_version else "anon 1500\nshmem 500"
        )
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "memory.stat").write_text(f"{stat}\nfile 9000\n")
        file = "memory.limit_in_bytes" if is_first_version else "memory.max"
        (tmp_path / name / file).write_text(f"{limit}\n")
    assert folders.free_memory() == (room or pytest.approx(whole, rel=0.2))


def test_random_numbers_go_on_through_json() -> None:
    import random

    import numpy as np

    def draw() -> tuple:
        return random.gauss(0, 1), np.random.standard_normal(), torch.randn(3).tolist()

    draw()
    state = json.loads(json.dumps(random_state()))
    expected = [draw(), draw()]
    set_random_state(state)
    assert [draw(), draw()] == expected


HOLD = """
import sys, time
from pathlib import Path
from openrlhf.distributed.folders import holding
with holding(Path(sys.argv[1]), "--save_path"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_is_refused_while_its_holder_lives_and_free_once_it_is_killed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError) as refused, holding(tmp_path, "--save_path"):
            pass
        assert str(refused.value).startswith(
            f"--save_path {tmp_path} is in use: process {process.pid} on "
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
        with holding(tmp_path, "--save_path"):
            assert json.loads((tmp_path / HOLDER_FILE).read_text())["pid"] == os.getpid()
    assert not (tmp_path / HOLDER_FILE).exists()


@pytest.fixture
def words(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a b", "completion": "c d"}] * 8)
    flags = "--train_batch_size 4 --micro_train_batch_size 4 --max_epochs 1"
    named = {"pretrain": tiny_model_dir, "dataset": tmp_path / "rows.jsonl"}
    return [*(w for name, v in named.items() for w in (f"--{name}", str(v))), *flags.split()]


def test_the_run_before_is_moved_aside_with_its_model_and_said(words, tmp_path, capsys):
    run, model = tmp_path / "run", "model.safetensors"
    train_sft.main([*words, "--save_path", str(run)])
    first = (run / model).read_bytes()
    (run / "rollouts").mkdir()  # as a run of RL leaves it
    (run / "rollouts" / "step_000009.parquet").write_bytes(b"")
    (run / "notes.txt").write_text("mine")
    train_sft.main([*words, "--save_path", str(run), "--learning_rate", "1e-3"])
    aside = run / "aside-1"
    said = capsys.readouterr().out
    assert f"the model and the records of the run before in {run} were moved to {aside}" in said
    assert (aside / model).read_bytes() == first != (run / model).read_bytes()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (run / "rollouts").exists() and (aside / "rollouts").is_dir()
    assert (run / "notes.txt").exists() and (run / "ended.json").exists()


def test_a_model_that_the_new_run_starts_from_stays_where_it_is(words, tmp_path, capsys):
    run = tmp_path / "run"
    train_sft.main([*words, "--save_path", str(run)])
    train_sft.main([*words, "--save_path", str(run), "--pretrain", str(run)])
    assert f"the records of the run before in {run}" in capsys.readouterr().out
    assert (run / "model.safetensors").exists()
    assert {path.name for path in (run / "aside-1").iterdir()} == {
        *("config.yaml", "ended.json", "metrics.jsonl", "report.html", "curves.png"),
    }


def saved_state(root: Path) -> CheckpointConfig:
    """A checkpoint root that holds step 4 of a run over IDENTITY."""
    config = config_of(root, load_enable=True, save_steps=2)
    checkpoints = open_checkpoints(config, IDENTITY)
    checkpoints.store.stage(4)
    checkpoints.store.commit(4, {"run": {}, "data": asdict(IDENTITY)})
    return config


def test_other_data_are_refused(tmp_path: Path) -> None:
    config = saved_state(tmp_path)
    with pytest.raises(DataError, match="21 samples then, 21 now"):
        open_checkpoints(config, replace(IDENTITY, fingerprint="edited"))
    assert open_checkpoints(config, IDENTITY).resume_step == 4


def test_a_run_does_not_go_on_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    root, first, second = tmp_path / "ckpt", tmp_path / "first", tmp_path / "second"
    config = config_of(root, load_enable=True, save_steps=2, output_dir=str(first))
    store = open_checkpoints(config, IDENTITY).store
    first.mkdir()
    store.stage(4)
    state = {"run": {}, "data": asdict(IDENTITY), "run_dir": str(first), "root": str(store.root)}
    store.commit(4, state)
    assert open_checkpoints(config, IDENTITY).resume_step == 4
    other = config.model_copy(update={"output_dir": str(second)})
    with pytest.raises(
        ConfigError, match=rf"is of the run in {first}, not of --save_path {second}"
    ):
        open_checkpoints(other, IDENTITY)
    shutil.copytree(root, tmp_path / "copy")
    copied = other.model_copy(update={"path": str(tmp_path / "copy")})
    assert open_checkpoints(copied, IDENTITY).resume_step == 4
    first.rename(second)  # a run folder that was moved
    assert open_checkpoints(other, IDENTITY).resume_step == 4


def test_a_new_run_does_not_mix_with_the_checkpoints_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = saved_state(tmp_path)
    checkpoints = open_checkpoints(config.model_copy(update={"load_enable": False}), IDENTITY)
    assert checkpoints.resume_step is None
    assert checkpoints.find(4) is None
    assert "were moved to" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "aside-1" / "global_step4").is_dir()
    assert open_checkpoints(config, IDENTITY).resume_step is None
    assert "starting new" in capsys.readouterr().out


def test_one_best_model_stands_and_a_failed_one_costs_nothing(tmp_path: Path, capsys) -> None:
    saver = RunCheckpoints(CheckpointConfig(path=str(tmp_path)), DataIdentity("x", 1))
    store = saver.store

    def export(path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text("{}")

    def fail(path: Path) -> None:
        export(path)
        raise OSError("disk full")

    assert saver.save_best(3, export)
    assert saver.save_best(5, export)
    assert not saver.save_best(7, fail)
    assert "step 7) was not saved: disk full" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["best_global_step5_hf"]
    aside = store.set_best_aside()
    assert aside is not None and store.find(5) is None
    assert (aside / "best_global_step5_hf" / "config.json").is_file()


def test_a_best_model_that_is_not_written_for_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("openrlhf.utils.progress.SAY_AFTER_S", 0.1)
    assert saver(tmp_path).save_best(3, lambda path: time.sleep(0.3) or path.mkdir())  # type: ignore[func-returns-value]
    said = " ".join(capsys.readouterr().err.split())
    assert f"waited 0 s for the checkpoint of step 3, which is being written to {tmp_path}" in said


def best_of(root: Path, step: int) -> Path:
    path = root / f"best_global_step{step}_hf"
    path.mkdir()
    return path


@pytest.mark.parametrize(("step", "is_moved"), [(2, True), (5, False)])
def test_a_run_that_goes_back_moves_its_later_checkpoints_and_best_model_aside(
    tmp_path: Path, step: int, is_moved: bool
) -> None:
    checkpoints = saver(tmp_path)
    for number in (2, 4, 6):
        save(checkpoints.store, number)
    best_of(tmp_path, 5)
    assert checkpoints.go_back(step) == is_moved
    assert checkpoints.store.steps() == [number for number in (2, 4) if number <= step]
    assert (checkpoints.store.best() is None) == is_moved


def test_a_run_that_saves_nothing_leaves_the_checkpoints_of_others_where_they_are(
    tmp_path: Path,
) -> None:
    """All runs have the same checkpoint root unless one is named."""
    save(make_store(tmp_path), 5)
    best_of(tmp_path, 5)
    checkpoints = RunCheckpoints(CheckpointConfig(path=str(tmp_path)), DataIdentity("x", 1))
    assert not checkpoints.go_back(0)
    assert checkpoints.store.steps() == [5] and checkpoints.store.best() is not None


def test_ranks_go_back_to_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    checkpoints = saver(tmp_path)
    for step in (1, 2):
        checkpoints.save(Run(step, fill))
        checkpoints.wait_for_save()
    DAMAGES["flipped"](tmp_path / "global_step2")
    saved = checkpoints.last()
    assert saved is not None and saved.step == 1
    DAMAGES["flipped"](tmp_path / "global_step1")
    with pytest.raises(CheckpointError, match=r"global_step2.*There is no other checkpoint"):
        checkpoints.last()
