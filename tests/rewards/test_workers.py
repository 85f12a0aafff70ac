"""A reward function in killable processes: limits hold, the pool heals, nothing is left over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from pathlib import Path

import pytest

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards import workers
from openrlhf.rewards.base import RewardBatch, RewardResult
from openrlhf.rewards.workers import FunctionPool, PoolSettings

# The label of the first sample says what the function does.
UNRULY = """
    import contextlib, ctypes, os, socket, subprocess, sys, time

    kept = []

    def reward_func(queries, prompts, labels):
        word = labels[0]
        if word == "sleep":
            time.sleep(1e6)
        if word == "spin":
            while True: pass
        if word == "hang below Python":
            ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock
        if word == "exit":
            os._exit(1)
        if word == "leave":
            sys.exit("done")
        if word == "crash":
            ctypes.string_at(0)
        if word == "memory":
            kept.append([bytes(2**20) for _ in range(10**5)])
        if word == "fork":
            for _ in range(5): os.fork()
            time.sleep(1e6)
        if word == "tower":
            9**9**9  # one step of the interpreter, which holds its lock for hours
        if word == "talk":
            for _ in range(100): print("x" * 2**20)
        if word == "too few":
            return [1.0]
        if word == "child":
            subprocess.Popen(["sleep", "1000"]); time.sleep(1e6)
        if word == "raise":
            raise ValueError("no such answer")
        if word == "nan":
            return [float("nan")] * len(labels)
        if word == "child elsewhere":
            print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
            time.sleep(1e6)
        if word == "copy and exit":
            os.fork() and os._exit(1)
            time.sleep(1e6)
        if word == "two answers":
            if os.fork() == 0: return [0.0] * len(labels)
            time.sleep(0.1)
        if word in ("write to all", "write half to all"):
            forged = b'{"rewards": [9.0]}'
            header = len(forged).to_bytes(4, "big") if word == "write to all" else b"\\0\\0\\1"
            for number in range(3, 256):
                with contextlib.suppress(OSError): os.write(number, header + forged)
            if word == "write half to all": time.sleep(1e6)
        if word == "close all":
            os.closerange(3, 256)
            return [1.0] * len(labels)
        if word in ("knock", "knock and hang"):
            for message in (b"", b"half", b"x" * 10**6, b'{"rewards": [9.0]}'):
                kept.append(socket.socket(socket.AF_UNIX))
                kept[-1].connect(sys.argv[1])
                kept[-1].sendall(message)
            kept[-1].close()
            if word == "knock and hang": time.sleep(1e6)
        if word == "late child":
            subprocess.Popen("sleep 0.3; for n in 3 4 5 6 7 8 9; do echo '[9.0]' >&$n; done",
                             shell=True, close_fds=False)
        if word == "elsewhere":
            os.chdir("/")
            raise ValueError("first line\\nsecond line " + "x" * 10**6)
        print("scored", len(labels), "x" * 1000)
        print("and said so", file=sys.stderr)
        return {"rewards": [float(len(q)) for q in queries], "extra_logs": {"pid": os.getpid()}}
