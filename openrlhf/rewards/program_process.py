"""The processes in which programs that a model wrote run: a script that imports nothing of this
package.

code_runner.py starts it once, as a server. For each program the server forks a supervisor, which
holds the time limit and ends all that the program has started, and the supervisor forks the process
of the program, which gives up its rights before it executes anything. Tests are executed there too,
in a thread of their own; SECURITY.md says what a hostile program can and cannot do to them.
"""

import ast
import builtins
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
import unittest
from _blake2 import blake2b
from _thread import start_new_thread
from asyncio import BaseEventLoop
from asyncio import run as run_coroutine
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from os import _exit, write
from pathlib import Path
from signal import pause
from types import (
    CodeType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

builtins.exit = builtins.quit = sys.exit  # which Python's `site` would define
# The functions of this file keep Python's own functions when a program replaces them.
__builtins__ = dict(vars(builtins))

MIB = 1024**2
MAX_FILE_BYTES = 16 * MIB  # of any file, output included
MAX_SHOWN = 10_000  # characters of errors that are kept
MAX_FILES = 64  # open ones
MAX_TASKS = 64  # processes and threads
FIRST_UID = 61184  # a range that systemd, too, gives to processes without an account
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SUBREAPER = 1, 4, 8, 36
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, CAP_DAC_READ_SEARCH = 38, 47, 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
MAY_READ, ON_A_FILE = 0b1101, 0b1100000000000111  # execute, read a file, list a folder
OWN_NAMESPACES = 0x58020000  # of a user, mounts, IPC and network
BIND, BIND_ALL, MAKE_READ_ONLY = 0x1000, 0x5000, 0x1021
KEPT_FLAGS = 0b1110  # of a mount: nosuid, nodev, noexec
READABLE = """
    /usr /lib /lib64 /bin /nix/store /etc/ld.so.cache /etc/localtime /etc/passwd /proc/cpuinfo
    /proc/meminfo /sys/devices/system/cpu /dev/zero /dev/random /dev/urandom
"""
# What a solution of LeetCode takes for granted; the later of two equal names counts.
USUAL_IMPORTS = (
    "typing, operator, random, re, string, copy, statistics, datetime, math, itertools, functools, "
    "collections, heapq, bisect"
)
# Ways to the frames and objects of the tests. What tests hand over is data of theirs all the same.
HIDDEN_EVENTS = """
    sys.settrace sys.setprofile sys.addaudithook sys._getframe sys._current_frames
    sys._current_exceptions gc.get_objects gc.get_referrers gc.get_referents ctypes.dlsym
    ctypes.string_at ctypes.wstring_at ctypes.PyObj_FromPtr ctypes.cdata ctypes.cdata/buffer
    ctypes.call_function os.fork os.forkpty sys.monitoring.register_callback
"""
OF_TESTS = ("unittest", "pytest", "_pytest")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
BLOCKS = ("body", "orelse", "handlers", "finalbody")
# Names that reach those of the program.
REACHING = {"eval", "exec", "compile", "globals", "locals", "vars", "__import__", "__builtins__"}
# No program can write these names.
COUNT, NUMBER, BEFORE, ANSWER = "count a check", "number of checks", "number before", "an answer"
TAKE = "take from the program"
VERDICT = MAX_FILES - 1  # the descriptor; no object that the fork has copied closes this number
HIDDEN_NAMES = "tb_frame gi_frame cr_frame ag_frame f_code gi_code cr_code ag_code"

libc = ctypes.CDLL(None)


class HiddenError(RuntimeError, ValueError):
    """Raised where a program looks for its tests; a ValueError, as of a stack that is not deep."""


class OuterNames(dict[str, Any]):
    """Names that tests find behind their own: Python's, the usual ones, and the program's `own`.

    `is_used` is True once the tests have looked up a name of the program.
    """

    def __init__(self, names: dict[str, Any], own: dict[str, Any]) -> None:
        super().__init__({name: value for name, value in names.items() if name not in own})
        self.own, self.is_used = own, False

    def __missing__(self, name: str) -> Any:
        value = self.own[name]
        self.is_used = True
        return value

    def take(self, names: dict[str, Any], *imported: str) -> None:
        """Move names that tests imported from the program behind the tests' own."""
        for name in imported:
            if name not in names:  # imported within a function
                self.is_used = True
            elif not self.is_used:
                self.own[name] = names.pop(name)
                self.pop(name, None)


def serve(line: socket.socket) -> int:
    """Fork for each connection that is handed over; return it in the new process alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, 1, 1)
        if not message:
            _exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return descriptors[0]
        os.close(descriptors[0])


def supervise(line: int) -> dict[str, Any]:
    """Run a program in a process of its own, and send what came of it; return the job in that
    process alone.
    """
    libc.prctl(PR_SET_SUBREAPER, 1)  # what the program leaves running becomes a child of this one
    with open(line, "rb", closefd=False) as given:
        job: dict[str, Any] = {**json.load(given), "nonce": os.urandom(32)}
    files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "verdict")]
    os.pwrite(files[0], job["stdin"].encode(errors="replace"), 0)
    if (pid := os.fork()) == 0:
        confine(job, files)
        return job
    poll, process = select.poll(), os.pidfd_open(pid)
    poll.register(process, select.POLLIN)
    poll.register(line, 0)  # nobody waits any more
    has_ended = process in dict(poll.poll(job["timeout_s"] * 1000))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if has_ended else None
    end_all(pid)
    said = (text.partition(b" ") for text in os.pread(files[3], MAX_FILE_BYTES, 0).split(b"\n"))
    verdicts = [text for sign, _, text in said if sign == signature(text, job["nonce"])]
    shown = [os.pread(file, MAX_FILE_BYTES, 0).decode(errors="replace") for file in files[1:3]]
    reply = [code, shown[0], shown[1][:MAX_SHOWN], b"".join(verdicts[:1]).decode()]
    with suppress(ConnectionError), open(line, "wb") as output:
        output.write(json.dumps(reply).encode())
    _exit(0)


def signature(text: bytes, nonce: bytes) -> bytes:
    """Return a token that only the harness can write before a verdict, even if a program reads
    another.
    """
    return blake2b(text, key=nonce).hexdigest().encode()


def end_all(pid: int) -> None:
    """Kill a process group and every descendant, wherever it went."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(FileNotFoundError, ChildProcessError):  # a kernel without it; no child is left
        while True:
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def confine(job: dict[str, Any], descriptors: list[int]) -> None:
    """Give up what a program must not have, for good: descriptors, resources, rights."""
    supervisor = os.getppid()
    os.setsid()
    os.chdir(job["folder"])
    for number, descriptor in zip((0, 1, 2, VERDICT), descriptors, strict=True):
        os.dup2(descriptor, number)
    os.closerange(3, VERDICT)
    os.closerange(VERDICT + 1, 2**16)
    os.environ |= {"HOME": job["folder"], "TMPDIR": job["folder"]}
    # The tasks of another user's processes are not counted; those of the whole machine, which are
    # at least the user's own, stand in loadavg.
    user = os.getuid()
    is_root = user == 0
    tasks = 0 if is_root else int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
    for kind, most in (
        (resource.RLIMIT_CPU, int(job["timeout_s"] + 1)),
        (resource.RLIMIT_AS, job["memory_mib"] * MIB),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_NPROC, MAX_TASKS + tasks),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if is_root:
        give_up_root()
    if (version := libc.syscall(LANDLOCK_CREATE, None, 0, 1)) > 0:
        restrict_files(job["folder"], version)
    elif os.getuid() == user:
        with suppress(OSError):  # a kernel that does not let its users do this
            change_root(job["folder"])
        drop_capabilities(0)
    libc.prctl(PR_SET_DUMPABLE, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        _exit(1)


def give_up_root() -> None:
    """Become a user without an account and without root's capabilities, except that to read files
    where only root can read Python.
    """
    libc.prctl(PR_SET_KEEPCAPS, 1)
    uid = FIRST_UID + os.getpid() % 4096
    try:
        os.chown(".", uid, uid)
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    except OSError:  # in some containers root cannot
        os.chown(".", os.getuid(), -1)
    mask = 0 if os.access(os.__file__, os.R_OK) else 1 << CAP_DAC_READ_SEARCH
    drop_capabilities(mask)
    libc.prctl(PR_CAP_AMBIENT, 2, CAP_DAC_READ_SEARCH, 0, 0)  # for Pythons that it starts


def drop_capabilities(mask: int) -> None:
    """Give up all capabilities but those of a mask."""
    words = (mask, mask, mask, 0, 0, 0)  # effective, permitted, inheritable; the upper half
    libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *words))


