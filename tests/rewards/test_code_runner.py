"""Programs that a model wrote: their tests, and what they may not do."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from openrlhf.rewards.code_runner import passes_tests, run_python
from tests.helpers.processes import ends

RIGHT = "def double(x):\n    return 2 * x\n"
WRONG = "def double(x):\n    return x + 2\n"  # right for 2
FORMS = {
    "asserts": "assert double(2) == 4\nassert double(-1) == -2",
    "a check that is called": """
def check(candidate):
    assert candidate(x=-1) == -2
check(double)
""",
    "test functions": """
from solution import double

def test_two():
    assert double(2) == 4

def test_three():
    assert double(3) == 6
""",
    "a unittest class": """
import unittest
class Tests(unittest.TestCase):
    def setUp(self): self.three = 3
    def test_two(self): self.assertEqual(double(2), 4)
    def test_three(self): self.assertEqual(double(self.three), 6)
    @unittest.skip("later")
    def test_ten(self): self.fail()
if __name__ == "__main__":
    unittest.main()
""",
    "unittest's main": """
from unittest import TestCase, main
class Tests(TestCase):
    def test_three(self): self.assertEqual(double(3), 6)
main()
""",
    "a plain class": """
import solution
class TestDouble:
    def setup_method(self): self.three = 3
    def test_three(self): assert solution.double(self.three) == 6
""",
    "what stands before the tests of a class and a module": """
import pytest
def setup_module(module): module.three = 3
def setup_function(): global four; four = 4
def test_three(): assert double(three) == 6 and double(four) == 8
@pytest.mark.parametrize("sign", [1, -1])
class TestDouble:
    def setup_class(self): self.five = 5
    def setup_method(self, method): self.name = method.__name__
    def test_five(self, sign): assert double(self.five * sign) == 10 * sign
    @pytest.mark.parametrize(["x", "twice"], [(3, 6)])
    def test_x(self, x, twice, sign): assert double(x) == twice and self.name == "test_x"
class TestOthers:
    @classmethod
    def setup_class(cls): cls.six = 6
    def test_six(self, more=0): assert double(self.six + more) == 12
""",
    "parameters": """
import pytest
from solution import *

@pytest.mark.parametrize("x,twice", [(2, 4), pytest.param(3, 6, id="three")])
@pytest.mark.parametrize("sign", [1, -1])
def test_double(x, twice, sign):
    assert double(sign * x) == sign * twice

def test_others():
    with pytest.raises(TypeError):
        double()
    assert double(0.15) == pytest.approx(0.3)
""",
    "one mark of a class": """
import pytest
class TestDouble:
    pytestmark = pytest.mark.timeout(5)
    @pytest.mark.skipif(condition=False, reason="never")
    def test_three(self): assert double(3) == 6
""",
    "coroutines": """
import unittest
async def test_double(): assert double(3) == 6
class Tests(unittest.IsolatedAsyncioTestCase):
    async def test_double(self): self.assertEqual(double(4), 8)
""",
    "statements": """
if double(3) != 6:
    raise ValueError
""",
    "asserts whose failure is printed": """
try:
    assert double(2) == 4
    assert double(3) == 6
except AssertionError as error:
    print("failed:", error)
""",
    "asserts behind others": """
try:
    assert double(2) == 5
except AssertionError:
    assert double(3) == 6
""",
    "an error that is expected": """
try:
    double()
    assert False
except TypeError:
    assert double(3) == 6
""",
    "a result that is returned": "def test_three(): return double(3) == 6",
    "a result or None": "def test_three(): return double(3) == 6 or None",
    "a result where it is right": """
def test_two(): assert double(2) == 4
def test_three():
    if double(3) == 6: return True
""",
    "None where it is wrong": """
def test_three():
    if double(3) != 6: return
    return True
""",
    "False where it is wrong": """
def test_two():
    if double(2) != 4: return False
def test_three():
    for x in (2, 3):
        if double(x) != 2 * x: return False
    return
""",
    "an asynchronous result": """
import unittest
async def test_three(): return double(3) == 6 or None
async def is_three(): return double(3) == 6 or None
def test_later(): return is_three()
class Tests(unittest.IsolatedAsyncioTestCase):
    async def test_three(self): return double(3) == 6
""",
    "a result of unittest": """
import unittest
class Tests(unittest.TestCase):
    def test_three(self): return double(3) == 6
""",
    "checks whose None is returned": """
import asyncio, unittest
def check(three): assert double(three) == 6
async def later(): check(3)
def test_three(): return check(3)
def test_later(): return asyncio.run(later())
def test_async(): return later()
def test_kept():
    result = check(3)
    return result
