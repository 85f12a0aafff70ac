"""The processes in which a program that a model wrote runs and is tested.

A script of its own that code_runner.py starts: it imports nothing of this package. `run` executes
program.py. `test` reads tests from its standard input, starts a second process (`serve`) that
executes program.py, and executes the tests itself: names of the program are asked for over a
socket, plain data comes as copies, anything else as a Handle whose operations run over there.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import operator
import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

PASSED = 17  # exit code of `test` when the last line of the tests has run
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock's system calls
READABLE = (
    *("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system/cpu"),
    *("/dev/urandom", "/dev/random", "/dev/zero"),
)
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1, 2, 4, 8, 1 << 14
# Values that cross as the arguments of their constructor; the constructor cannot be chosen freely.
RECIPES: dict[tuple[str, str], Callable[[Any], list[Any]]] = {
    ("builtins", "tuple"): lambda value: [list(value)],
    ("builtins", "set"): lambda value: [list(value)],
    ("builtins", "frozenset"): lambda value: [list(value)],
    ("builtins", "bytes"): lambda value: [list(value)],
    ("builtins", "bytearray"): lambda value: [list(value)],
    ("builtins", "complex"): lambda value: [value.real, value.imag],
    ("builtins", "slice"): lambda value: [value.start, value.stop, value.step],
    ("builtins", "range"): lambda value: [value.start, value.stop, value.step],
    ("collections", "deque"): lambda value: [list(value)],
    ("datetime", "date"): lambda value: [value.year, value.month, value.day],
    ("datetime", "datetime"): lambda value: [*value.timetuple()[:6], value.microsecond],
    ("datetime", "timedelta"): lambda value: [value.days, value.seconds, value.microseconds],
    ("decimal", "Decimal"): lambda value: [str(value)],
    ("fractions", "Fraction"): lambda value: [value.numerator, value.denominator],
    ("numpy", "array"): lambda value: [value.tolist()],
}
PLAIN_TYPES = (int, float, str, bool, complex, bytes, list, tuple, dict, set, frozenset)
# Of two handles, never of a handle and a value of the tests: an object that says that it equals
# whatever it is compared with has not given the right answer.
BETWEEN_HANDLES = "eq ne lt le gt ge add sub mul truediv floordiv mod pow and_ or_ xor matmul"
ON_A_HANDLE = "call getitem setitem delitem contains len iter next bool str repr hash"


def limit(numbers: list[str]) -> None:
    """Set limits on CPU seconds, memory, file sizes and processes; end with the parent."""
    *sizes, parent = map(int, numbers)
    kinds = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC)
    for kind, most in (*zip(kinds, sizes, strict=True), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)
        if os.getppid() != parent:
            sys.exit(1)


def confine() -> None:
    """Give up root's powers for good and, where the kernel has Landlock, all files but Python's own
    and the working folder, TCP, and signals to other processes.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = libc.syscall(CREATE_RULESET, struct.pack("QQQ", files, 3, 3), size, 0)
    folders = {sys.prefix, sys.base_prefix, __file__, *READABLE, *_folders_of_libraries()}
    read = EXECUTE | READ_FILE | READ_DIR
    for path, rights in (
        (os.getcwd(), files),
        ("/dev/null", read | WRITE_FILE),
        *((f, read) for f in folders),
    ):
        if os.path.exists(path):
            allowed = rights if os.path.isdir(path) else rights & (EXECUTE | READ_FILE | WRITE_FILE)
            place = os.open(path, os.O_PATH)
            libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", allowed, place), 0)
            os.close(place)
    libc.syscall(RESTRICT_SELF, rules, 0)
    os.close(rules)


def _folders_of_libraries() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {os.path.dirname(line[line.index("/") :]) for line in lines if "/" in line}