def readable() -> list[str]:
    """Return Python, its libraries, and what both read."""
    return [*READABLE.split(), sys.prefix, sys.base_prefix, *sys.argv[1:]]


def change_root(folder: str) -> None:
    """Enter namespaces of the program's own, with nothing but its folder and, read-only, Python and
    its libraries; raise OSError where this is not allowed. They also hide the network and other
    processes.
    """
    user, group, root = os.getuid(), os.getgid(), os.path.realpath(folder)
    shown = {path for each in readable() for path in (each, os.path.realpath(each))}
    there = {*filter(os.path.exists, shown), "/dev/null"}
    succeed(libc.unshare(OWN_NAMESPACES))
    libc.prctl(PR_SET_DUMPABLE, 1)  # until `confine` ends: else the files of /proc/self are root's
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in maps.items():
        Path("/proc/self", name).write_text(text)
    succeed(libc.mount(b"none", os.fsencode(root), b"tmpfs", 0, None))
    for source in map(Path, sorted(there)):
        target = Path(f"{root}{source}")
        (target if source.is_dir() else target.parent).mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.touch()
        succeed(libc.mount(bytes(source), bytes(target), None, BIND_ALL, None))
    own = Path(f"{root}{folder}")
    own.mkdir(parents=True, exist_ok=True)
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        mounted = line.split()[4].decode("unicode_escape").encode("latin-1")
        if Path(root) in (path := Path(os.fsdecode(mounted)), *path.parents):
            kept = os.statvfs(mounted).f_flag & KEPT_FLAGS  # which only the system may take away
            succeed(libc.mount(None, mounted, None, MAKE_READ_ONLY | kept, None))
    succeed(libc.mount(b".", bytes(own), None, BIND, None))  # what is below the tmpfs
    os.chroot(root)
    os.chdir(folder)