class Tests(unittest.TestCase):
    def test_three(self): return self.assertEqual(double(3), 6)
class TestDouble(Tests):
    def test_two(self): return self.assertEqual(double(2), 4)
""",
    "functions behind conditions": """
import sys
if sys.version_info >= (3, 8):
    def test_two(): assert double(2) == 4
try:
    def test_three(): assert double(3) == 6
except ImportError:
    pass
assert double(0) in (0, 2)
""",
    "functions with other names": """
import functools
def check(x): assert double(x) == 2 * x
def make(x):
    def check_one(): check(x)
    return check_one
test_two = make(2)
test_three = functools.partial(check, 3)
assert double(0) in (0, 2)
""",
    "a lambda": """
import unittest
test_two = lambda: double(2) == 4
Tests = type("T", (unittest.TestCase,), {"test_3": lambda self: self.assertEqual(double(3), 6)})
""",
    "classes in classes": """
import unittest
class TestDouble:
    cases = test_cases = [2]
    def test_two(self): assert double(2) == 4
    class TestMore:
        class TestMost:
            def test_three(self): assert double(3) == 6
        class Tests(unittest.TestCase):
            def test_three(self): self.assertEqual(double(3), 6)
""",
    "no tests besides": """
from solution import double as test_twice
import solution
class TestCase:
    def __init__(self, x): self.x = x
    def test_x(self): assert False
class TestNot:
    __test__ = False
    def test_x(self): assert False
test = lambda x: test_twice(x) == 2 * x
testee = double
test_method = solution.double
assert test(3)
""",
    "names in a class": """
class TestDouble:
    three = double(3)
    def test_three(self): assert self.three == 6
""",
    "names as texts": """
import importlib
assert globals()["double"](2) == 4
assert importlib.import_module("solution").double(3) == 6
""",
    "globals that are imported": """
from solution import double
assert globals()["double"](3) == 6
""",
    "a file": """
from pathlib import Path
names = {}
exec(Path("solution.py").read_text(), names)
assert names["double"](3) == 6
""",
    "an import within a function": """
def test_three():
    from solution import double as twice
    assert twice(3) == 6
def test_four():
    import solution
    assert solution.double(4) == 8
""",
    "the usual names": """
from solution import *
assert isclose(double(3), 6) and Counter([double(3)]) == {6: 1}
assert double(inf) == inf and double(math.pi) == 2 * pi
""",
    "NumPy": """
import numpy as np
np.testing.assert_allclose(double(np.arange(4)), [0, 2, 4, 6])
""",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_right_program_passes_and_a_wrong_one_does_not(form):
    assert passes_tests(RIGHT, FORMS[form], timeout_s=20)
    for program in (WRONG, "def double(x:", "import no_such_module", ""):
        assert not passes_tests(program, FORMS[form], timeout_s=20)


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "double(2)",
        "print(double(2))",
        "def test_double(): pass",
        "assert (double(3) == 6, 'three')",
        "def check(candidate):\n    assert candidate(2) == 4",
        "if __name__ == '__main__':\n    assert double(2) == 4",
        "import unittest\nclass Tests(unittest.TestCase):\n    pass",
        "def test_double():\n    print(double(2))",
        "import unittest\nclass Tests(unittest.TestCase):\n    def test_a(self): double(2)",
        "class TestDouble:\n    def test_two(self): double(2)",
        "def test_double():\n    def two(): return 2\n    double(two())",
        "def test_double():\n    double(2)\n    return None",
        "async def test_double():\n    double(2)\n    return",
        None,
        [],
        ["double(2)"],
    ],
)
def test_tests_that_check_nothing_are_an_error_of_the_data(tests):
    with pytest.raises(ValueError, match=r"the tests .* cannot be used: they check nothing"):
        passes_tests(WRONG, tests)


def test_tests_that_cannot_be_executed_are_an_error_of_the_data():
    with pytest.raises(ValueError, match="was never closed"):
        passes_tests(RIGHT, "assert (")
    mark = '@pytest.mark.parametrize("x", [2])\n'
    check = "double(2) == 4"
    for lines in (
        f"def test_f(tmp_path): assert {check}",
        f"import pytest\n{mark}def test_f(x, tmp_path): assert {check}",
        f"class TestF:\n def test_f(self, tmp_path): assert {check}",
        f"import pytest\n{mark}class TestF:\n def test_f(self, x, tmp_path): assert {check}",
    ):
        told = "test_f has arguments: fixtures are not supported: tmp_path"
        with pytest.raises(ValueError, match=told):
            passes_tests(RIGHT, lines)
    with pytest.raises(ValueError, match=r"five has pytest\.fixture: fixtures are not supported"):
        passes_tests(RIGHT, f"import pytest\n@pytest.fixture\ndef five(): pass\nassert {check}")
    for given in ("", "'x'"):
        mark = f"import pytest\n@pytest.mark.parametrize({given})\n"
        with pytest.raises(ValueError, match="test_f has no names and values in"):
            passes_tests(RIGHT, mark + f"def test_f(x=2): assert {check}")
    with pytest.raises(ValueError, match="cannot be used: No module named 'no_such_module'"):
        passes_tests(RIGHT, "import no_such_module\nassert double(2) == 4")


def test_checks_that_a_program_keeps_from_being_executed_are_not_passed():
    assert not passes_tests("def f(): return []", "for n in f():\n    assert n == 1")
    tests = """