def run_program() -> dict[str, Any]:
    """Execute program.py as the main module and return its names."""
    module = ModuleType("__main__")
    module.__file__ = "program.py"
    sys.modules["__main__"], sys.argv = module, ["program.py"]
    text = Path("program.py").read_text("utf-8")
    exec(compile(text, "program.py", "exec"), module.__dict__)
    return module.__dict__


class Peer:
    """One end of the line between the tests and the program: asks, and answers while it waits."""

    def __init__(self, line: socket.socket, perform: Callable[..., Any], stand_in: Any) -> None:
        self.file = line.makefile("rwb")
        self.perform = perform  # what the other end may have done here
        self.stand_in = stand_in  # what an object of the other end is here
        self.objects: dict[int, Any] = {}  # that the other end knows
        self.theirs: dict[int, Any] = {}  # what stands in for objects of the other end
        self.numbers: dict[int, int] = {}  # of those, by id

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Have the other end do something, and return or raise what came of it."""
        self._send("ask", operation, [self.encode(a) for a in arguments], self.encode(named))
        while (message := self._receive())[0] == "ask":
            self.answer(*message[1:])
        kind, value, rest = message
        if kind == "raise":
            raise self.decode(value)(*self.decode(rest))
        for position, changed in rest:
            _refresh(arguments[position], self.decode(changed))
        return self.decode(value)

    def answer(self, operation: str, arguments: list[Any], named: Any) -> None:
        """Do what the other end asks for and send what came of it: the value, and the arguments
        that were changed in place.
        """
        with sending_errors(self):
            given = [self.decode(a) for a in arguments]
            value = self.perform(operation, *given, **self.decode(named))
            after = [
                (i, self.encode(a)) for i, a in enumerate(given) if isinstance(a, (list, dict, set))
            ]
            self._send("return", self.encode(value), [p for p in after if p[1] != arguments[p[0]]])

    def serve(self) -> None:
        """Answer until the other end is gone."""
        while True:
            self.answer(*self._receive()[1:])

    def send_error(self, error: Exception) -> None:
        """Send what is raised at the other end."""
        self._send("raise", self.encode(type(error)), self.encode(list(error.args)))

    def encode(self, value: Any) -> Any:
        """Return a value as JSON: a copy, or the number under which this end keeps it."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        if isinstance(value, dict):
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        if isinstance(value, type) and (value in PLAIN_TYPES or issubclass(value, Exception)):
            return self._encode_type(value)
        for kind in type(value).__mro__:
            if (kind.__module__, name := kind.__name__.replace("ndarray", "array")) in RECIPES:
                parts = RECIPES[kind.__module__, name](value)
                return {"made": [kind.__module__, name, self.encode(parts)]}
        if isinstance(value, ModuleType):
            return {"module": value.__name__}
        if type(value).__module__ == "numpy" and hasattr(value, "item"):
            return self.encode(value.item())
        if id(value) in self.numbers:
            return {"yours": self.numbers[id(value)]}
        self.objects[id(value)] = value
        return {"mine": id(value)}

    def decode(self, coded: Any) -> Any:
        """Return the value of `encode` at the other end; runs nothing that the other end wrote."""
        if isinstance(coded, list):
            return [self.decode(item) for item in coded]
        if not isinstance(coded, dict):
            return coded
        [(kind, content)] = coded.items()
        if kind == "dict":
            return {self.decode(k): self.decode(v) for k, v in content}
        if kind == "made":
            module, name, parts = content
            assert (module, name) in RECIPES
            return getattr(importlib.import_module(module), name)(*self.decode(parts))
        if kind == "module":  # the tests import it themselves
            return importlib.import_module(content)
        if kind == "type":
            found = getattr(builtins, content)
            assert found in PLAIN_TYPES or issubclass(found, Exception)
            return found
        if kind == "yours":
            return self.objects[content]
        if kind == "error":
            number, name, base = content
            return self.theirs.setdefault(number, type(name, (self.decode(base),), {}))
        if content not in self.theirs:
            self.theirs[content] = self.stand_in(self, content)
            self.numbers[id(self.theirs[content])] = content
        return self.theirs[content]

    def _encode_type(self, kind: type) -> Any:
        base = next(k for k in kind.__mro__ if getattr(builtins, k.__name__, None) is k)
        if base is kind:
            return {"type": kind.__name__}
        self.objects[id(kind)] = kind
        return {"error": [id(kind), kind.__name__, {"type": base.__name__}]}

    def _send(self, *message: Any) -> None:
        self.file.write(json.dumps(message).encode() + b"\n")
        self.file.flush()

    def _receive(self) -> Any:
        if not (line := self.file.readline()):
            os._exit(1)  # the other end is gone
        return json.loads(line)


