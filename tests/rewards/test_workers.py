"""A reward function in killable processes: limits hold, the pool heals, nothing is left over."""

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from PIL import Image

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards import workers
from openrlhf.rewards.base import RewardBatch, RewardResult
from openrlhf.rewards.workers import FunctionPool
from openrlhf.utils import worker_process
from openrlhf.utils.images import read_picture
from tests.helpers.processes import ends

# In the form of OpenRLHF's reward function for mathematics.
OF_OPENRLHF = """
    import torch
    from openrlhf.utils import extract_boxed_answer, grade_answer

    def reward_func(queries, prompts, labels, **kwargs):
        rewards = []
        for query, prompt, label in zip(queries, prompts, labels):
            answer = extract_boxed_answer(query[len(prompt):])
            rewards.append(1.0 if grade_answer(answer, label) else 0.0)
        rewards = torch.tensor(rewards)
        return {"rewards": rewards, "scores": rewards, "extra_logs": {"num_boxed": rewards}}
"""
# The label of the first sample says what the function does.
UNRULY = """
    import contextlib, ctypes, os, subprocess, sys, time

    kept = []

    def reward_func(queries, prompts, labels):
        word = labels[0]
        if word == "sleep": time.sleep(1e6)
        if word == "spin":
            while True: pass
        if word == "tower": 9**9**9  # one step of the interpreter, which holds its lock for hours
        if word == "exit": os._exit(1)
        if word == "crash": ctypes.string_at(0)
        if word == "raise": raise ValueError("first line\\nsecond line " + "x" * 10**6)
        if word == "memory": kept.append([bytes(2**20) for _ in range(10**5)])
        if word == "talk": [print("x" * 2**20) for _ in range(100)]
        if word == "child":
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            time.sleep(1e6)
        if word == "two replies":
            if os.fork() == 0: return [0.0] * len(labels)
            time.sleep(0.1)
        if word in ("write to all", "write half to all"):
            forged = b'{"rewards": [9.0]}' + (b"" if "half" in word else b"\\n")
            for number in range(3, 256):
                with contextlib.suppress(OSError): os.write(number, forged)
            if "half" in word: time.sleep(1e6)
        if word == "late child":
            subprocess.Popen("sleep 0.3; for n in 3 4 5 6 7 8 9; do echo '[9.0]' >&$n; done",
                             shell=True, close_fds=False)
        os.chdir("/")
        print("scored", len(labels))
        print("and said so", file=sys.stderr)
        return {"rewards": [float(len(q)) for q in queries]}
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


def test_a_reward_file_of_openrlhf_scores_a_right_and_a_wrong_answer(tmp_path: Path) -> None:
    file = tmp_path / "math_reward_func.py"
    file.write_text(textwrap.dedent(OF_OPENRLHF))
    said = [r"so \boxed{\frac{1}{2}}", r"so \boxed{0.2}", "so 0.5"]
    batch = RewardBatch([f"1/2={text}" for text in said], ["1/2="] * 3, said, ["0.5"] * 3)
    pool = FunctionPool(str(file), num_workers=1)  # as --remote_rm_url does
    result = pool.submit(batch).result(timeout=120)
    pool.close()
    assert result.rewards == result.scores == [1.0, 0.0, 0.0]
    assert result.extra_logs == {"num_boxed": [1.0, 0.0, 0.0]}


def pids_of(pool: FunctionPool) -> list[int]:
    """The processes that live now."""
    return [process.pid for process in pool.processes.values() if not process.is_over]


def rewards_of(pool: FunctionPool, *labels: object, **columns: list[object]) -> list[float]:
    return pool.submit(batch_of(*labels, **columns)).result().rewards


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    """Makes pools of a file with this code, and closes them."""
    pools: list[FunctionPool] = []

    def make(code: str = UNRULY, **settings: object) -> FunctionPool:
        path = tmp_path / "my_reward.py"
        path.write_text(textwrap.dedent(code))
        usual = {"num_workers": 1, "timeout_s": 20, "memory_gib": 0.25}
        settings = usual | {"log_dir": tmp_path / "logs"} | settings
        pools.append(FunctionPool(path, **settings))  # type: ignore[arg-type]
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_batches_have_at_most_their_size_and_results_keep_their_order(make_pool: MakePool) -> None:
    code = (
        "def reward_func(queries, prompts, labels): return [x + len(labels) / 10 for x in labels]"
    )
    pool = make_pool(code, batch_size=2, num_workers=2)
    assert rewards_of(pool, 1, 2, 3, 4, 5) == pytest.approx([1.2, 2.2, 3.2, 4.2, 5.1])
    assert rewards_of(pool) == []


def test_calls_run_at_the_same_time(make_pool: MakePool, tmp_path: Path) -> None:
    code = """
        import os, pathlib, time
        def reward_func(queries, prompts, labels):
            folder = pathlib.Path(labels[0])
            (folder / str(os.getpid())).touch()
            deadline = time.monotonic() + 20
            while len(list(folder.iterdir())) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            return [float(len(list(folder.iterdir())))]
    """
    (tmp_path / "seen").mkdir()
    pool = make_pool(code, batch_size=1, num_workers=3)
    assert rewards_of(pool, *[str(tmp_path / "seen")] * 3) == [3.0] * 3


TOO_LATE = "did not end in 0.4 s (--reward_timeout_s)"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("word", "message"),
    [
        *[(word, TOO_LATE) for word in ("sleep", "tower", "write half to all")],
        ("exit", "ended its process (exit code 1)"),
        ("crash", "ended its process (signal SIGSEGV)"),
    ],
)
def test_a_worker_at_its_limit_is_replaced_and_the_error_says_which_samples(
    make_pool: MakePool, tmp_path: Path, word: str, message: str
) -> None:
    pool = make_pool(timeout_s=0.4)
    [first] = pids_of(pool)
    start = time.monotonic()
    with pytest.raises(RewardError) as caught:
        rewards_of(pool, word, 2, 3, 4, 5)
    assert time.monotonic() - start < 0.4 + 5  # the limit and some seconds, whatever it did
    text = str(caught.value)
    assert f"{tmp_path}/my_reward.py: the reward function {message} while it scored" in text
    assert "samples step1/0/0, step1/1/0, step1/2/0 and 2 more. Its worker" in text
    assert f"Its worker (pid {first}) was replaced" in text
    assert ends(first)
    assert rewards_of(pool, 1, 2) == [1.0, 2.0]


def test_the_last_lines_of_a_worker_that_ended_are_in_the_error(
    make_pool: MakePool, tmp_path: Path
) -> None:
    code = """
        import os
        def reward_func(queries, prompts, labels):
            print("no license")
            os._exit(1)
    """
    pool = make_pool(code)
    with pytest.raises(RewardError) as caught:
        rewards_of(pool, 1)
    log = tmp_path / "logs/reward-0.log"
    assert str(caught.value).endswith(f" was replaced. The end of {log}: no license")


def test_what_a_worker_started_ends_with_it_and_its_stack_is_in_the_log(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(timeout_s=1)
    [worker] = map(psutil.Process, pids_of(pool))
    future = pool.submit(batch_of("child"))
    while not (children := worker.children()):
        time.sleep(0.02)
    with pytest.raises(RewardError, match=r"See .*/logs/reward-0\.log"):
        future.result()
    assert ends(children[0].pid)
    assert "my_reward.py" in (tmp_path / "logs/reward-0.log").read_text()


def test_a_function_out_of_memory_is_told_its_line_and_its_worker_replaced(
    make_pool: MakePool,
) -> None:
    pool = make_pool()
    [first] = pids_of(pool)
    with pytest.raises(RewardError, match=r"my_reward.py:\d+: MemoryError \(--reward_memory_gib\)"):
        rewards_of(pool, "memory")
    assert rewards_of(pool, 1) == [1.0]
    assert pids_of(pool) != [first]


@pytest.mark.parametrize("word", ["write to all", "late child", "two replies"])
def test_what_user_code_writes_to_open_descriptors_is_no_reward(
    make_pool: MakePool, word: str
) -> None:
    pool = make_pool()
    [worker] = pids_of(pool)
    for _ in range(2):
        assert rewards_of(pool, word) == [1.0]
    time.sleep(0.5 if word == "late child" else 0)
    assert rewards_of(pool, 1, 2) == [1.0, 2.0]
    assert pids_of(pool) == [worker]


def test_a_worker_killed_between_two_calls_is_replaced_unseen(make_pool: MakePool) -> None:
    pool = make_pool()
    psutil.Process(pids_of(pool)[0]).kill()
    time.sleep(0.2)
    assert rewards_of(pool, 1) == [1.0]


def test_a_worker_stopped_between_two_calls_is_replaced_unseen(make_pool: MakePool) -> None:
    pool = make_pool()
    [worker] = pids_of(pool)
    process = psutil.Process(worker)
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:  # the signal is on its way
        time.sleep(0.01)
    assert rewards_of(pool, 1) == [1.0]
    assert pids_of(pool) != [worker] and not psutil.pid_exists(worker)


def test_a_worker_killed_in_a_call_is_replaced_once_and_the_call_made_again(
    make_pool: MakePool, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code = """
        import os, pathlib, signal
        def reward_func(queries, prompts, labels):
            with open(labels[0], "a") as file:
                file.write("called ")
            if len(pathlib.Path(labels[0]).read_text().split()) <= int(labels[1]):
                os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does for want of memory
            return [1.0] * len(labels)
    """
    pool = make_pool(code)
    [first] = pids_of(pool)
    assert rewards_of(pool, str(tmp_path / "once"), "1") == [1.0, 1.0]
    said = " ".join(capsys.readouterr().err.split())
    struck = f"(pid {first}) ended its process (signal SIGKILL) while it scored"
    assert f"my_reward.py: the worker {struck} samples step1/0/0, step1/1/0: another" in said
    with pytest.raises(RewardError, match=r"ended its process \(signal SIGKILL\) while it scored"):
        rewards_of(pool, str(tmp_path / "twice"), "2")
    assert rewards_of(pool, str(tmp_path / "never"), "0") == [1.0, 1.0]


def test_an_exception_is_one_line_with_its_place(make_pool: MakePool) -> None:
    pool = make_pool()
    before = pids_of(pool)
    with pytest.raises(RewardError, match=r"my_reward\.py:\d+: ValueError: first line second") as e:
        rewards_of(pool, "raise")
    assert len(str(e.value)) < 1000 and "\n" not in str(e.value)
    assert pids_of(pool) == before  # it costs no worker


def test_prints_go_to_a_log_of_bounded_size_and_not_to_the_terminal(
    make_pool: MakePool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "MAX_LOG_BYTES", 2**20)
    pool = make_pool()
    assert rewards_of(pool, 1, 2) == [1.0, 2.0]
    log = tmp_path / "logs" / "reward-0.log"
    assert "scored 2" in log.read_text() and "and said so" in log.read_text()
    for _ in range(2):
        assert rewards_of(pool, "talk") == [1.0]  # 100 MiB
    older = tmp_path / "logs" / "reward-0.log.1"
    assert all(100 * 2**20 <= path.stat().st_size < 101 * 2**20 for path in (log, older))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_module", "my_reward.py:1: ModuleNotFoundError"),
        ("import os; os._exit(5)", "the file ended its process (exit code 5) while it was import"),
        ("import time; time.sleep(1e6)", "the file did not end in 1 s while it was imported."),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_at_start(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setattr(worker_process, "START_TIMEOUT_S", 1.0 if "sleep" in code else 60.0)
    with pytest.raises(ConfigError) as caught:
        make_pool(code)
    assert message in str(caught.value)


def test_closing_ends_all_workers_and_what_they_do(make_pool: MakePool) -> None:
    pool = make_pool()
    future = pool.submit(batch_of("sleep"))
    time.sleep(0.2)
    pids = pids_of(pool)
    pool.close()
    with pytest.raises(CancelledError):
        future.result(5)
    assert ends(*pids)
    with pytest.raises(RewardError, match="closed"):
        pool.submit(batch_of(1))


def test_scores_are_awaited_and_a_cancelled_call_ends_its_worker(make_pool: MakePool) -> None:
    pool = make_pool()
    [first] = pids_of(pool)

    async def ask() -> RewardResult:
        asking = asyncio.ensure_future(pool.score(batch_of("sleep")))
        await asyncio.sleep(0.2)
        asking.cancel()
        return await pool.score(batch_of(1, 2))

    assert asyncio.run(ask()).rewards == [1.0, 2.0]
    assert pids_of(pool) != [first]


PARENT = """
import sys, time
import psutil
from openrlhf.rewards.base import RewardBatch
from openrlhf.rewards.workers import FunctionPool
pool = FunctionPool(sys.argv[1], num_workers=2)
for word in ("child", "spin"):
    pool.submit(RewardBatch(["q"], ["p"], ["r"], [word]))
