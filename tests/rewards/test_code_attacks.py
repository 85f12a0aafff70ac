"""Programs that are wrong and try to pass their tests, or to write where they must not."""

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from openrlhf.rewards import code_runner
from openrlhf.rewards.code_runner import passes_tests, run_python

PR_GET_DUMPABLE = 3
ASSERTS = """
import math
assert double(2) == 4
assert abs(double(-1) - -2) < 1 and math.isclose(double(0.5), 1) and double(5) in [10, 11]
"""
FUNCTIONS = """
from solution import double
def test_two(): assert double(2) == 4
def test_five(): assert double(5) == 10
"""
UNITTEST = """
import unittest
class Tests(unittest.TestCase):
    def test_two(self): self.assertEqual(double(2), 4)
    def test_five(self): self.assertTrue(double(5) == 10)
"""
CALLED = """
def check(double):
    assert abs(double(2) - 4) < 1 and abs(double(5) - 10) < 1
check(double)
"""

# Each `double` is wrong, or right only if a look at what it must not see succeeds.

ATTACKS = {
    "change the checks of a library that holds them": """
        import doctest, numpy.testing
        for case in (doctest.unittest.TestCase, numpy.testing.TestCase):
            case.assertEqual = case.assertTrue = lambda *_: None
        def double(x): return 0
    """,
    "leave at once": "import os; os._exit(0)",
    "leave when it is called": "def double(x): import os; os._exit(0)",
    "exit in order": "def double(x): raise SystemExit(0)",
    "end in order, later": """
        import atexit, os
        atexit.register(os._exit, 0)
        def double(x): exit(0)
    """,
    "write a verdict everywhere": """
        import os
        for number in range(64):
            for text in (b"9\\n\\n", b"0" * 64 + b"9\\n\\n", b"passed"):
                try: os.write(number, text)
                except OSError: pass
        print('[0, "", "", "9\\\\n\\\\n"]')
        def double(x): os._exit(0)
    """,
    "read every descriptor": """
        import os
        def numbers():
            for number in range(64):
                os.set_blocking(number, False) if number < 63 else None
                try: yield os.read(number, 10**6) if number < 63 else b""
                except OSError: pass
        found = b"".join(numbers())
        def double(x): return 2 * x if b"double" in found else 0
    """,
    "read what other processes hold": """
        import os
        def read(path):
            try: return open(path, "rb").read(10**6)
            except OSError: return b""
        pids = [os.getpid(), os.getppid(), *filter(str.isdigit, os.listdir("/proc"))][:50] if (
            os.access("/proc", os.R_OK)) else [os.getpid(), os.getppid()]
        names = ["environ", "cmdline", "mem", "maps", *(f"fd/{n}" for n in range(64))]
        found = b"".join(read(f"/proc/{pid}/{name}") for pid in pids for name in names
                         if name != "fd/0" and (pid != os.getpid() or "fd" not in name))
        def double(x): return 2 * x if b"double(2)" in found else 0
    """,
    "read its own memory": """
        import re
        def double(x):
            spans = [line.split()[0].split("-") for line in open("/proc/self/maps")]
            with open("/proc/self/mem", "rb", 0) as memory:
                for start, end in spans:
                    memory.seek(int(start, 16))
                    try: text = memory.read(int(end, 16) - int(start, 16))
                    except OSError: continue
                    if b"assert double" in text: return 2 * x
            return 0
    """,
    "look for a file with the tests": """
        import glob, os
        def read(path):
            try: return open(path, "rb").read(10**6)
            except OSError: return b""
        paths = glob.glob("/tmp/*/*") + glob.glob("../**", recursive=True) + glob.glob("*")
        found = any(b"assert dou" + b"ble(2)" in read(path) for path in paths)
        def double(x): return 2 * x if found else 0
    """,
    "read the constants of the caller": """
        import sys
        def double(x): return max(n for n in sys._getframe(1).f_code.co_consts if n == 2 * x)
    """,
    "read the caller through inspect": """
        import inspect
        def double(x): return 2 * x if inspect.stack()[1].frame.f_code.co_consts else 0
    """,
    "read the caller through a traceback": """
        def double(x):
            try: 1 / 0
            except ZeroDivisionError as error: frame = error.__traceback__.tb_frame
            return 2 * x if frame.f_back else 0
    """,
    "read the caller through a generator": """
        def step():
            yield 1
        def double(x):
            g = step(); next(g)
            return 2 * x if g.gi_frame is not None else 0
    """,
    "read the caller through a signal": """
        import signal
        def double(x):
            frames = []
            signal.signal(signal.SIGUSR1, lambda number, frame: frames.append(frame))
            signal.raise_signal(signal.SIGUSR1)
            return 2 * x if frames[0].f_back else 0
    """,
    "read the frames of all threads": """
        import sys
        def double(x): return 2 * x if sys._current_frames() else 0
    """,
    "trace the tests": """
        import sys
        frames = []
        def trace(frame, event, argument): frames.append(frame); return trace
        sys.settrace(trace)
        def double(x): return 2 * x
    """,
    "profile the tests": """
        import sys, threading
        threading.setprofile(print)
        sys.setprofile(print)
        def double(x): return 2 * x
    """,
    "watch with an audit hook": """
        import sys
        seen = []
        sys.addaudithook(lambda event, arguments: seen.append(event))
        def double(x): return 2 * x if seen else 0
    """,
    "search the garbage collector": """
        import gc
        def double(x): return 2 * x if gc.get_objects() or gc.get_referrers(double) else 0
    """,
    "reach the interpreter with ctypes": """
        import ctypes
        def double(x):
            ctypes.pythonapi.PyEval_GetFrame.restype = ctypes.py_object
            return 2 * x if ctypes.pythonapi.PyEval_GetFrame() else 0
    """,
    "replace Python's functions": """
        import builtins
        builtins.abs = builtins.round = lambda *a: 0
        builtins.isinstance = builtins.all = builtins.any = lambda *a: True
        builtins.exec = builtins.compile = builtins.__import__ = lambda *a: None
        def double(x): return 0
    """,
    "have names of Python's functions": """
        def abs(x): return 0
        def double(x): return 0
    """,
    "replace AssertionError": """
        import builtins
        class AssertionError(BaseException):
            def __new__(cls, *a): raise SystemExit(0)
        builtins.AssertionError = AssertionError
        def double(x): return 0
    """,
    "replace unittest": """
        import sys, unittest
        unittest.TestCase.assertEqual = unittest.TestCase.assertTrue = lambda *a: None
        unittest.TestCase.run = unittest.TestSuite.run = lambda self, result=None: None
        unittest.TestResult.wasSuccessful = lambda self: True
        sys.modules["unittest"] = sys.modules["unittest.case"] = type(sys)("unittest")
        def double(x): return 0
    """,
    "replace unittest while it runs": """
        def double(x):
            import sys, unittest
            unittest.TestCase.assertEqual = unittest.TestCase.fail = lambda *a, **k: None
            unittest.TestResult.wasSuccessful = lambda self: True
            sys.modules["unittest"] = None
            return 0
    """,
    "skip the tests": """
        import unittest
        def double(x): raise unittest.SkipTest("later")
    """,
    "replace what the tests import": """
        import math, operator
        math.isclose = operator.eq = lambda *a, **k: True
        def double(x): return 0
    """,
    "be imported in the place of others": """
        import importlib, sys
        class Finder:
            def find_spec(self, name, path=None, target=None): raise SystemExit(0)
        sys.meta_path.insert(0, Finder()); sys.path.insert(0, "."); sys.modules.pop("math", 0)
        for name in ("math", "unittest", "tests", "sitecustomize"):
            open(f"{name}.py", "w").write("import os; os._exit(0)")
        importlib.invalidate_caches()
        def double(x): return 0
    """,
    "be another module": """
        import sys
        class Yes:
            def __getattr__(self, name): return lambda *a: 0
        sys.modules["solution"] = sys.modules["__main__"] = sys.modules["tests"] = Yes()
        def double(x): return 0
    """,
    "patch the main module": """
        import __main__, sys
        for module in (__main__, sys.modules["__main__"]):
            for name in dir(module):
                if name[:2] != "__": setattr(module, name, lambda *a: None)
        def double(x): return 0 if dir(__main__) else 2 * x
    """,
    "catch what the harness writes": """
        import json, os
        said, write, leave = [], os.write, os._exit
        os.write = lambda number, text: (said.append(text), write(number, text[:64] + b"9\\n\\n"))
        os._exit = lambda code: leave(0)
        json.dumps = lambda *a, **k: "9"
        def double(x): return 0
    """,
    "take the place of the descriptor of the verdict": """
        import os, subprocess, sys
        reads, writes = os.pipe()
        verdict = os.dup(63)
        os.dup2(writes, 63)
        forge = "import os, sys; r, w = map(int, sys.argv[1:])\\n"
        forge += "os.write(w, os.read(r, 999).replace(b' 0 ', b' 9 '))"
        words = [sys.executable, "-c", forge, str(reads), str(verdict)]
        subprocess.Popen(words, pass_fds=[reads, verdict])
        def double(x): import time; time.sleep(0.3); return 0
    """,
    "replace standard output": """
        import io, sys
        sys.stdout = sys.stderr = sys.__stdout__ = io.StringIO()
        def double(x): return 0
    """,
    "go on in a child": """
        import os
        def double(x):
            if os.fork() == 0: return 2 * x
            os.wait()
            return 0
    """,
    "search for the answer with children": """
        import os
        def double(x):
            for guess in range(-30, 30):
                if os.fork() == 0: return guess
                os.wait()
    """,
    "go on in a thread": """
        import os, threading, time
        def later():
            while True:
                time.sleep(0.001)
                try: os.write(63, b"9\\n\\n")
                except OSError: pass
        threading.Thread(target=later).start()
        def double(x): return 0
    """,
    "kill who waits": """
        import os, signal
        for pid in (os.getppid(), -os.getpgid(os.getppid()), os.getsid(os.getppid())):
            try: os.kill(pid, signal.SIGKILL)
            except OSError: pass
        def double(x): return 0
    """,
    "stop who waits": """
        import os, signal
        try: os.kill(os.getppid(), signal.SIGSTOP)
        except OSError: pass
        def double(x): return 0
    """,
    "another interpreter": """
        def double(x):
            try: import _xxsubinterpreters as other
            except ImportError: import _interpreters as other
            other.run_string(other.create(), "import sys; sys._current_frames()")
            return 2 * x
    """,
}


