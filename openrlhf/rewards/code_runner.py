"""Runs and tests programs that a model wrote, in processes with limits.

NOT A SECURITY BOUNDARY: what the processes cannot do stands in SECURITY.md, and depends on the
kernel. Programs of models you do not trust belong into a container or a virtual machine.
"""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from openrlhf.utils.processes import hide_memory

PROGRAM_PROCESS = Path(__file__).with_name("program_process.py")
GRACE_S = 30.0  # for the supervisor to end a program
_LOCK = threading.Lock()


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
    job = {"program": program, "name": "program", "stdin": stdin, "tests": None}
    return CodeResult(*_run(job, timeout_s, memory_mib)[:3])


def passes_tests(
    program: str, tests: str, *, timeout_s: float = 5.0, memory_mib: int = 512
) -> bool:
    """Return True if all tests pass and at least one check was executed.

    Tests are assert statements, `test_…` functions as pytest runs them, and unittest classes. They
    see the names of the program, which they can also import from `solution`. Raise ValueError if
    they check nothing, whatever the program is, or cannot be executed.
    """
    job = {"program": program, "name": "solution", "stdin": "", "tests": tests}
    number, _, problem = _run(job, timeout_s, memory_mib)[3].partition(" ")
    if problem:
        raise ValueError(f"the tests {tests[:60]!r} cannot be used: {problem}")
    return number not in ("", "0")


def _run(job: dict, timeout_s: float, memory_mib: int) -> tuple[int | None, str, str, str]:
    """Return exit code, output, errors and the verdict of tests, which is empty without one."""
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with theirs:
            _hand_over(theirs)
        job |= {"folder": folder, "timeout_s": timeout_s, "memory_mib": memory_mib}
        ours.settimeout(timeout_s + GRACE_S)
        with suppress(OSError):  # the supervisor is gone: a program may have killed it
            ours.sendall(json.dumps(job).encode())
            ours.shutdown(socket.SHUT_WR)
            with ours.makefile("rb") as reply:
                return tuple(json.loads(reply.read() or b'[null, "", "", ""]'))
        return None, "", "", ""


def _hand_over(connection: socket.socket) -> None:
    """Give the server a connection; start it if it does not run."""
    with _LOCK:
        try:
            socket.send_fds(_server(os.getpid())[0], [b"."], [connection.fileno()])
        except OSError:  # it was killed
            _server.cache_clear()
            socket.send_fds(_server(os.getpid())[0], [b"."], [connection.fileno()])


@functools.cache
def _server(pid: int) -> tuple[socket.socket, subprocess.Popen]:
    """Start the server of this process, which no program may read from then on; it ends when the
    connection is closed.
    """
    hide_memory()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    readable = [sys.prefix, *(path for path in sys.path if path.endswith("-packages"))]
    with theirs:
        number = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM_PROCESS), str(number), *readable],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            pass_fds=[number],
            start_new_session=True,
        )
    if not ours.recv(8):
        raise RuntimeError(f"{PROGRAM_PROCESS} did not start: exit code {process.wait()}")
    return ours, process
