"""Runs and tests programs that a model wrote, in processes with limits.

NOT A SECURITY BOUNDARY: what the processes cannot do stands in SECURITY.md, and depends on the
kernel. Programs of models you do not trust belong into a container or a virtual machine.
"""

import ctypes
import functools
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAM_PROCESS = Path(__file__).with_name("program_process.py")
PR_SET_DUMPABLE = 4
GRACE_S = 30.0  # for the supervisor to end a program


@dataclass(frozen=True)
class CodeResult:
    """Result of a finished program.

    Example: `CodeResult(1, "", "ZeroDivisionError: division by zero")`
    """

    exit_code: int | None  # None: it was stopped at the time limit; below 0: the signal
    stdout: str
    stderr: str


def run_python(
    program: str, stdin: str = "", *, timeout_s: float = 5.0, memory_mib: int = 512
) -> CodeResult:
    """Run a Python program in an empty folder with an empty environment; never raises for what the
    program does.

    `timeout_s` limits the clock and, in whole seconds, CPU time.
    """
    return CodeResult(*_run(program, stdin, None, timeout_s, memory_mib)[:3])


def passes_tests(
    program: str,
    tests: str | Sequence[str] | None,
    *,
    timeout_s: float = 5.0,
    memory_mib: int = 512,
) -> bool:
    """Return True if all tests pass, at least one check was executed, and they have used a name
    that the program binds.

    Tests are assert statements, `test_…` functions as pytest runs them, and unittest classes, in
    one text or a list of them. They see the names of the program, which they can also import from
    `solution`. Raise ValueError if they check nothing, whatever the program is, or cannot be
    executed.
    """
    if not isinstance(tests, str):
        tests = "" if tests is None else "\n".join(tests)
    number, _, problem = _run(program, "", tests, timeout_s, memory_mib)[3].partition(" ")
    if problem:
        raise ValueError(f"the tests {tests[:60]!r} cannot be used: {problem}")
    return number not in ("", "0")


def _run(
    program: str, stdin: str, tests: str | None, timeout_s: float, memory_mib: int
) -> tuple[int | None, str, str, str]:
    """Return exit code, output, errors and the verdict of tests, which is empty without one."""
    if _server()[1].poll() is not None:  # a program has ended it
        _server.cache_clear()
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job = {"program": program, "stdin": stdin, "tests": tests, "folder": folder}
        job |= {"timeout_s": timeout_s, "memory_mib": memory_mib}
        ours.settimeout(timeout_s + GRACE_S)
        with suppress(OSError), ours.makefile("rb") as reply:  # a program has ended its supervisor
            with theirs:
                socket.send_fds(_server()[0], [b"."], [theirs.fileno()])
            ours.sendall(json.dumps(job).encode())
            ours.shutdown(socket.SHUT_WR)
            return tuple(json.loads(reply.read() or b'[null, "", "", ""]'))
    return None, "", "", ""


@functools.cache
def _server() -> tuple[socket.socket, subprocess.Popen]:
    """Start the process that forks a supervisor for each program; it ends when the connection is
    closed. From then on no program may read this process, nor is a core dumped.
    """
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    readable = [sys.prefix, *(path for path in sys.path if path.endswith("-packages"))]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM_PROCESS), *readable],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    if not ours.recv(8):
        raise RuntimeError(f"{PROGRAM_PROCESS} did not start: exit code {process.wait()}")
    return ours, process
