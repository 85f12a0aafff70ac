"""What a reward function starts counts as its own: processes and memory have bounds."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from openrlhf.errors import RewardError
from openrlhf.rewards import family
from openrlhf.rewards.base import RewardBatch
from openrlhf.rewards.family import MORE_TASKS, FamilyWatch, TaskLimit
from openrlhf.rewards.process_pool import FunctionPool, PoolSettings
from openrlhf.rewards.worker_process import WorkerLimits
from openrlhf.utils.processes import (
    MARK_VARIABLE,
    ProcessTable,
    end_marked,
    joint_gib,
    marked,
    new_mark,
    num_tasks,
    process_limit,
    resident_gib,
)

# The label says what the function does; its copies note themselves in a file, so that a test that
# fails cannot fill the machine.
CODE = """
    import os, resource, subprocess, sys, time

    from openrlhf.rewards import family

    family.RENEW_S = 0.0
    AT_IMPORT, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    MAX_COPIES = 1000
    NOTES = os.open("NOTES", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    TAKE = "import os, time; x = os.urandom(100 * 2**20); time.sleep(1e6)"

    def fork_without_end(leave):
        while True:
            if os.fork() == 0 and leave: os.setsid()
            os.write(NOTES, b".")
            if os.fstat(NOTES).st_size > MAX_COPIES: time.sleep(1e6)

    def reward_func(queries, prompts, labels):
        word = labels[0]
        if word == "bomb": fork_without_end(False)
        if word == "bomb of sessions": fork_without_end(True)
        if word == "large children":
            children = [subprocess.Popen([sys.executable, "-c", TAKE]) for _ in range(4)]
            time.sleep(1e6)
        if word == "copies":
            kept = os.urandom(100 * 2**20)
            pids = [os.fork() or (time.sleep(1.5), os._exit(0)) for _ in range(6)]
            for pid in pids: os.waitpid(pid, 0)
        if word == "limit":
            soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
            resource.setrlimit(resource.RLIMIT_NPROC, (77, hard))
            return {"rewards": [float(soft)], "extra_logs": {"at import": float(AT_IMPORT)}}
        return [float(len(q)) for q in queries]
"""


def pool_of(folder: Path, **limits: float) -> FunctionPool:
    path = folder / "my_reward.py"
    path.write_text(textwrap.dedent(CODE).replace('NOTES"', f'{folder}/notes"'))
    settings = PoolSettings(num_workers=1, limits=WorkerLimits(**limits))  # type: ignore[arg-type]
    return FunctionPool(path, settings)


def batch_of(word: str) -> RewardBatch:
    return RewardBatch(["qq"], ["p"], ["r"], [word], sample_ids=["step1/0/0"])


def wait_until(is_true: Callable[[], bool], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_true()


@pytest.mark.parametrize("word", ["bomb", pytest.param("bomb of sessions", marks=pytest.mark.slow)])
def test_a_function_that_forks_without_end_is_ended_and_the_next_batch_answered(
    tmp_path: Path, word: str
) -> None:
    with closing(pool_of(tmp_path, timeout_s=60)) as pool:
        mark = pool._workers[0].mark
        start = time.monotonic()
        with pytest.raises(RewardError) as caught:
            pool.score(batch_of(word))
        assert time.monotonic() - start < 15  # of the 60 s that it may take; forks slow all down
        assert (
            f"{tmp_path}/my_reward.py: the reward function ran more than 256 processes at once; "
            "serve what needs as many with --remote_rm_url http://... while it scored sample "
            "step1/0/0. Its worker was replaced." in str(caught.value)
        )
        assert wait_until(lambda: not marked(mark))
        assert pool.score(batch_of("good")).rewards.tolist() == [2.0]


def test_memory_of_what_the_function_starts_counts(tmp_path: Path) -> None:
    with closing(pool_of(tmp_path, timeout_s=60, memory_gib=0.35)) as pool:
        mark = pool._workers[0].mark
        with pytest.raises(RewardError) as caught:
            pool.score(batch_of("large children"))
        assert "took more than 0.35 GiB with the 4 processes that it started" in str(caught.value)
        assert "(--reward_memory_gib)" in str(caught.value)
        assert wait_until(lambda: not marked(mark))


@pytest.mark.slow
def test_memory_that_copies_of_the_function_share_counts_once(tmp_path: Path) -> None:
    with closing(pool_of(tmp_path, timeout_s=60, memory_gib=0.35)) as pool:  # 7 times 0.1 GiB
        assert pool.score(batch_of("copies")).rewards.tolist() == [2.0]


def test_looks_are_as_seldom_as_they_cost_and_serve_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow:
        num_made = 0

        def __init__(self) -> None:
            Slow.num_made += 1
            end_s = time.thread_time() + 0.05
            while time.thread_time() < end_s:
                pass

        def family(self, pid: int) -> list[int]:
            return [pid]

    monkeypatch.setattr(family, "ProcessTable", Slow)
    monkeypatch.setattr(family, "FIRST_LOOK_S", 0.1)
    monkeypatch.setattr(family, "LOOK_S", 0.01)
    monkeypatch.setattr(family, "CENSUS", family.Census())
    watches = [FamilyWatch(pid, max_processes=0, max_gib=1e6) for pid in range(8)]
    assert [watch.excess() for watch in watches] == [None] * 8
    assert Slow.num_made == 0  # a call that is over by now costs nothing
    time.sleep(0.1)
    for watch in watches:
        assert str(watch.excess()).startswith("ran more than 0 processes at once")
    assert Slow.num_made == 1
    start = time.monotonic()
    assert wait_until(lambda: (watches[0].excess(), Slow.num_made)[1] == 2, 30)
    assert time.monotonic() - start > 0.7  # 20 times 0.05 s after the first


TREE = """
import os, subprocess, sys
def leaf(**settings):
    return subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL, **settings).pid