def succeed(outcome: int) -> None:
    """Raise OSError for a call of the system that failed."""
    if outcome < 0:
        raise OSError


def restrict_files(folder: str, version: int) -> None:
    """Have Landlock allow reading Python and its libraries and writing the folder alone; it also
    hides other processes, and from some version on TCP and signals.
    """
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = struct.pack("QQQ", everything, 3 * (version >= 4), 3 * (version >= 6))
    ruleset = libc.syscall(LANDLOCK_CREATE, rules, len(rules), 0)
    rules_of = dict.fromkeys(readable(), MAY_READ)
    for path, rights in {**rules_of, "/dev/null": ON_A_FILE, folder: everything}.items():
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_PATH)
            rights &= everything if os.path.isdir(path) else everything & ON_A_FILE
            libc.syscall(LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
            os.close(descriptor)
    libc.syscall(LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def run_program(job: dict[str, Any], module: ModuleType, path: str) -> None:
    """Execute a program as a module of a file."""
    text = job["program"].encode(errors="replace").decode()
    Path(path).write_text(text, "utf-8")  # for what shows the source
    module.__file__ = path
    sys.modules[module.__name__], sys.argv = module, [path]
    exec(compile(text, path, "exec"), module.__dict__)


def hide() -> None:
    """Deny the program the common ways to the frames and objects of the tests."""
    events, attributes = HIDDEN_EVENTS.split(), HIDDEN_NAMES.split()

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        is_frame = event == "object.__getattr__" and arguments[1] in attributes
        is_interpreter = event == "import" and arguments[0].endswith("interpreters")
        if event in events or is_frame or is_interpreter:
            raise HiddenError(f"{event} is not available in tests")

    # What reads frames by itself goes on without.
    nothing = partial(dict.fromkeys, ())
    traceback.walk_tb = traceback._walk_tb_with_full_positions = nothing
    BaseEventLoop.set_debug, BaseEventLoop._debug = staticmethod(nothing), False
    sys.addaudithook(check)


def forget_tests() -> None:
    """Drop the libraries of tests, and the modules that hold parts of them, such as numpy.testing:
    the program gets copies of its own.
    """
    for name, module in list(sys.modules.items()):
        parts = [name, *(_home(value) for value in list(getattr(module, "__dict__", {}).values()))]
        if name not in (__name__, "__main__") and any(p.split(".")[0] in OF_TESTS for p in parts):
            del sys.modules[name]


def _home(value: Any) -> str:
    """Return the name of a module, or of the module of a class."""
    name = "__name__" if isinstance(value, ModuleType) else "__module__"
    return str(vars(value).get(name)) if isinstance(value, (type, ModuleType)) else ""


def import_libraries(program: str) -> None:
    """Import the libraries that a program will, but Python's own: some read frames at their import,
    such as sympy and matplotlib, and still can.
    """
    names: list[str] = []
    with suppress(Exception):  # of a program that is none
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    for name in names:
        if not name.startswith("_") and name.split(".")[0] not in sys.stdlib_module_names:
            with suppress(Exception):
                __import__(name)


def is_check(node: ast.AST) -> bool:
    """Return True for a statement that checks something where it is executed to its end."""
    match node:
        case ast.Assert(test=ast.Tuple()):  # which is always true
            return False
        case ast.Assert() | ast.If(body=[*_, ast.Raise()]) | ast.Try(body=[*_, ast.Raise()]):
            return True
        case ast.Try(body=[*_, last]):  # which is not to be reached
            return is_check(last) and not is_open(last)
        case ast.Lambda(body=value):
            return is_check(ast.Expr(value))
        case ast.Expr(ast.Call(func=ast.Name(name) | ast.Attribute(attr=name))):
            return name.startswith(("assert", "fail", "raises"))
        case ast.With(items=[ast.withitem(ast.Call(func=function))]):
            return ast.unparse(function).rpartition(".")[2].startswith(("assert", "raises"))
    return False


def is_open(node: ast.AST) -> bool:
    """Return True for an assert statement that may pass."""
    return isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant)


def swallowed(node: ast.AST) -> Iterator[ast.Assert]:
    """Yield the assert statements that a `try` keeps from being heard when they fail."""
    if isinstance(node, ast.Try):
        heard = (ast.Assert, ast.Raise)
        parts = [part for handler in node.handlers for part in ast.walk(handler)]
        if parts and not any(isinstance(part, heard) for part in parts):
            for part in (part for statement in node.body for part in ast.walk(statement)):
                if isinstance(part, ast.Assert) and is_open(part):
                    yield part


def answers(node: ast.AST) -> list[ast.Return]:
    """Return the ends of a test function that returns its result and checks nothing itself."""
    if not isinstance(node, FUNCTIONS) or not node.name.startswith("test"):
        return []
    parts = list(ast.walk(node))
    inner = (part for part in parts if part is not node and isinstance(part, FUNCTIONS))
    others = {part for function in inner for part in ast.walk(function)}
    found = [part for part in parts if isinstance(part, ast.Return) and part not in others]
    has_result = any(getattr(part.value, "value", part.value) is not None for part in found)
    return found if has_result and not any(map(is_check, parts)) else []


def judge(count: list[int], before: int, value: Any, *_: None) -> Any:
    """Count the result of a test function, which may be None only if others have been counted
    since its start; return it.
    """
    value = run_coroutine(value) if type(value) is CoroutineType else value
    count.append(len(count) > before if value is None else bool(value))
    return value


def require_checks(tree: ast.Module) -> None:
    """Raise ValueError if nothing that is executed checks anything, whatever the program is, or if
    fixtures are needed.
    """
    require_no_fixtures(tree, [], is_class=False)
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for statement in tree.body:
        match statement:
            case ast.If(test=ast.Compare(left=ast.Name("__name__"))):
                continue  # for those who execute the file
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name not in named and not name.startswith("test"):
                    continue
        if any(is_check(node) or answers(node) for node in ast.walk(statement)):
            return
    raise ValueError("they check nothing. Add assert statements or test functions")


def require_no_fixtures(block: ast.AST, marks: list[ast.expr], *, is_class: bool) -> None:
    """Raise ValueError if a test of a block needs a fixture; the marks are those of its class."""
    for node in (node for name in BLOCKS for node in getattr(block, name, [])):
        if isinstance(node, FUNCTIONS):
            require_arguments(node, marks, int(is_class))
        elif not isinstance(node, ast.ClassDef):
            require_no_fixtures(node, marks, is_class=is_class)
        elif node.name.startswith("Test"):
            require_no_fixtures(node, node.decorator_list, is_class=True)


def require_arguments(
    function: ast.FunctionDef | ast.AsyncFunctionDef, marks: list[ast.expr], num_own: int
) -> None:
    """Raise ValueError for a fixture, and for a test that needs one: it has an argument that no
    mark gives. Decorators that are no marks may give any.
    """
    marks = [*function.decorator_list, *marks]
    texts = [ast.unparse(mark) for mark in marks]
    if found := [text for text in texts if "fixture" in text]:
        raise ValueError(f"{function.name} has {found[0]}: fixtures are not supported")
    if not function.name.startswith("test") or not all("mark." in text for text in texts):
        return
    names = function.args.args[num_own : len(function.args.args) - len(function.args.defaults)]
    given: list[ast.AST] = []
    for mark in marks:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith(".parametrize"):
            arguments = [*mark.args, *(keyword.value for keyword in mark.keywords)]
            if len(arguments) < 2:
                raise ValueError(f"{function.name} has no names and values in {ast.unparse(mark)}")
            given += ast.walk(arguments[0])
    constants = [str(node.value) for node in given if isinstance(node, ast.Constant)]
    missing = {name.arg for name in names} - set(" ".join(constants).replace(",", " ").split())
    if missing:
        told = ", ".join(sorted(missing))
        raise ValueError(f"{function.name} has arguments: fixtures are not supported: {told}")


def parted(tree: ast.Module) -> tuple[CodeType, CodeType]:
    """Return the code of the tests' imports, and of the rest with a count after each check, for
    each result that a test function returns, and where an assert fails unheard. In the rest, what
    is imported from the program becomes names that `OuterNames` has.
    """
    imports = [node for node in tree.body if is_import(node)]
    rest = ast.Module([node for node in tree.body if node not in imports], [])
    count, failed = (
        ast.Expr(ast.Call(ast.Name(COUNT, ast.Load()), [ast.Constant(number)], []))
        for number in (1, 0)
    )
    number = ast.Call(ast.Name(NUMBER, ast.Load()), [], [])
    before = ast.Assign([ast.Name(BEFORE, ast.Store())], number)
    for node in list(ast.walk(rest)):
        for part in swallowed(node):
            part.msg = failed.value
        if isinstance(node, ast.Lambda) and is_check(node):
            both = ast.Tuple([node.body, count.value], ast.Load())
            node.body = ast.Subscript(both, ast.Constant(0), ast.Load())
        if ends := answers(node):
            node.body = [before, *node.body, last := ast.Return()]
            ends.append(last)
        results = [getattr(end.value, "value", end.value) for end in ends]
        silence = ast.Constant(None if any(results) else True)  # where it returns False alone
        for end, result in zip(ends, results, strict=True):
            given = [end.value if result is not None else silence]
            given += [count.value] * is_check(ast.Expr(given[0]))
            given.insert(0, ast.Name(BEFORE, ast.Load()))
            end.value = ast.Call(ast.Name(ANSWER, ast.Load()), given, [])
        for name in BLOCKS:
            if isinstance(block := getattr(node, name, None), list):
                pairs = [(n, count) if is_check(n) else from_program(n) for n in block]
                block[:] = [node for pair in pairs for node in pair]
    parts = (ast.Module(imports, []), rest)
    first, second = (compile(ast.fix_missing_locations(m), "tests", "exec") for m in parts)
    return first, second


def from_program(node: ast.stmt) -> tuple[ast.stmt, ...]:
    """Return a statement and, after an import from the program, the one that takes its names."""
    match node:
        case ast.ImportFrom(module="solution", level=0, names=[ast.alias("*")]):
            return (ast.Pass(),)  # they are there
        case ast.ImportFrom(module="solution", level=0):
            names = [alias.asname or alias.name for alias in node.names]
        case ast.Import():
            names = [a.asname or a.name for a in node.names if a.name == "solution"]
        case _:
            return (node,)
    constants: list[ast.expr] = [ast.Constant(name) for name in names]
    return node, ast.Expr(ast.Call(ast.Name(TAKE, ast.Load()), constants, []))


def is_import(node: ast.stmt) -> bool:
    """Return True for an import of anything but the program."""
    if isinstance(node, ast.ImportFrom):
        return not node.level and node.module not in ("__future__", "solution")
    return isinstance(node, ast.Import) and "solution" not in {a.name for a in node.names}


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Execute the program as the module `solution`; return the names that it has bound."""
    module, sys.modules["__main__"] = ModuleType("solution"), ModuleType("__main__")
    vars(module)["__builtins__"] = vars(sys.modules["builtins"])
    run_program(job, module, "solution.py")
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


def under_test(tree: ast.Module) -> set[str]:
    """Return the name of Python's that a function under test has, such as `sum`: the only name in
    the tests but those of their own functions and classes. So no name by which tests judge comes
    from the program.
    """
    nodes = list(ast.walk(tree))
    if any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes):
        return set()
    own = {node.name for node in tree.body if isinstance(node, DEFINITIONS)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)} - own
    return used - REACHING if len(used) == 1 else set()


def has_texts(tree: ast.Module) -> bool:
    """Return True if tests may reach the program by a text: a name, its module or its file."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    return not names.isdisjoint(("globals", "locals", "vars")) or any(
        text.split(".")[0] == "solution" or "solution.py" in text for text in texts
    )