import unittest
class Tests(unittest.TestCase):
    def test_f(self):
        for n in f(): self.assertEqual(n, 1)
"""
    assert passes_tests("def f(): return [1]", tests)
    assert not passes_tests("def f(): return []", tests)
    assert not passes_tests(RIGHT, "def test_f():\n    yield\n    assert double(2) == 4")
    # Where nothing is returned, something must have been checked in this very test.
    tests = "def test_f(): return f(2)\ndef test_g(): assert f(3) is None"
    assert not passes_tests("def f(x): pass", tests)
    assert not passes_tests("def f(): return []", "def test_f():\n    for n in f(): return n == 1")
    skip = "import unittest\ndef f(x): raise unittest.SkipTest"
    tests = "import unittest\nclass T(unittest.TestCase):\n def test_f(self): self.assertTrue(f(1))"
    assert not passes_tests(skip, tests)


@pytest.mark.parametrize("program", [RIGHT, WRONG, "", "from math import *"])
@pytest.mark.parametrize(
    "tests",
    [
        "import pytest\n@pytest.mark.skip\ndef test_two(): assert double(2) == 4",
        "import unittest\nclass Tests(unittest.TestCase):\n"
        "    def test_two(self):\n        self.skipTest('x')\n        self.assertTrue(double(2))",
        "import unittest\nclass Tests(unittest.TestCase):\n"
        "    @unittest.skip('x')\n    def test_two(self): self.assertTrue(double(2))",
        "for x, y in []: assert double(x) == y",
        "def test_double():\n    for x, y in []: assert double(x) == y",
        "def test_double():\n    for x, y in []: return double(x) == y",
        "def test_double():\n    def later(): assert double(2) == 4",
        "def test_double():\n    if False: assert double(2) == 4",
    ],
)
def test_tests_that_execute_no_check_are_an_error_of_the_data(program, tests):
    with pytest.raises(ValueError, match="they check nothing: no check is executed"):
        passes_tests(program, tests)


def test_an_imported_program_does_not_hide_that_no_check_is_executed():
    for line in ("from solution import double", "from solution import *", "import solution"):
        tests = f"import pytest\n{line}\n@pytest.mark.skip\ndef test_two(): assert double(2) == 4"
        with pytest.raises(ValueError, match="no check is executed"):
            passes_tests(RIGHT, tests)


OF_USUAL_NAMES = {
    "gcd": "assert gcd(12, 18) == 6",
    "median": "def check(candidate):\n    assert candidate([3, 1, 2]) == 2\ncheck(median)",
    "mean": "def test_mean():\n    x = mean([1, 2, 3])\n    assert x == 2",
    "comb": "from solution import comb\ndef test_comb(): assert comb(5, 2) == 10",
    "isqrt": "from solution import *\nassert isqrt(17) == 4",
    "product": "from solution import product as p\nassert list(p([1], [2])) == [(1, 2)]",
    "factorial": "import solution\ndef test_five(): assert solution.factorial(5) == 120",
    "deque": "def test_deque():\n    from solution import deque\n    assert deque([1])[0] == 1",
    "add": "import unittest\nclass Tests(unittest.TestCase):\n"
    "    def test_add(self): self.assertEqual(add(2, 3), 5)",
    "lcm": "def mid(l): return l\nassert mid(lcm(4, 6)) == 12",
    "pow": "assert pow(2, 3) == 8",
    "sum": "def test_sum(): assert sum([1, 2]) == 3",
}


@pytest.mark.parametrize("name", OF_USUAL_NAMES)
def test_the_function_under_test_must_be_the_programs(name):
    tests = OF_USUAL_NAMES[name]
    for program in ("", "x = 1", "def mid(l): return 0", f"def {name}_of(*a): return 0"):
        assert not passes_tests(program, tests)
    if name not in ("pow", "sum"):
        star = "from math import *\nfrom statistics import *\nfrom operator import *"
        star += "\nfrom itertools import *\nfrom collections import *"
        assert passes_tests(star, tests)
        assert not passes_tests(f"def {name}(*a): return 0", tests)
    assert passes_tests(f"own = {name}\ndef {name}(*a): return own(*a)", tests)


LEETCODE = """
class Solution:
    def twoSum(self, nums: List[int], target: int) -> Optional[List[int]]:
        seen = defaultdict(int)
        for i, n in enumerate(nums):
            if target - n in seen:
                return [seen[target - n], i]
            seen[n] = i
    def power(self, x): return pow(x, 2, 5) + floor(math.sqrt(4)) + inf * 0 if x is None else x