if len(sys.argv) > 1:
    print(leaf(), leaf(start_new_session=True), flush=True)
    os._exit(0)  # the first has lost its parent, the second has left the session too
words = [sys.executable, sys.argv[0], "left"]
lost = subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout.split()
print(leaf(), leaf(start_new_session=True), *lost, flush=True)
sys.stdin.read()
"""


def test_a_family_is_what_kept_its_parent_or_its_session(tmp_path: Path) -> None:
    (tmp_path / "tree.py").write_text(TREE)
    mark = new_mark()
    top = subprocess.Popen(
        [sys.executable, str(tmp_path / "tree.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], MARK_VARIABLE: mark},
        start_new_session=True,
    )
    with top, ended_at_the_end(top):
        assert top.stdout is not None
        child, leader, orphan, stranger = map(int, top.stdout.readline().split())
        table = ProcessTable()
        assert table.family(top.pid) == sorted([top.pid, child, leader, orphan])
        assert table.family(leader) == [leader]
        assert sorted(marked(mark)) == sorted([top.pid, child, leader, orphan, stranger])
        end_marked(mark, but=top.pid)
        assert marked(mark) == [top.pid]


@contextmanager
def ended_at_the_end(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


def test_what_processes_share_is_counted_once() -> None:
    kept = os.urandom(200 * 2**20)
    pids = [os.fork() or (time.sleep(20), os._exit(0)) for _ in range(3)]
    try:
        alone = resident_gib(os.getpid())
        assert joint_gib([os.getpid(), *pids]) < alone + 0.1
        assert sum(map(resident_gib, [os.getpid(), *pids])) > alone + 3 * 0.19
        assert len(kept) == 200 * 2**20
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def test_a_worker_may_start_some_thousand_processes_more_than_the_user_has(tmp_path: Path) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    with closing(pool_of(tmp_path)) as pool:
        results = [pool.score(batch_of("limit")) for _ in range(2)]
    most = num_tasks() + MORE_TASKS
    expected = most if soft == resource.RLIM_INFINITY else min(soft, most)
    found = [result.rewards.item() for result in results]
    assert all(abs(limit - expected) < 1000 for limit in found)  # others start and end
    assert results[0].extra_logs["at import"].item() == float(soft)


def test_a_limit_at_which_nothing_can_be_started_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    monkeypatch.setattr(family, "process_limit", lambda more: 12345)
    monkeypatch.setattr(family, "_can_start", lambda: False)
    with TaskLimit():
        assert resource.getrlimit(resource.RLIMIT_NPROC) == before


def test_the_limit_on_processes_is_never_over_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (5, 10))
    assert process_limit(10**6) == 10
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (5, resource.RLIM_INFINITY))
    assert process_limit(10**6) > 10**6