while len(found := psutil.Process().children(recursive=True)) < 4 or (
    "sleep" not in [process.name() for process in found]
):
    time.sleep(0.1)  # two workers, a child of one, and multiprocessing's own process
print(*[process.pid for process in found], flush=True)
time.sleep(100)
"""


def test_workers_and_what_they_started_die_with_their_parent_in_the_middle_of_a_call(
    tmp_path: Path,
) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(textwrap.dedent(UNRULY))
    words = [sys.executable, "-c", PARENT, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4 and all(map(psutil.pid_exists, pids))
        parent.kill()
    assert ends(*pids)


INTERRUPTED = """
import os, signal, sys, time
from openrlhf.rewards.base import RewardBatch
from openrlhf.rewards.workers import FunctionPool
signal.signal(signal.SIGINT, lambda number, frame: None)
pool = FunctionPool(sys.argv[1], num_workers=2)
first, second = [pool.submit(RewardBatch(["q"], ["p"], ["r"], [1])) for _ in range(2)]
while not second.done():
    os.killpg(os.getpgrp(), signal.SIGINT)
    time.sleep(0.02)
print(second.result().rewards, flush=True)
pool.close()
"""


def test_ctrl_c_reaches_no_worker_that_starts(tmp_path: Path) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text("import time\ndef reward_func(queries): time.sleep(1); return [1.0]\n")
    words = [sys.executable, "-c", INTERRUPTED, str(path)]
    done = subprocess.run(words, capture_output=True, start_new_session=True, check=False)
    assert (done.stdout, done.stderr) == (b"[1.0]\n", b"")


def test_a_function_in_a_worker_sees_images(make_pool: MakePool) -> None:
    code = """
        def sizes(completions, images):
            return [float(sum(image.size[0] for image in each)) for each in images]
    """
    picture = read_picture(Image.new("RGB", (4, 2)))
    batch = replace(batch_of(1, 2), images=[(picture,), (picture, picture)])
    assert make_pool(code).submit(batch).result().rewards == [4.0, 8.0]