class sending_errors:
    """A block whose errors are raised at the other end of the line."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            self.peer.send_error(error)
        return isinstance(error, Exception)


def _refresh(value: Any, changed: Any) -> None:
    """Do to an argument what the other end did to its copy."""
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(changed)


class Handle:
    """An object of the program, in the process of the tests."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_ask", peer.ask)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("setattr", self, name, value)

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is Handle and self._ask("isinstance", value, self) is True

    def __enter__(self) -> Any:
        return self._ask("getattr", self, "__enter__")()

    def __exit__(self, *error: object) -> Any:
        return self._ask("getattr", self, "__exit__")(None, None, None)


def _define_operations() -> None:
    def between(name: str) -> Callable[[Any, Any], Any]:
        def operation(self: Handle, other: object) -> Any:
            return self._ask(name, self, other) if type(other) is Handle else NotImplemented

        return operation

    def of_one(name: str) -> Callable[..., Any]:
        def operation(self: Handle, *arguments: object, **named: object) -> Any:
            return self._ask(name, self, *arguments, **named)

        return operation

    for name in BETWEEN_HANDLES.split():
        setattr(Handle, f"__{name.strip('_')}__", between(name))
    for name in ON_A_HANDLE.split():
        setattr(Handle, f"__{name}__", of_one(name))


class Names(dict[str, Any]):
    """The global names of the tests: their own, Python's, then the program's."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(__name__="__main__")
        self._peer = peer

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):  # a program cannot put its own in the place of `abs`
            raise KeyError(name)
        return self._peer.ask("variable", name)


def test(numbers: list[str]) -> None:
    """Execute the tests on standard input against program.py in a process of its own."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # the program is not to read this memory
    tests = sys.stdin.buffer.read().decode()
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        words = [
            sys.executable,
            "-I",
            __file__,
            "serve",
            *numbers[:-1],
            str(os.getpid()),
            str(number),
        ]
        nothing = subprocess.DEVNULL
        subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing, pass_fds=[number])

    def call(operation: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        assert operation == "call"
        return function(*arguments, **named)

    confine()
    _define_operations()
    peer = Peer(ours, call, Handle)
    peer.ask("variable", "__name__")  # once the program has run to its end
    exec(compile(tests, "tests", "exec"), Names(peer))
    os._exit(PASSED)


def serve(number: str) -> None:
    """Execute program.py and do what the tests ask for."""
    line = socket.socket(fileno=int(number))
    confine()
    names = run_program()

    def perform(operation: str, *arguments: Any, **named: Any) -> Any:
        if operation == "variable":
            return names[arguments[0]]
        return getattr(operator, operation, getattr(builtins, operation, None))(*arguments, **named)

    def function_of_the_tests(peer: Peer, number: int) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            return peer.ask("call", call, *arguments, **named)

        return call

    Peer(line, perform, function_of_the_tests).serve()


def main(mode: str, *words: str) -> None:
    """Run one of the three processes."""
    numbers = list(words[:5])
    sys.set_int_max_str_digits(0)
    limit(numbers)
    if mode == "run":
        confine()
        run_program()
    elif mode == "test":
        test(numbers)
    else:
        serve(words[5])


if __name__ == "__main__":
    main(*sys.argv[1:])
