"""Answers are compared in threads as in the main one: agents' steps run in threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from openrlhf.errors import RewardError
from openrlhf.rewards import math_grader
from openrlhf.rewards.math_grader import math_equal

POWER = "(x+y+z+1)^{400}"  # takes minutes to multiply out


def in_thread(function: Callable[..., Any], *args: object) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def helpers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


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
    assert time.monotonic() - start < 30  # its own limit of 3 s, and a busy machine
    assert in_thread(math_equal, "1/2", "0.5") is True


def test_a_process_that_takes_too_long_is_ended_and_one_that_ends_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    power = (f"\\boxed{{{POWER}}}", "(x+y+z)^{400}")
    assert in_thread(math_equal, "1/2", "0.5") is True
    monkeypatch.setattr(math_grader, "POOL_LIMIT_S", 1.0)
    assert in_thread(math_equal, *power) is False
    monkeypatch.undo()
    assert in_thread(math_equal, "1/2", "0.5") is True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(math_equal, *power)
        time.sleep(1)
        for process in helpers():
            process.kill()
        with pytest.raises(RewardError, match="the process of math_equal ended"):
            answer.result(20)
    assert in_thread(math_equal, "1/2", "0.5") is True


def test_a_forked_process_starts_a_pool_of_its_own() -> None:
    in_thread(math_equal, "1", "1")
    if (child := os.fork()) == 0:
        os._exit(math_grader._pool.cache_info().currsize)
    assert os.waitpid(child, 0)[1] == 0


def test_what_is_no_text_is_a_mistake_of_the_caller() -> None:
    for call in (math_equal, lambda *pair: in_thread(math_equal, *pair)):
        with pytest.raises(AssertionError, match="an answer is text, not a float"):
            call(0.5, "0.5")