def execute(name: str, tests: Any, module: SimpleNamespace) -> None:
    """Execute a function or class of a module as pytest does, if it is one of tests."""
    if is_function(tests):
        for arguments in parameters(tests) if name.startswith("test") else ():
            if not needs_more(tests, arguments):
                prepare(module, "setup_function", tests)
                call(tests, arguments)
                prepare(module, "teardown_function", tests)
    elif not issubclass(type(tests), type) or not may_be_test(tests):
        return
    elif "TestCase" in [kind.__name__ for kind in tests.__mro__[1:]]:
        result = unittest.TestResult()
        unittest.TestLoader().loadTestsFromTestCase(tests).run(result)
        if not result.wasSuccessful():
            raise AssertionError
    elif name.startswith("Test") and tests.__init__ is object.__init__:
        execute_class(tests, module)


def execute_class(tests: type, module: SimpleNamespace) -> None:
    """Execute the methods and classes of a class in their order, those of its bases first."""
    prepare(tests, "setup_class", tests)
    for name in dict.fromkeys(name for kind in reversed(tests.__mro__) for name in vars(kind)):
        value = getattr(tests, name)
        if not is_function(value):
            execute(name, value, module)
            continue
        for arguments in parameters(value, tests) if name.startswith("test") else ():
            instance = tests()
            function = getattr(instance, name)
            prepare(instance, "setup_method", function)
            call(function, arguments)
            prepare(instance, "teardown_method", function)
    prepare(tests, "teardown_class", tests)


