"""Answers against truths: the table in math_pairs.txt, and what is long, hostile or in a thread."""

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import math_verify
import pytest

from openrlhf.rewards import math_grader
from openrlhf.rewards.math_grader import math_equal
from openrlhf.utils import extract_boxed_answer

TABLE = Path(__file__).with_name("math_pairs.txt").read_text().partition("\n\n")[2]


class Pair(NamedTuple):
    answer: str
    truth: str
    sign: str
    reason: str = ""  # of a difference from math-verify


def pairs(table: str) -> dict[str, list[Pair]]:
    """Return the pairs of each section."""
    sections: dict[str, list[Pair]] = {}
    for line in table.splitlines():
        if line.startswith("== "):
            section = sections.setdefault(line.strip("= "), [])
        elif line:
            text = line.replace("⏎", "\n").replace("⌷", "\u200b")
            section.append(Pair(*re.split(r" {2,}", text)))
    return sections


PAIRS = pairs(TABLE)


def verdict_of_math_verify(answer: str, truth: str) -> bool:
    is_text = re.search(r"\$|\\\(|\\boxed|####", truth)
    truth = truth if is_text else f"${truth}$"
    return bool(math_verify.verify(math_verify.parse(truth), math_verify.parse(answer)))


def test_the_table_is_long():
    assert sum(map(len, PAIRS.values())) > 800
    assert {pair.sign for section in PAIRS.values() for pair in section} == {"=", "≠"}


@pytest.mark.parametrize("section", PAIRS)
def test_no_wrong_answer_is_paid_and_no_right_one_refused(section: str) -> None:
    wrong = [pair for pair in PAIRS[section] if math_equal(*pair[:2]) != (pair.sign == "=")]
    assert wrong == []


@pytest.mark.parametrize("section", PAIRS)
def test_differences_from_math_verify_are_decided(section: str) -> None:
    undecided = [
        pair
        for pair in PAIRS[section]
        if not pair.reason and verdict_of_math_verify(*pair[:2]) != (pair.sign == "=")
    ]
    assert undecided == []


def test_every_truth_equals_itself_in_a_box() -> None:
    truths = {pair.truth for section in PAIRS.values() for pair in section}
    bare = [truth for truth in truths if "boxed" not in truth and "####" not in truth]
    assert [truth for truth in bare if not math_equal(f"\\boxed{{{truth}}}", truth)] == []


HOSTILE = [
    ("", "5"),
    ("\0", "5"),
    ("\\boxed{\ud800}", "5"),
    ("\\boxed{" * 50_000, "5"),
    ("}" * 100_000, "5"),
    ("answer " * 20_000, "5"),
    ("is not " * 20_000, "yes"),
    ("5 or " * 20_000, "6"),
    ("A, B " * 20_000, "A"),
    ("<<" * 30_000, "5"),
    ("\\[" * 20_000, "5"),
    ("9" * 100_000, "5"),
    ("\\boxed{" + "cm " * 150 + "!}", "5 m"),
    ("\\boxed{5 (" + "cm " * 150 + "!)}", "5 m"),
    ("\\boxed{5 (" + "m" * 300 + "!)}", "5 m"),
    ("answer: 5 x\n" * 150 + "to " * 300, "6"),
    ("\\boxed{" + "(" * 240 + "5" + ")" * 240 + "}", "6"),
    ("\\boxed{" + "\\sqrt{" * 70 + "5" + "}" * 70 + "}", "5"),
    (r"\boxed{9^{9^{9}}}", "9^{9^{9}}+1"),
    (r"\boxed{9^{9^{9^{9^9}}}}", "9^{9^{9^{9^9}}}+1"),
    (r"\boxed{(9^{99999})!}", "5"),
    (r"\boxed{(x+y+z+1)^{400}}", "(x+y+z)^{400}"),
    (r"\boxed{\sum_{k=1}^{10^{9}} \frac{1}{k}}", "x"),
    (r"\boxed{x^{99}+x^{98}+3x+1 \ge 0}", "[0,1)"),
    ("1e99999999999", "5"),
    (r"\boxed{x=1e4000=5}", "5"),
    (r"\boxed{5}", "9" * 10_000),
    ("5 or 6", ""),
]


@pytest.mark.parametrize(("answer", "truth"), HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_raises_or_takes_long(
    answer: str, truth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math_grader, "LIMIT_S", 1.0)
    start, handler = time.monotonic(), signal.getsignal(signal.SIGALRM)
    assert not math_equal(answer, truth)
    assert time.monotonic() - start < 20
    assert signal.getsignal(signal.SIGALRM) == handler


RINGING = r"""
import signal
from openrlhf.rewards import math_grader

ring, handler = signal.setitimer, signal.getsignal(signal.SIGALRM)
math_grader.LIMIT_S = 0.001
signal.setitimer = lambda kind, first_s, then_s=0.0: ring(kind, first_s, then_s / 1000)
pair = r"\boxed{9^{9^{9}}}", "9^{9^{9}}+1"
assert not any(math_grader.math_equal(*pair) for _ in range(300))
assert signal.getsignal(signal.SIGALRM) == handler
print("heard")
"""


def test_a_clock_that_rings_again_at_once_is_heard_once() -> None:
    """In a process without other threads, in which an alarm could arrive later."""
    done = subprocess.run([sys.executable, "-c", RINGING], capture_output=True, text=True)
    assert done.stdout == "heard\n", done.stderr


def in_thread(*pair: str) -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(math_equal, *pair).result()


def test_threads_get_the_answers_of_the_main_thread_and_survive_what_has_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    power = (r"\boxed{9^{9^{9}}}", "9^{9^{9}}+1")
    monkeypatch.setattr(math_grader, "POOL_TIMEOUT_S", 10)
    math_grader._pool.cache_clear()
    assert in_thread("so it is \\boxed{\\frac{1}{2}}", "0.5") and not in_thread("1/2", "0.2")
    assert in_thread(*power) is False
    assert in_thread("1/2", "0.5") is True
    math_grader._pool().close()
    math_grader._pool.cache_clear()


def test_the_last_box_is_read_with_its_braces() -> None:
    assert extract_boxed_answer(r"\boxed{1} and \boxed{\frac{a}{b}} then") == r"\frac{a}{b}"
    assert extract_boxed_answer(r"\boxed{\left\{1, 2\right.}") == r"\left\{1, 2\right."
    assert extract_boxed_answer(r"\boxed{\boxed{5}}") == "5"
    assert extract_boxed_answer(r"\boxed{1, \boxed{5}}") == "1, {5}"
    assert extract_boxed_answer(r"\boxed{4} and \boxed{1") is None
    assert extract_boxed_answer("none") is None