@pytest.mark.parametrize(
    "tests",
    [ASSERTS, FUNCTIONS, UNITTEST, CALLED],
    ids=["asserts", "functions", "unittest", "called"],
)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_wrong_program_does_not_pass_by_a_trick(attack, tests):
    assert not passes_tests(textwrap.dedent(ATTACKS[attack]), tests)


# What a program may do to neither the package nor the process that holds its tests, …
OF_THE_GRADER = {
    "write the grader": "open({grader!r}, 'r+')",
    "replace the grader": "os.rename({grader!r}, {grader!r} + '.old')",
    "plant a file for Python's start": "open(os.path.dirname(json.__file__) + '/../x.pth', 'w')",
    "read the memory of its caller": "open('/proc/{caller}/mem', 'rb')",
    "read the environment of its caller": "open('/proc/{caller}/environ').read()",
    "read the descriptors of its caller": "os.readlink('/proc/{caller}/fd/0')",
    "read the descriptors of its parent": "os.readlink('/proc/%d/fd/0' % os.getppid())",
    "end its caller": "os.kill({caller}, 0)",
    "end its parent": "os.kill(os.getppid(), 0)",
    "raise its limits": "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
    "become root": "os.setuid(0) if os.getuid() else 1 / 0",
    "leave its root": "os.mkdir('x'), os.chroot('x'), os.chdir('../' * 9), open('etc/hosts')",
    "make what is read-only writable": """
import ctypes
libc = ctypes.CDLL(None)
libc.unshare(0x10020000), libc.mount(None, b"/", None, 0x1020, None)
open(os.path.dirname(json.__file__) + '/x.py', 'w')
""",
}
# … and what Landlock prevents, and most of it a root of the program's own.
OF_THE_USER = {
    "read a file of the user": "open({secret!r}).read()",
    "write a file of the user": "open({secret!r}, 'a')",
    "follow a link of its own": "os.symlink({secret!r}, 'link'), open('link').read()",
    "write shared memory": "open('/dev/shm/openrlhf-attack', 'w')",
    "list processes": "os.listdir('/proc/{caller}')",
    "read its own memory": "open('/proc/self/mem', 'rb')",
    "connect": "socket.create_connection(('127.0.0.1', {port}))",
    "listen": "socket.create_server(('127.0.0.1', 0))",
}


