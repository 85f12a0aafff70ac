"""Verifiable rewards: what is right, what is not, and programs that do not behave."""

import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from openrlhf.rewards import math_grader
from openrlhf.rewards.code_runner import passes_tests, run_python
from openrlhf.rewards.math_grader import math_equal
from openrlhf.rewards.text_checks import (
    code_block,
    has_tags_in_order,
    tag_content,
)
from openrlhf.utils import extract_boxed_answer
from tests.rewards.test_workers import ends

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


def test_a_program_passes_its_tests_or_does_not() -> None:
    right = "def double(x):\n    return 2 * x\n"
    tests = "assert double(2) == 4\nassert double(-1) == -2"
    assert passes_tests(right, tests)
    assert not passes_tests(right.replace("2 * x", "x + 2"), tests)
    assert not passes_tests("def double(x:", tests)


# Each is a wrong `double` and a way to look right all the same.
CHEATS = {
    "leave at once": "import os; os._exit(0)",
    "look for the tests": """
        import glob, os, re
        def read(path):
            try: return open(path, "rb").read(10**6)
            except OSError: return b""
        found = b"".join(map(read, glob.glob("../**", recursive=True) + [
            f"/proc/{os.getppid()}/{name}" for name in ("environ", "cmdline", "fd/0", "maps")
        ]))
        table = dict(re.findall(rb"double\\((-?\\d+)\\) == (-?\\d+)", found))
        def double(x): return int(table[str(x).encode()])
    """,
    "equal everything": """
        class Any:
            def __eq__(self, other): return True
            __ne__ = __lt__ = __gt__ = __bool__ = __eq__
            __sub__ = __abs__ = lambda self, *other: self
        def double(x): return Any()
    """,
    "scribble on every descriptor": """
        import os
        for number in range(64):
            try: os.write(number, b'[null, 4, {"tuple": []}]\\n' * 9 + b"all tests ran")
            except OSError: pass
        def double(x): return 0
    """,
    "attack the process of the tests": """
        import os, signal
        try: open(f"/proc/{os.getppid()}/mem", "r+b")
        except OSError: os.kill(os.getppid(), signal.SIGKILL)
        else: os.kill(os.getppid(), signal.SIGSTOP)
        def double(x): return 0
    """,
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_wrong_program_cannot_pass_its_tests_by_a_trick(cheat: str) -> None:
    tests = "assert double(2) == 4\nassert abs(double(-1) - -2) < 1\nassert double(5) in [10, 11]"
    assert not passes_tests(textwrap.dedent(CHEATS[cheat]), tests)


PROGRAM = """
import collections, math
from fractions import Fraction

N, Pair = 3, collections.namedtuple("Pair", "a b")

class TooSmall(ValueError): pass

class Point:
    def __init__(self, x, y=0): self.x, self.y = x, y
    def __eq__(self, other): return isinstance(other, Point) and self.x == other.x
    def __add__(self, other): return Point(self.x + other.x)
    def __repr__(self): return f"Point({self.x})"

class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def __len__(self): return len(self.items)
    def __contains__(self, x): return x in self.items
    def __getitem__(self, index): return self.items[index]

def count(text): return collections.Counter(text)
def sort(a): a.sort()
def numbers(n): yield from range(n)
def check_size(x):
    if x < 0: raise TooSmall(f"{x} is too small")
def half(): return Fraction(1, 2)
def values(): return [{1, 2}, (1, (2,)), b"x", None, math.inf, Pair(1, 2), {(1, 2): [3]}]
"""
HONEST_TESTS = """
import math

assert N == 3 and count("aab") == {"a": 2, "b": 1}
a = [3, 1, 2]
assert sort(a) is None and a == [1, 2, 3]
assert list(numbers(3)) == [0, 1, 2] and [2 * n for n in numbers(2)] == [0, 2]
assert values() == [{1, 2}, (1, (2,)), b"x", None, math.inf, (1, 2), {(1, 2): [3]}]
try:
    check_size(-1)
    assert False
except ValueError as caught:
    assert str(caught) == "-1 is too small"
assert str(half()) == "1/2"
p = Point(1, y=2)
p.x = 5
assert p == Point(5) and p != Point(6) and p + p == Point(10) and (p.x, p.y) == (5, 2)
assert isinstance(p, Point) and not isinstance(3, Point) and p != 5 and str(p) == "Point(5)"
s = Stack()
assert not s and s.push(1).push(2) is s
assert len(s) == 2 and 2 in s and 3 not in s and list(s) == [1, 2]

def check(candidate):
    assert candidate([1]) is None
check(sort)
"""


def test_tests_see_what_the_program_returns_raises_and_changes() -> None:
    assert passes_tests(PROGRAM, HONEST_TESTS)
    lines = [
        "assert Point(1) == Point(2)",
        "check_size(-1)",
        "no_such_name",
        "import sys; sys.exit(0)",
    ]
    assert [line for line in lines if passes_tests(PROGRAM, line)] == []


def test_tests_see_arrays() -> None:
    program = "import numpy\ndef array(): return numpy.arange(4).reshape(2, 2), numpy.int64(3)"
    tests = "import numpy\na, n = array()\nassert numpy.allclose(a[1], [2, 3]) and n == 3"
    assert passes_tests(program, tests, timeout_s=20, memory_mib=2048)


def test_a_program_gets_its_input_and_nothing_of_this_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CANARY", "secret")
    result = run_python("import os\nprint(input(), os.environ.get('CANARY'), os.listdir())", "hi")
    assert result.stdout == "hi None ['program.py']\n" and result.exit_code == 0


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("while True: pass", None),
        ("import time; time.sleep(1000)", None),
        ("x = bytearray(10**10)", "MemoryError"),
        ("print('x' * 3 * 10**7)", "File too large"),
        ("1/0", "ZeroDivisionError"),
        ("print('\ud800')", ""),
    ],
)
def test_programs_that_do_not_behave_are_stopped(program: str, told: str | None) -> None:
    start = time.monotonic()
    timeout_s = 1 if told is None else 30
    result = run_python(program, timeout_s=timeout_s, memory_mib=256)
    assert time.monotonic() - start < 60
    assert len(result.stdout) <= 10_000
    if told is None:
        assert result.exit_code is None
    else:
        assert told in result.stderr
        assert (result.exit_code == 0) == (program == "print('\ud800')")


def test_what_a_program_leaves_running_is_ended() -> None:
    program = """
import os, time
if os.fork() == 0:
    open("pid", "w").write(str(os.getpid()))
    time.sleep(1000)
while not os.path.exists("pid") or not open("pid").read(): time.sleep(0.01)
print(open("pid").read())
"""
    result = run_python(program)
    assert result.exit_code == 0
    assert ends(int(result.stdout))
