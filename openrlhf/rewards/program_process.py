"""The processes in which a program that a model wrote runs and is tested.

A script of its own that code_runner.py starts: it imports nothing of this package. `run` executes
program.py. `test` reads tests from its standard input, starts a second process (`serve`) that
executes program.py, and executes the tests itself: names of the program are asked for over a
socket, plain data comes as copies, anything else as a Handle whose operations run over there.
"""

import builtins
import ctypes
import json
import operator
import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from types import ModuleType
from typing import IO, Any

PASSED = 17  # exit code of `test` when the last line of the tests has run
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
KINDS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, bytes, dict)}
# Of two handles, never of a handle and a value of the tests: an object that says that it equals
# whatever it is compared with has not given the right answer.
BETWEEN_HANDLES = "eq ne lt le gt ge add sub mul truediv floordiv mod pow and_ or_ xor matmul"
ON_A_HANDLE = "call getitem setitem delitem contains len iter next bool str repr hash"


def limit(numbers: list[str]) -> None:
    """Set limits on CPU seconds, memory and file sizes; end with the parent."""
    *sizes, parent = map(int, numbers)
    kinds = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
    for kind, most in (*zip(kinds, sizes, strict=True), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)
        if os.getppid() != parent:
            sys.exit(1)


def confine() -> None:
    """Give up root's powers for good, with which a program could read the memory of the tests."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))


def run_program() -> dict[str, Any]:
    """Execute program.py as the main module and return its names."""
    module = ModuleType("__main__")
    module.__file__ = "program.py"
    sys.modules["__main__"], sys.argv = module, ["program.py"]
    text = Path("program.py").read_text("utf-8")
    exec(compile(text, "program.py", "exec"), module.__dict__)
    return module.__dict__


def send(line: IO[bytes], *message: Any) -> None:
    """Send a message to the other process: JSON, plain data by value."""
    line.write(json.dumps(message).encode() + b"\n")
    line.flush()


def receive(line: IO[bytes]) -> Any:
    """Return the next message; end the process when the other end is gone."""
    if not (message := line.readline()):
        os._exit(1)
    return json.loads(message)


def encode(value: Any, number_of: Callable[[Any], int]) -> Any:
    """Return a value as JSON: a copy, or the number of an object of the program."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(type(value), "tolist"):  # an array of NumPy, or one number of it
        return encode(value.tolist(), number_of)
    for name, kind in KINDS.items():
        if isinstance(value, kind):
            items = value.items() if kind is dict else value
            return {name: [encode(item, number_of) for item in items]}
    return {"object": number_of(value)}


def decode(coded: Any, object_of: Callable[[int], Any]) -> Any:
    """Return the value of `encode` at the other end; runs nothing that the other end wrote."""
    if not isinstance(coded, dict):
        return coded
    [(name, content)] = coded.items()
    if name == "object":
        return object_of(content)
    return KINDS[name](decode(item, object_of) for item in content)


class Handle:
    """An object of the program, in the process of the tests."""

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("setattr", self, name, value)

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is Handle and self._ask("isinstance", value, self) is True

    def _between(self, operation: str, other: object) -> Any:
        return self._ask(operation, self, other) if type(other) is Handle else NotImplemented

    def _of_one(self, operation: str, *arguments: object, **named: object) -> Any:
        return self._ask(operation, self, *arguments, **named)


for _name in BETWEEN_HANDLES.split():
    setattr(Handle, f"__{_name.strip('_')}__", partialmethod(Handle._between, _name))
for _name in ON_A_HANDLE.split():
    setattr(Handle, f"__{_name}__", partialmethod(Handle._of_one, _name))


class Names(dict[str, Any]):
    """The global names of the tests: their own, Python's, then those that the program is asked
    for.
    """

    def __init__(self, line: IO[bytes]) -> None:
        super().__init__(__name__="__main__")
        self._line = line
        self._handles: dict[int, Handle] = {}

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):  # a program cannot put its own in the place of `abs`
            raise KeyError(name)
        return self.ask("variable", name)

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Have the program do something, and return or raise what came of it."""
        send(self._line, operation, *(encode(part, _number_of) for part in (arguments, named)))
        error, *parts = receive(self._line)
        if error is not None:
            kind = getattr(builtins, error, None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if is_error else Exception)(*parts)
        value, after = (decode(part, self._handle) for part in parts)
        for argument, changed in zip(arguments, after):  # noqa: B905 - the program may lie
            if isinstance(argument, (list, dict, set)) and argument != changed:
                argument.clear()
                (argument.extend if isinstance(argument, list) else argument.update)(changed)
        return value

    def _handle(self, number: int) -> Handle:
        return self._handles.setdefault(number, Handle(self.ask, number))


def _number_of(value: Any) -> int:
    if type(value) is not Handle:
        raise TypeError(f"tests cannot hand over a {type(value).__name__}")
    number: int = value._number
    return number


def test(numbers: list[str]) -> None:
    """Execute the tests on standard input against program.py in a process of its own."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # the program is not to read this memory
    tests = sys.stdin.buffer.read().decode()
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        numbers = [*numbers[:-1], str(os.getpid())]
        words = [sys.executable, "-I", __file__, "serve", *numbers, str(number)]
        nothing = subprocess.DEVNULL
        subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing, pass_fds=[number])
    confine()
    names = Names(ours.makefile("rwb"))
    names.ask("variable", "__name__")  # once the program has run to its end
    exec(compile(tests, "tests", "exec"), names)
    os._exit(PASSED)


def serve(number: str) -> None:
    """Execute program.py and do what the tests ask for."""
    line, objects = socket.socket(fileno=int(number)).makefile("rwb"), {}
    confine()
    names = run_program()

    def number_of(value: Any) -> int:
        objects[id(value)] = value
        return id(value)

    while True:
        operation, *parts = receive(line)
        arguments, named = (decode(part, objects.__getitem__) for part in parts)
        try:
            if operation == "variable":
                value = names[arguments[0]]
            else:
                perform = getattr(operator, operation, getattr(builtins, operation, None))
                value = perform(*arguments, **named)
            reply = [None, encode(value, number_of), encode(arguments, number_of)]
        except Exception as error:  # noqa: BLE001 - it is raised at the other end of the line
            kinds = (kind.__name__ for kind in type(error).__mro__)
            reply = [next(name for name in kinds if hasattr(builtins, name)), str(error)]
        send(line, *reply)


def main(mode: str, *words: str) -> None:
    """Run one of the three processes."""
    numbers = list(words[:4])
    sys.set_int_max_str_digits(0)
    limit(numbers)
    if mode == "run":
        confine()
        run_program()
    elif mode == "test":
        test(numbers)
    else:
        serve(words[4])


if __name__ == "__main__":
    main(*sys.argv[1:])