def landlock_version() -> int:
    return max(0, ctypes.CDLL(None).syscall(444, None, 0, 1))


@pytest.fixture
def without_landlock(monkeypatch, tmp_path):
    """Programs run as on a kernel that does not know Landlock."""
    script = tmp_path / "program_process.py"
    number = "LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444"
    text = code_runner.PROGRAM_PROCESS.read_text()
    assert number in text
    script.write_text(text.replace(number, number.replace("444", "9999")))
    monkeypatch.setattr(code_runner, "PROGRAM_PROCESS", script)
    code_runner._server.cache_clear()
    yield
    code_runner._server.cache_clear()


@pytest.fixture
def of_no_root(without_landlock):
    """Programs of root run as those of other users."""
    script = code_runner.PROGRAM_PROCESS
    text = script.read_text()
    assert "is_root = user == 0" in text
    script.write_text(text.replace("is_root = user == 0", "is_root = False"))


def may_mount() -> bool:
    """Return True if a user may mount file systems in namespaces of their own."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "x", "/"]
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(command, capture_output=True).returncode
    )


def succeed(attempts: dict[str, str], secret: Path) -> list[str]:
    """Return the names of those attempts that raise no error."""
    secret.write_text("token")
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        facts = {
            "grader": str(Path(code_runner.__file__).with_name("program_process.py")),
            "caller": os.getpid(),
            "secret": str(secret),
            "port": server.getsockname()[1],
        }
        start = "import json, os, resource, socket\n"
        programs = {name: start + line.format(**facts) for name, line in attempts.items()}
        return [name for name, text in programs.items() if run_python(text).exit_code == 0]


@pytest.mark.skipif(landlock_version() < 6, reason="needs Linux 6.12 with Landlock")
def test_with_landlock_a_program_reaches_nothing_but_its_folder(tmp_path):
    assert succeed(OF_THE_GRADER | OF_THE_USER, tmp_path / "secret") == []


@pytest.mark.usefixtures("without_landlock")
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_without_landlock_the_programs_of_root_are_another_users(tmp_path):
    assert succeed(OF_THE_GRADER, tmp_path / "secret") == []
    assert "write a file of the user" not in succeed(OF_THE_USER, tmp_path / "secret")


@pytest.mark.usefixtures("of_no_root")
@pytest.mark.skipif(not may_mount(), reason="needs user namespaces")
def test_without_landlock_the_programs_of_others_get_a_root_of_their_own(tmp_path):
    reached = succeed(OF_THE_GRADER | OF_THE_USER, tmp_path / "secret")
    assert reached == ["end its caller", "end its parent", "listen"]  # to nobody
    for attack in ("look for a file with the tests", "read its own memory"):
        assert not passes_tests(textwrap.dedent(ATTACKS[attack]), ASSERTS)
    written = "import os, sys; open('a', 'w'), open('/dev/null', 'w'), print(sorted(os.listdir()))"
    assert run_python(written).stdout == "['a', 'program.py']\n"


@pytest.mark.usefixtures("of_no_root")
@pytest.mark.skipif(not may_mount(), reason="needs user namespaces")
def test_a_root_of_its_own_shows_any_number_of_folders_read_only(tmp_path, monkeypatch):
    packages = [tmp_path / f"{n}\té-packages" for n in range(70)]
    for folder in packages:
        folder.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, *map(str, packages)])
    for folder in (str(packages[0]), str(packages[-1])):
        assert "Read-only file system" in run_python(f"open({folder!r} + '/a', 'w')").stderr


@pytest.mark.usefixtures("without_landlock")
@pytest.mark.parametrize("tests", [ASSERTS, FUNCTIONS], ids=["asserts", "functions"])
def test_without_landlock_tricks_within_the_interpreter_fail_all_the_same(tests):
    of_files = {"read its own memory", "look for a file with the tests"}
    of_signals = {"kill who waits", "stop who waits"} if os.getuid() else set()
    tried = {name: ATTACKS[name] for name in ATTACKS.keys() - of_files - of_signals}
    passed = [name for name, text in tried.items() if passes_tests(textwrap.dedent(text), tests)]
    assert passed == []


def test_the_process_that_holds_the_tests_is_closed_to_other_processes():
    assert passes_tests("def double(x): return 2 * x", ASSERTS)
    assert ctypes.CDLL(None).prctl(PR_GET_DUMPABLE) == 0
    server = code_runner._server()[1].pid
    assert Path(f"/proc/{server}/fd").stat().st_uid == 0  # of a process that may be read: its user


def test_what_weak_tests_let_through_is_known():
    equal = "class E:\n    __eq__ = __contains__ = lambda *a: True\ndef double(x): return E()"
    assert passes_tests(equal, "assert double(2) == 4 and 4 in double(2)")
    assert not passes_tests(equal, "assert type(double(2)) is int and double(2) == 4")
    assert passes_tests("def double(x): return float('nan')", "assert not double(2) < 4")
