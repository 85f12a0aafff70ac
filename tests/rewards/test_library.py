"""Verifiable rewards: what is right, what is not, and programs that do not behave."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from openrlhf.rewards.code_runner import CodeLimits, passes_tests, run_python
from openrlhf.rewards.math_grader import math_equal
from openrlhf.rewards.text_checks import (
    code_block,
    has_tags_in_order,
    matches,
    matches_whole,
    tag_content,
)
from openrlhf.utils import extract_boxed_answer
from openrlhf.utils.processes import MARK_VARIABLE, new_mark


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("1/2", "0.5"),
        (r"so it is \boxed{\frac{1}{2}}", "1/2"),
        (r"first \boxed{3}, no: \boxed{4}.", "4"),
        ("This makes 1,000", "1000"),
        ("x = 3", "3"),
        (r"\boxed{x^2+2x+1}", "(x+1)^2"),
        (r"50\%", "0.5"),
        ("(1,2)", "(1, 2)"),
        (r"{1,2}", r"\{2,1\}"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        ("The sum is 5.<|im_end|>", "5"),
        ("-0.25", r"-\frac14"),
    ],
)
def test_equal_answers_are_equal_in_whatever_form(answer: str, truth: str) -> None:
    assert math_equal(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("3", "4"),
        ("-3", "3"),
        ("", "2"),
        ("I do not know", "2"),
        (r"\boxed{}", "2"),
        ("5 or 6", ""),
        ("0.3", "1/3"),
        (r"\boxed{4} or rather \boxed{5}", "4"),
        (r"\boxed{9^{9^{9^{9^9}}}}", "9^{9^{9^{9^9}}}+1"),
    ],
)
def test_other_answers_are_not_and_none_takes_long(answer: str, truth: str) -> None:
    start = time.monotonic()
    assert not math_equal(answer, truth)
    assert time.monotonic() - start < 15


def test_the_last_box_is_read_with_its_braces() -> None:
    assert extract_boxed_answer(r"\boxed{1} and \boxed{\frac{a}{b}} then") == r"\frac{a}{b}"
    assert extract_boxed_answer(r"\boxed{1") is None and extract_boxed_answer("none") is None


def test_patterns_are_found_or_not() -> None:
    assert matches("a\nb 42", r"a.b \d+") == 1.0
    assert matches("abc", r"\d") == 0.0
    assert matches_whole("  yes \n", "yes|no") == 1.0
    assert matches_whole("yes indeed", "yes|no") == 0.0


def test_tags_stand_once_and_in_their_order() -> None:
    good = "<think>a\nb</think>\n<answer>4</answer>"
    assert has_tags_in_order(good) == 1.0
    assert has_tags_in_order("well " + good) == 0.0
    assert has_tags_in_order(good + good) == 0.0
    assert has_tags_in_order("<answer>4</answer><think>a</think>") == 0.0
    assert has_tags_in_order("<a>x</a>", ["a"]) == 1.0
    assert tag_content(good, "answer") == "4"
    assert tag_content("<answer>4", "answer") is None


def test_the_last_block_of_code_is_taken_out() -> None:
    text = "```python\nx = 1\n```\nbetter:\n```\nx = 2\n```\n```bash\nls\n```"
    assert code_block(text) == "x = 2\n"
    assert code_block("no code") is None


def test_a_program_passes_its_tests_or_does_not() -> None:
    right = "def double(x):\n    return 2 * x\n"
    tests = "assert double(2) == 4\nassert double(-1) == -2"
    assert passes_tests(right, tests)
    assert not passes_tests(right.replace("2 * x", "x + 2"), tests)
    assert not passes_tests("def double(x:", tests)


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "import os; os._exit(0)"])
def test_a_program_that_leaves_early_has_not_passed(leave: str) -> None:
    assert not passes_tests(leave, "assert False")


def test_a_program_gets_its_input_and_nothing_of_this_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CANARY", "secret")
    result = run_python("import os\nprint(input(), os.environ.get('CANARY'), os.listdir())", "hi")
    assert result.stdout == "hi None ['program.py']\n" and result.is_ok


def test_a_program_is_found_by_the_mark_of_who_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK_VARIABLE, "worker")
    words = run_python(f"import os\nprint(os.environ[{MARK_VARIABLE!r}])").stdout.strip()
    assert words.startswith("worker") and len(words) == len("worker" + new_mark())


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("while True: pass", None),
        ("import time; time.sleep(1000)", None),
        ("x = bytearray(10**10)", "MemoryError"),
        ("open('big', 'wb').write(b'x' * 10**8)", "File too large"),
        ("print('x' * 10**8)", "File too large"),
        ("raise ValueError('mine')", "ValueError: mine"),
        ("1/0", "ZeroDivisionError"),
        ("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", ""),
        ("print('\ud800')", ""),
    ],
)
def test_programs_that_do_not_behave_are_stopped(program: str, told: str | None) -> None:
    start = time.monotonic()
    result = run_python(program, limits=CodeLimits(timeout_s=1, memory_mib=256, file_mib=1))
    assert time.monotonic() - start < 10
    assert len(result.stdout) <= 10_000
    if told is None:
        assert result.exit_code is None
    else:
        assert told in result.stderr
        assert result.is_ok == (program == "print('\ud800')")


@pytest.mark.parametrize("leave", ["", "os.setsid()"])
def test_what_a_program_leaves_running_is_ended(tmp_path: Path, leave: str) -> None:
    note = tmp_path / "pid"
    program = f"""
import os, time
if os.fork() == 0:
    {leave}
    open({str(note)!r}, "w").write(str(os.getpid()))
    time.sleep(1000)
while not os.path.exists({str(note)!r}): time.sleep(0.01)
"""
    assert run_python(program).is_ok
    pid = int(note.read_text())
    deadline = time.monotonic() + 5
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