def is_function(value: Any) -> bool:
    """Return True for a function that may be a test."""
    function = value.func if isinstance(value, partial) else value
    if isinstance(function, (FunctionType, MethodType)):
        return may_be_test(function)
    return "__wrapped__" in getattr(function, "__dict__", ()) and may_be_test(function)


def may_be_test(value: Any) -> bool:
    """Return True unless a function or class is the program's, or marked as no test."""
    return value.__module__ != "solution" and getattr(value, "__test__", True)


def needs_more(function: Any, arguments: dict[str, Any]) -> bool:
    """Return True for a function that was only given the name of a test, as `test = lambda x: …`,
    and that lacks arguments.
    """
    num_given = len(arguments)
    if isinstance(function, partial):
        num_given += len(function.args) + len(function.keywords)
        function = function.func
    if not hasattr(function, "__code__") or function.__name__.startswith("test"):
        return False
    num_given += len(function.__defaults__ or ()) + hasattr(function, "__self__")
    return function.__code__.co_argcount > num_given


def prepare(owner: Any, name: str, argument: Any) -> None:
    """Call the function that pytest calls before or after tests, if there is one, with the
    argument if it takes one.
    """
    function = getattr(owner, name, None)
    if function is not None:
        num_arguments = function.__code__.co_argcount - hasattr(function, "__self__")
        function(*[argument][:num_arguments])


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call a test function; raise what it raises, and AssertionError if it returns False."""
    outcome = function(**arguments)
    if type(outcome) is CoroutineType:
        outcome = run_coroutine(outcome)
    if type(outcome) is GeneratorType:
        raise TypeError("a test that yields is not executed")
    if outcome is not None and not outcome:
        raise AssertionError


def parameters(function: Callable[..., Any], owner: Any = None) -> list[dict[str, Any]]:
    """Return the arguments of every call of a test function, as pytest's marks of it and of its
    class have them.
    """
    calls: list[dict[str, Any]] = [{}]
    marks = [getattr(of, "pytestmark", []) for of in (function, owner)]
    for mark in (m for part in marks for m in (part if isinstance(part, list) else [part])):
        conditions = [*mark.args, mark.kwargs.get("condition")]
        if mark.name == "skip" or (mark.name == "skipif" and any(conditions)):
            return []
        if mark.name == "parametrize":
            names, rows = [*mark.args, *mark.kwargs.values()][:2]
            names = names.replace(",", " ").split() if isinstance(names, str) else names
            rows = [
                row.values if hasattr(row, "marks") else row if len(names) > 1 else [row]
                for row in rows  # with marks: pytest.param(…)
            ]
            calls = [{**c, **dict(zip(names, row, strict=True))} for row in rows for c in calls]
    return calls


def test(job: dict[str, Any], usual: dict[str, Any]) -> None:
    """Execute a program and its tests; write the number of checks that were executed, 0 if one did
    not pass, and what is wrong with the tests themselves; end the process.
    """
    passed, problem = False, ""
    count: list[int] = []
    try:
        own = sys.modules["builtins"] = ModuleType("builtins")  # the program's, and its tests'
        vars(own).update(usual | vars(builtins))  # behind the program's names
        names = vars(module := ModuleType("tests"))
        names |= {"__builtins__": dict(__builtins__), COUNT: count.append}
        names |= {NUMBER: count.__len__, ANSWER: partial(judge, count)}
        try:
            require_checks(tree := ast.parse(job["tests"], "tests"))
            tested = under_test(tree)
            imports, rest = parted(tree)
            exec(imports, names)
        except (ImportError, SyntaxError, ValueError) as error:  # theirs, whatever the program is
            problem = str(error)
            raise
        imported = [vars(module) for module in names.values() if type(module) is ModuleType]
        before = [dict(module) for module in imported]
        forget_tests()
        import_libraries(job["program"])
        hide()
        taken = __builtins__.keys() - tested
        program = {name: value for name, value in load(job).items() if name not in taken}
        for of_module, kept in zip(imported, before, strict=True):
            of_module.update(kept)  # what the program has replaced in there
        outer = OuterNames(usual | __builtins__, program)
        names |= {"__builtins__": outer, TAKE: partial(outer.take, names)}
        if has_texts(tree):
            names |= {name: value for name, value in program.items() if name not in names}
            outer.is_used = bool(program)
        given = dict(names)
        exec(rest, names)
        made = {name: value for name, value in names.items() if given.get(name) is not value}
        prepare(tests := SimpleNamespace(**made), "setup_module", module)
        for name, value in made.items():
            execute(name, value, tests)
        prepare(tests, "teardown_module", module)
        passed = all(vars(builtins)[name] is value for name, value in __builtins__.items())
        if passed and not outer.is_used and not any(count):
            problem = "they check nothing: no check is executed"
        passed = passed and outer.is_used
    finally:
        number = len(count) if passed and all(count) else 0
        text = f"{number} {' '.join(problem.split())}".encode(errors="replace")
        write(VERDICT, b"\n" + signature(text, job["nonce"]) + b" " + text + b"\n")
        _exit(0)


def main() -> None:
    """Serve; in the process of a program, execute it."""
    sys.path += [path for path in sys.argv[1:] if path.endswith("-packages")]
    sys.set_int_max_str_digits(0)
    unittest.main = dict  # the tests are executed without it
    libc.prctl(PR_SET_DUMPABLE, 0)
    stars = [f"from {name} import *" for name in USUAL_IMPORTS.split(", ")]
    names: dict[str, Any] = {}
    exec("\n".join([*stars, f"import {USUAL_IMPORTS}, sys, os, json, time"]), names)
    usual = {name: value for name, value in names.items() if name not in __builtins__}
    gc.freeze()  # what is shared with a fork is not written to
    server = socket.socket(fileno=0)
    server.send(b"ready")
    job = supervise(serve(server))
    if job["tests"] is None:
        run_program(job, ModuleType("__main__"), "program.py")
        return
    start_new_thread(test, (job, usual))  # where no signal handler, which gets frames, can be set
    pause()


if __name__ == "__main__":
    main()