"""


def test_the_usual_imports_of_leetcode_are_there():
    tests = "assert Solution().twoSum(nums=[3, 3], target=6) == [0, 1] and gcd(4, 6) == 2 < inf"
    assert not passes_tests("", tests) and not passes_tests("class Solution: pass", tests)
    assert passes_tests(LEETCODE, tests)
    assert passes_tests("from typing import *\nfrom math import *\nf = lambda: inf", "assert f()")


def test_a_list_of_statements_is_tests() -> None:
    tests = ["assert double(2) == 4", "assert double(3) == 6"]
    assert passes_tests(RIGHT, tests) and not passes_tests(WRONG, tests)


def test_the_function_under_test_may_have_a_name_of_python() -> None:
    right, wrong = ("def sum(a, b): return a " + sign + " b" for sign in "+-")
    for tests in ("assert sum(10, 15) == 25", "def test_sum(): assert sum(10, 15) == 25"):
        assert passes_tests(right, tests) and not passes_tests(wrong, tests)
    # Where another name is under test, that of Python judges.
    cheat = "def double(x): return 0\ndef abs(x): return 0\ndef eval(x): return 6\nsum = eval"
    for tests in ("abs(double(3) - 6) < 1", "eval('double(3)') == 6"):
        assert not passes_tests(cheat, f"assert {tests}")
        assert not passes_tests(cheat, f"from solution import *\nassert {tests}")
    assert passes_tests(cheat, "assert sum([1, 2]) == abs(3 + double(1))")
    for tests in (
        "def check(double):\n    assert abs(double(3) - 6) < 1\ncheck(double)",
        "double = double\nassert abs(double(3) - 6) < 1",
    ):
        assert not passes_tests(cheat, tests)


PROGRAM = """
import collections, dataclasses, enum, logging, traceback
from fractions import Fraction

class TooSmall(ValueError): pass

class Point:
    def __init__(self, x, y=0): self.x, self.y = x, y
    def __eq__(self, other): return isinstance(other, Point) and self.x == other.x

@dataclasses.dataclass
class Pair: a: int = 1

def sort(a, key=None): a.sort(key=key)
def half(): return Fraction(1, 2)
def check_size(x):
    if x < 0: raise TooSmall(f"{x} is too small")
def ask(): return input("name? ")
def say(text): print(text)
def careful():
    try: check_size(-1)
    except TooSmall: traceback.print_exc(); logging.exception("too small")
    return collections.namedtuple("P", "a b")(1, 2).b + enum.Enum("E", "A B").B.value + Pair().a
"""
HONEST_TESTS = """
import builtins, contextlib, io, sys
from fractions import Fraction
from unittest.mock import patch

a = [3, 1, 2]
assert sort(a) is None and a == [1, 2, 3]
assert sort(a, key=lambda x: -x) is None and a == [3, 2, 1]
assert half() == Fraction(1, 2) == 0.5 and Point(1, y=2) == Point(1) != 5
try:
    check_size(-1)
    assert False
except TooSmall as caught:
    assert isinstance(caught, ValueError) and str(caught) == "-1 is too small"
assert careful() == 5

def test_what_is_printed():
    with contextlib.redirect_stdout(io.StringIO()) as said: say(3)
    assert said.getvalue() == "3\\n"
    before, sys.stdout = sys.stdout, io.StringIO()
    say(4)
    assert sys.stdout.getvalue() == "4\\n"
    sys.stdout = before

