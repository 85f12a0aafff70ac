"""Verifiable rewards: what is right and what is not."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from openrlhf.rewards import math_grader
from openrlhf.rewards.math_grader import math_equal
from openrlhf.rewards.text_checks import (
    code_block,
    has_tags_in_order,
    tag_content,
)
from openrlhf.utils import extract_boxed_answer

# Answers and truths that are equal, and that are not.
EQUAL = r"""
    1/2 = 0.5
    so it is \boxed{\frac{1}{2}} = 1/2
    first \boxed{3}, no: \boxed{4}. = 4
    This makes 1,000 = 1000
    x = 3 == 3
    \boxed{x^2+2x+1} = (x+1)^2
    50\% = 0.5
    50 percent = 50%
    (1,2) = (1, 2)
    {1,2} = \{2,1\}
    \sqrt{8} = 2\sqrt{2}
    The sum is 5.<|im_end|> = 5
    1e3 = 1000
    The mass is 6.02e2 kg = 602
    1×10^3 = 1000
    6.02 \times 10^{23} = 6.02e23
    2**10 = 1024
    3. = 3
    −3 = -3
    1 000 = 1000
    1{,}000 = 1000
    $18 = 18
    \boxed{18 dollars} = 18
    5 cm = 5
    5\text{ cm} = 5
    90^\circ = 90
    1\frac{1}{2} = 3/2
    3:4 = \frac{3}{4}
    √2 = \sqrt{2}
    sqrt(8) = 2\sqrt{2}
    π = \pi
    1 and 2 = \{1, 2\}
    x=1 or x=2 == 1, 2
    (-\infty, 0) \cup (1, 2) = (-\infty,0)\cup(1,2)
    \infty = ∞
    \begin{pmatrix}1\\2\end{pmatrix} = \begin{pmatrix}2/2\\2\end{pmatrix}
    B = B
    b) is wrong, so the answer is B. = B
    The answer is (C). = C
    \boxed{\text{(B)}} = B
    Monday = monday
    \boxed{\text{east}} = east
    The answer is yes. = Yes
    \( 4 \) = 4
    we get $x = 7$ = 7
    \[ \boxed{\dfrac{3}{4}} \] = 0.75
"""
DIFFERENT = r"""
    3 = 4
    \boxed{} = 2
    I do not know = 2
    0.3 = 1/3
    \boxed{4} or rather \boxed{5} = 4
    1e3 = 1
    1,000 = 1
    1 000 = 0
    12,34 = 1234
    2\sqrt{2} = 2
    2 sqrt(2) = 2
    1\frac{1}{2} = \frac{1}{2}
    50\% = 0.05
    (1,2) = (2,1)
    (1,2] = [1,2]
    \{1,2\} = \{1,2,3\}
    \begin{pmatrix}1&2\end{pmatrix} = \begin{pmatrix}2&1\end{pmatrix}
    \pi = 3.14
    The answer is (C). = B
    not Monday but Tuesday = Monday
"""


def pairs(table: str) -> list[tuple[str, str]]:
    """Answer and truth of each line; `==` parts them where they hold a sign of equality."""
    lines = [line.strip() for line in table.strip().splitlines()]
    parted = [line.rpartition(" == " if " == " in line else " = ") for line in lines]
    return [(answer, truth) for answer, _, truth in parted]


@pytest.mark.parametrize(("answer", "truth"), pairs(EQUAL))
def test_equal_answers_are_equal_in_whatever_form(answer: str, truth: str) -> None:
    assert math_equal(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        *pairs(DIFFERENT),
        ("", "2"),
        ("5 or 6", ""),
        (r"\boxed{9^{9^{9^{9^9}}}}", "9^{9^{9^{9^9}}}+1"),
    ],
)
def test_other_answers_are_not_and_none_takes_long(answer: str, truth: str) -> None:
    start = time.monotonic()
    assert not math_equal(answer, truth)
    assert time.monotonic() - start < 30


def in_thread(*pair: str) -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(math_equal, *pair).result()


def test_threads_get_the_answers_of_the_main_thread_and_survive_what_has_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    power = ("\\boxed{(x+y+z+1)^{400}}", "(x+y+z)^{400}")  # takes minutes to multiply out
    monkeypatch.setattr(math_grader, "POOL_TIMEOUT_S", 10)
    math_grader._pool.cache_clear()
    assert in_thread("so it is \\boxed{\\frac{1}{2}}", "0.5") and not in_thread("1/2", "0.2")
    assert in_thread(*power) is False
    assert in_thread("1/2", "0.5") is True  # in a new process
    math_grader._pool().close()
    math_grader._pool.cache_clear()


def test_the_last_box_is_read_with_its_braces() -> None:
    assert extract_boxed_answer(r"\boxed{1} and \boxed{\frac{a}{b}} then") == r"\frac{a}{b}"
    assert extract_boxed_answer(r"\boxed{1") is None and extract_boxed_answer("none") is None


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