"""
MakePool = Callable[..., FunctionPool]


def batch_of(*labels: object, **columns: list[object]) -> RewardBatch:
    return RewardBatch(
        queries=["q" * (i + 1) for i in range(len(labels))],
        prompts=["p"] * len(labels),
        responses=[f"r{i}" for i in range(len(labels))],
        labels=labels,
        columns=columns,
        sample_ids=[f"step1/{i}/0" for i in range(len(labels))],
    )


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    """Makes pools of a file with this code, and closes them."""
    pools: list[FunctionPool] = []

    def make(code: str = UNRULY, timeout_s: float = 20, **settings: object) -> FunctionPool:
        path = tmp_path / "my_reward.py"
        path.write_text(textwrap.dedent(code))
        limits = {"timeout_s": timeout_s, "memory_gib": 0.25}
        settings = {"num_workers": 2, "log_dir": tmp_path / "logs"} | limits | settings
        pools.append(FunctionPool(path, PoolSettings(**settings)))  # type: ignore[arg-type]
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def wait_until(is_true: Callable[[], bool], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_true()


def processes_of(session: int) -> list[int]:
    """What a worker is or started, dead and not waited for as well."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, parent, _, of_session, *_ = path.read_text().rpartition(")")[2].split()
            is_others_zombie = state == "Z" and int(parent) != os.getpid()
            if int(of_session) == session and not is_others_zombie:
                found.append(int(path.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_batches_have_at_most_their_size_and_results_keep_their_order(make_pool: MakePool) -> None:
    code = (
        "def reward_func(queries, prompts, labels): return [x + len(labels) / 10 for x in labels]"
    )
    pool = make_pool(code, batch_size=2)
    rewards = pool.submit(batch_of(1, 2, 3, 4, 5)).result().rewards
    assert rewards == pytest.approx([1.2, 2.2, 3.2, 4.2, 5.1])
    assert pool.submit(batch_of()).result().rewards == []


def test_calls_run_at_the_same_time(make_pool: MakePool, tmp_path: Path) -> None:
    code = """
        import os, pathlib, time
        def reward_func(queries, prompts, labels):
            folder = pathlib.Path(labels[0])
            (folder / str(os.getpid())).touch()
            deadline = time.monotonic() + 20
            while len(list(folder.iterdir())) < 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            return [float(len(list(folder.iterdir())))]
    """
    (tmp_path / "seen").mkdir()
    pool = make_pool(code, batch_size=1, num_workers=4)
    rewards = pool.submit(batch_of(*[str(tmp_path / "seen")] * 4)).result().rewards
    assert rewards == [4.0] * 4 and len(pool.worker_pids) == 4


def test_both_shapes_and_async_functions_work(make_pool: MakePool) -> None:
    code = """
        import asyncio
        async def reward_func(queries, prompts, labels, responses):
            loop = asyncio.get_running_loop()
            async def one(text):
                await asyncio.sleep(0.01)
                return float(text[1:])
            assert getattr(reward_func, "loop", loop) is loop
            reward_func.loop = loop
            return {"rewards": await asyncio.gather(*map(one, responses)), "scores": [1] * 2}
    """
    pool = make_pool(code, num_workers=1)
    for _ in range(2):
        assert pool.submit(batch_of(None, None)).result().rewards == [0.0, 1.0]
    completions = "async def f(prompts, completions, answer, **kwargs): return answer"
    assert make_pool(completions).submit(batch_of(1, answer=[7])).result().rewards == [7.0]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sleep", "did not end in 0.4 s (--reward_timeout_s)"),
        ("spin", "did not end in 0.4 s (--reward_timeout_s)"),
        ("hang below Python", "did not end in 0.4 s (--reward_timeout_s)"),
        ("tower", "did not end in 0.4 s (--reward_timeout_s)"),
        ("fork", "did not end in 0.4 s (--reward_timeout_s)"),
        ("exit", "ended its process (exit code 1)"),
        ("leave", "ended its process (exit code 1)"),
        ("crash", "ended its process (signal SIGSEGV)"),
    ],
)
def test_a_worker_at_its_limit_is_replaced_and_the_error_says_which_samples(
    make_pool: MakePool, tmp_path: Path, word: str, message: str
) -> None:
    pool = make_pool(timeout_s=0.4)
    [first] = pool.worker_pids
    start = time.monotonic()
    with pytest.raises(RewardError) as caught:
        pool.submit(batch_of(word, 2, 3, 4, 5)).result()
    assert time.monotonic() - start < 0.4 + 5  # the limit and some seconds, whatever it did
    text = str(caught.value)
    assert (
        f"{tmp_path}/my_reward.py: the reward function {message} while it scored samples " in text
    )
    assert "step1/0/0, step1/1/0, step1/2/0 and 2 more" in text
    assert wait_until(lambda: not processes_of(first))  # nor a zombie
    assert pool.submit(batch_of(1, 2)).result().rewards == [1.0, 2.0]
    assert first not in pool.worker_pids


def test_where_a_call_hung_is_in_the_log(make_pool: MakePool, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"See .*/logs/reward-0\.log"):
        make_pool(timeout_s=0.3).submit(batch_of("sleep")).result()
    assert 'my_reward.py", line 9 in reward_func' in (tmp_path / "logs/reward-0.log").read_text()


