"""Answers are compared in threads as in the main one: agents' steps run in threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from openrlhf.errors import RewardError
from openrlhf.rewards import math_process
from openrlhf.rewards.math_grader import math_equal
from openrlhf.rewards.math_process import (
    MATH_PROCESSES,
    MAX_PROCESSES,
    MathProcess,
    MathProcesses,
)

POWER = "(x+y+z+1)^{400}"  # takes minutes to multiply out


def in_thread(function: Callable[..., Any], *args: object) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


@pytest.fixture
def processes() -> Iterator[MathProcesses]:
    """Helpers of a test's own, which end with it."""
    made = MathProcesses()
    yield made
    while not made._free.empty():
        if process := made._free.get():
            process.end()


def helper_of(processes: MathProcesses) -> MathProcess:
    process = processes._free.get()
    assert process is not None
    processes._free.put(process)
    return process


@pytest.mark.slow
def test_many_threads_get_the_answers_of_the_main_thread() -> None:
    pairs = [(f"so it is \\boxed{{\\frac{{{k}}}{{2}}}}", str(k / 2 + k % 3)) for k in range(30)]
    expected = [math_equal(answer, truth) for answer, truth in pairs]
    assert expected == [k % 3 == 0 for k in range(30)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda pair: math_equal(*pair), pairs)) == expected


def test_a_comparison_without_end_is_not_equal_and_the_next_one_is_made() -> None:
    start = time.monotonic()
    assert in_thread(math_equal, f"\\boxed{{{POWER}}}", "(x+y+z)^{400}") is False
    assert time.monotonic() - start < 25  # its own limit of 3 s, and a busy machine
    assert in_thread(math_equal, "1/2", "0.5") is True


def test_a_helper_that_does_not_answer_is_ended_and_replaced(
    processes: MathProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert processes.compare("1/2", "0.5") is True
    first = helper_of(processes)
    os.kill(first.process.pid, 19)  # it stops
    monkeypatch.setattr(math_process, "LIMIT_S", 0.3)
    assert processes.compare("1/2", "0.5") is False
    assert not first.is_alive
    monkeypatch.undo()
    assert processes.compare("1/2", "0.5") is True
    assert helper_of(processes).process.pid != first.process.pid


def test_a_helper_that_is_killed_is_an_error_and_not_an_answer(processes: MathProcesses) -> None:
    processes.compare("1", "1")
    helper = helper_of(processes)
    os.kill(helper.process.pid, 19)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(processes.compare, "1/2", "0.5")
        while processes._free.qsize() == MAX_PROCESSES:  # until it has one
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(helper.process.pid, 9)
        with pytest.raises(RewardError, match=r"math_equal ended \(exit code -9\)"):
            answer.result(20)
    assert processes.compare("1/2", "0.5") is True


@pytest.mark.slow
def test_one_that_died_between_two_comparisons_is_replaced_unseen(
    processes: MathProcesses,
) -> None:
    processes.compare("1", "1")
    helper = helper_of(processes)
    helper.process.kill()
    helper.process.wait()
    assert processes.compare("1/2", "0.5") is True


def test_a_helper_that_does_not_start_is_an_error(
    processes: MathProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_process.sys, "executable", "/bin/false")
    with pytest.raises(RewardError, match=r"did not start \(exit code 1\)"):
        processes.compare("1", "1")


def test_one_helper_serves_calls_that_come_one_after_the_other(processes: MathProcesses) -> None:
    pids = set()
    for _ in range(3):
        in_thread(processes.compare, "1", "1")
        pids.add(helper_of(processes).process.pid)
    assert len(pids) == 1


def test_a_forked_process_starts_helpers_of_its_own() -> None:
    in_thread(math_equal, "1", "1")
    before = helper_of(MATH_PROCESSES).process.pid
    if (child := os.fork()) == 0:
        is_clean = MATH_PROCESSES._free.get() is None
        os._exit(0 if is_clean else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert helper_of(MATH_PROCESSES).process.pid == before
    assert in_thread(math_equal, "1/2", "0.5") is True


def test_what_is_no_text_is_a_mistake_of_the_caller() -> None:
    for call in (math_equal, lambda *pair: in_thread(math_equal, *pair)):
        with pytest.raises(AssertionError, match="an answer is text, not a float"):
            call(0.5, "0.5")