@patch("builtins.print")
def test_what_is_asked(mock):
    with patch("builtins.input", return_value="Ada"): assert ask() == "Ada"
    builtins.input = lambda prompt: prompt
    assert ask() == "name? "
    say(5)
    mock.assert_called_with(5)
"""


def test_tests_use_the_program_as_any_module():
    assert passes_tests(PROGRAM, HONEST_TESTS)
    wrong = ["assert Point(1) == Point(2)", "check_size(-1)\nassert True", "assert no_such_name"]
    wrong += ["import sys\nsys.exit(0)\nassert True", "assert ask() == 'Ada'"]
    assert [tests for tests in wrong if passes_tests(PROGRAM, tests)] == []


def test_the_main_block_of_a_tested_program_is_not_executed():
    assert passes_tests(RIGHT + "if __name__ == '__main__':\n    exit(input())", FORMS["asserts"])


def test_threads_test_programs_at_the_same_time():
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda p: passes_tests(p, FORMS["asserts"]), [RIGHT, WRONG] * 8))
    assert results == [True, False] * 8


def test_a_program_gets_its_input_and_nothing_of_this_environment(monkeypatch):
    monkeypatch.setenv("CANARY", "secret")
    result = run_python("import os\nprint(input(), os.environ.get('CANARY'), os.listdir())", "hi")
    assert result.stdout == "hi None ['program.py']\n" and result.exit_code == 0
    assert run_python("import sys; sys.exit(3)").exit_code == 3
    assert run_python("exit()").exit_code == 0 and run_python("quit(3)").exit_code == 3
    assert run_python("import os; os.abort()").exit_code == -6


def test_output_is_whole():
    result = run_python("print(*range(300_000))")
    assert result.stdout == " ".join(map(str, range(300_000))) + "\n"


@pytest.mark.parametrize(
    "line", ["from sympy import isprime", "import sympy.ntheory as n\nisprime = n.isprime"]
)
def test_a_program_may_import_libraries_that_read_frames_at_their_import(line):
    tests = "assert f(7)\nassert not f(8)"
    assert passes_tests(f"{line}\ndef f(n): return isprime(n)", tests, timeout_s=30)
    assert not passes_tests(f"{line}\ndef f(n): return not isprime(n)", tests, timeout_s=30)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("while True: pass", None),
        ("import time; time.sleep(1000)", None),
        ("x = bytearray(10**10)", "MemoryError"),
        ("print('x' * 3 * 10**7)", "File too large"),
        ("import os\nfor _ in range(10**4): os.fork() or os.pause()", ""),
        ("1/0", "ZeroDivisionError"),
        ("print('\ud800')", ""),
    ],
)
def test_programs_that_do_not_behave_are_stopped(program, told):
    start = time.monotonic()
    timeout_s = 1 if told is None else 30
    result = run_python(program, timeout_s=timeout_s, memory_mib=256)
    assert time.monotonic() - start < 60
    assert len(result.stdout) <= 2**24 and len(result.stderr) <= 10_000
    if told is None:
        assert result.exit_code is None
    else:
        assert told in result.stderr
        assert (result.exit_code == 0) == (program == "print('\ud800')")


LEAVES = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        open("pid", "w").write(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
while not os.path.exists("pid") or not open("pid").read(): time.sleep(0.01)
print(open("pid").read())
"""


def test_what_a_program_leaves_running_is_ended_wherever_it_went():
    result = run_python(LEAVES)
    assert result.exit_code == 0
    assert ends(int(result.stdout))


def test_a_folder_without_rights_is_removed():
    program = """
import os
import subprocess
import sys
os.makedirs("a/b")
open("a/b/c", "w").close()
os.chmod("a/b", 0)
os.chmod("a", 0)
print(os.getcwd())
"""
    result = run_python(program)
    assert result.exit_code == 0 and not os.path.exists(result.stdout.strip())


def test_a_hundred_small_programs_are_tested_within_seconds():
    passes_tests(RIGHT, FORMS["asserts"])  # the first starts the server
    start = time.monotonic()
    assert all(passes_tests(RIGHT, FORMS["asserts"]) for _ in range(100))
    assert time.monotonic() - start < 30  # 1.5 s on two idle cores


def test_programs_end_with_the_process_that_runs_them(tmp_path):
    program = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(1000)"
    words = (
        f"from openrlhf.rewards.code_runner import run_python as r; r({program!r}, timeout_s=99)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", words], env=environment)
    pids: list[int] = []
    while not pids:
        time.sleep(0.01)
        pids = [int(path.read_text() or 0) for path in tmp_path.glob("*/pid")]
    caller.kill()
    caller.wait()
    assert ends(pids[0])