@pytest.mark.parametrize("word", ["child", "child elsewhere"])
def test_what_a_worker_started_ends_with_it(make_pool: MakePool, word: str) -> None:
    pool = make_pool(timeout_s=0.5)
    [worker] = pool.worker_pids
    future = pool.submit(batch_of(word))
    children = Path(f"/proc/{worker}/task/{worker}/children")
    assert wait_until(lambda: bool(children.read_text().split()))
    [child] = map(int, children.read_text().split())
    with pytest.raises(RewardError, match="did not end"):
        future.result()
    assert wait_until(lambda: not is_running(child))


def test_a_function_out_of_memory_is_told_its_line_and_its_worker_replaced(
    make_pool: MakePool,
) -> None:
    pool = make_pool(num_workers=1)
    [first] = pool.worker_pids
    with pytest.raises(RewardError, match=r"my_reward.py:\d+: MemoryError \(--reward_memory_gib\)"):
        pool.submit(batch_of("memory")).result()
    assert pool.submit(batch_of(1)).result().rewards == [1.0]
    assert pool.worker_pids != [first]


def test_a_worker_that_ends_is_noticed_though_a_copy_of_it_lives(make_pool: MakePool) -> None:
    pool = make_pool(timeout_s=20)
    [first] = pool.worker_pids
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"ended its process \(exit code 1\)"):
        pool.submit(batch_of("copy and exit")).result()
    assert time.monotonic() - start < 5
    assert wait_until(lambda: not processes_of(first))


def test_a_copy_that_the_function_forked_does_not_answer(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=1)
    assert pool.submit(batch_of("two answers", 2)).result().rewards == [1.0, 2.0]
    assert pool.submit(batch_of(1, 2, 3)).result().rewards == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("word", ["write to all", "close all", "knock", "late child"])
def test_whatever_a_function_writes_or_closes_its_own_rewards_count(
    make_pool: MakePool, word: str
) -> None:
    pool = make_pool(num_workers=1)
    [worker] = pool.worker_pids
    for _ in range(2):
        assert pool.submit(batch_of(word)).result().rewards == [1.0]
    time.sleep(0.5 if word == "late child" else 0)
    assert pool.submit(batch_of(1, 2)).result().rewards == [1.0, 2.0]
    assert pool.worker_pids == [worker]


@pytest.mark.parametrize("word", ["write half to all", "knock and hang"])
@pytest.mark.timeout(60)
def test_half_a_message_does_not_put_off_the_time_limit(make_pool: MakePool, word: str) -> None:
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"did not end in 0\.5 s \(--reward_timeout_s\)"):
        make_pool(timeout_s=0.5).submit(batch_of(word)).result()
    assert time.monotonic() - start < 0.5 + 5


@pytest.mark.timeout(60)
def test_a_stopped_worker_does_not_keep_the_sender_of_a_large_batch_waiting(
    make_pool: MakePool,
) -> None:
    pool = make_pool(timeout_s=0.5, num_workers=1)
    os.kill(pool.worker_pids[0], signal.SIGSTOP)
    with pytest.raises(RewardError, match="did not end in"):
        pool.submit(batch_of("x" * 10**7)).result()
    assert pool.submit(batch_of(1)).result().rewards == [1.0]


def test_an_error_is_one_line_with_its_place_wherever_the_function_went(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pool()
    monkeypatch.chdir(tmp_path)
    with closing(FunctionPool("my_reward.py", PoolSettings(num_workers=1))) as pool:
        with pytest.raises(RewardError) as caught:
            pool.submit(batch_of("elsewhere")).result()
        assert pool.submit(batch_of(1)).result().rewards == [1.0]
    assert "my_reward.py:67: ValueError: first line second line xxx" in str(caught.value)
    assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)


def test_a_worker_killed_between_two_calls_is_replaced_unseen(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=1)
    [first] = pool.worker_pids
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: not is_running(first))
    assert pool.submit(batch_of(1)).result().rewards == [1.0]


def test_an_exception_has_its_line_and_nonsense_its_sample(make_pool: MakePool) -> None:
    pool = make_pool()
    before = pool.worker_pids
    with pytest.raises(RewardError, match=r"my_reward\.py:34: ValueError: no such answer"):
        pool.submit(batch_of("raise")).result()
    with pytest.raises(RewardError, match=r"rewards of sample step1/0/0 is nan"):
        pool.submit(batch_of("nan")).result()
    with pytest.raises(RewardError, match=r"1 values for 2 samples \(samples step1/0/0, step1/1"):
        pool.submit(batch_of("too few", 2)).result()
    assert pool.worker_pids == before  # neither costs a worker


def test_prints_go_to_the_log_and_not_to_the_terminal(
    make_pool: MakePool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_pool().submit(batch_of(1, 2)).result()
    assert capfd.readouterr() == ("", "")
    log = (tmp_path / "logs" / "reward-0.log").read_text()
    assert "scored 2" in log and "and said so" in log


def test_a_function_that_prints_100_mib_is_answered(
    make_pool: MakePool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert make_pool(log_dir=None).submit(batch_of("talk", 2)).result().rewards == [1.0, 2.0]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1", "has no reward_func; found: nothing public"),
        ("import no_such_module", "my_reward.py:1: ModuleNotFoundError"),
        (
            "import os; os._exit(5)",
            "the file ended its process (exit code 5) while it was imported",
        ),
    ],
)
def test_a_file_without_a_function_is_refused_at_start(
    make_pool: MakePool, code: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_pool(code)
    assert message in str(caught.value)


def test_a_file_that_hangs_while_it_is_imported_is_refused_and_ended(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LOAD_TIMEOUT_S", 5.0)
    with pytest.raises(ConfigError) as caught:
        make_pool("import os, time; print(os.getpid()); time.sleep(1e6)")
    assert "my_reward.py: the file did not end in 5 s while it was imported." in str(caught.value)
    pid = int((tmp_path / "logs" / "reward-0.log").read_text().splitlines()[0])
    assert wait_until(lambda: not is_running(pid))


def test_closing_ends_all_workers_and_what_they_do(make_pool: MakePool) -> None:
    pool = make_pool(batch_size=1)
    futures = [pool.submit(batch_of("sleep")) for _ in range(2)]
    assert wait_until(lambda: len(pool.worker_pids) == 2)
    pids = pool.worker_pids
    pool.close()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(5)
    assert wait_until(lambda: not any(map(is_running, pids)))
    with pytest.raises(RewardError, match="closed"):
        pool.submit(batch_of(1))


def test_scores_are_awaited_and_a_cancelled_call_ends_its_worker(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=1)
    [first] = pool.worker_pids

    async def ask() -> RewardResult:
        asking = asyncio.ensure_future(pool.score(batch_of("sleep")))
        await asyncio.sleep(0.2)
        asking.cancel()
        return await pool.score(batch_of(1, 2))

    assert asyncio.run(ask()).rewards == [1.0, 2.0]
    assert pool.worker_pids != [first]


PARENT = """
import sys, time
from openrlhf.rewards.base import RewardBatch
from openrlhf.rewards.workers import FunctionPool, PoolSettings
pool = FunctionPool(sys.argv[1], PoolSettings(num_workers=2))
pool.submit(RewardBatch(["q"], ["p"], ["r"], ["spin"]))
time.sleep(0.5)
pool.submit(RewardBatch(["q"], ["p"], ["r"], [1])).result()
print(*pool.worker_pids, flush=True)
time.sleep(100)
"""


def test_workers_die_with_their_parent_also_in_the_middle_of_a_call(tmp_path: Path) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(textwrap.dedent(UNRULY))
    words = [sys.executable, "-c", PARENT, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
        parent.kill()
    assert wait_until(lambda: not any(map(is_running, pids)))


def test_what_a_function_prints_stays_within_two_files(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MAX_LOG_BYTES", 2**20)
    pool = make_pool(num_workers=1)
    for _ in range(2):
        assert pool.submit(batch_of("talk")).result().rewards == [1.0]  # 100 MiB
    log, older = sorted((tmp_path / "logs").iterdir())
    assert (log.name, older.name) == ("reward-0.log", "reward-0.log.1")
    assert 100 * 2**20 <= log.stat().st_size == older.stat().st_size < 101 * 2**20
