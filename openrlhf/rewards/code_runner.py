"""Runs a program that a model wrote, in a process with limits.

NOT A SECURITY BOUNDARY. The limits stop accidents: endless loops, full memory and disks, processes
left behind. A program that wants to can read what this user can read, and reach the network.
Programs of models you do not trust belong into a container or a virtual machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from openrlhf.utils.processes import MARK_VARIABLE, end_marked, new_mark, process_limit

MIB = 1024**2
MAX_SHOWN = 10_000  # characters of output that are kept
RUNNER = """
import ctypes, os, resource, runpy, sys
seconds, memory, file_size, num_processes, parent = map(int, sys.argv[1:6])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # end with the process that started this one
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # gain no rights
    if os.getppid() != parent:
        sys.exit(1)
for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory),
                    (resource.RLIMIT_FSIZE, file_size), (resource.RLIMIT_CORE, 0),
                    (resource.RLIMIT_NPROC, num_processes), (resource.RLIMIT_NOFILE, 64)):
    resource.setrlimit(kind, (limit, limit))
sys.argv = ["program.py"]
runpy.run_path("program.py", run_name="__main__")
"""


@dataclass(frozen=True)
class CodeLimits:
    """What a program may take."""

    timeout_s: float = 5.0  # wall clock; the same in whole seconds of CPU time
    memory_mib: int = 512
    file_mib: int = 16  # largest file, output included
    num_processes: int = 64  # more than this user has already


@dataclass(frozen=True)
class CodeResult:
    """How a program ended."""

    exit_code: int | None  # None: it was stopped at the time limit; below 0: the signal
    stdout: str
    stderr: str

    @property
    def is_ok(self) -> bool:
        """Whether it ended by itself without an error."""
        return self.exit_code == 0


def run_python(program: str, stdin: str = "", limits: CodeLimits | None = None) -> CodeResult:
    """Run a Python program in an empty folder with an empty environment; never raises for what the
    program does.
    """
    limits = limits or CodeLimits()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        files = {name: Path(folder) / f"{name}.txt" for name in ("stdin", "stdout", "stderr")}
        (Path(folder) / "work").mkdir()
        # A lone surrogate cannot be written as UTF-8: the program then fails on what stands there.
        (Path(folder) / "work" / "program.py").write_text(program, "utf-8", errors="replace")
        files["stdin"].write_text(stdin, "utf-8", errors="replace")
        code = _run(Path(folder), files, limits)
        return CodeResult(code, _start_of(files["stdout"]), _start_of(files["stderr"]))


def passes_tests(program: str, tests: str, limits: CodeLimits | None = None) -> bool:
    """Whether a program runs to its end with tests (assert statements) after it.

    A program cannot pass by leaving early: the last line of the tests must have run.
    """
    marker = f"all tests ran {os.urandom(8).hex()}"
    result = run_python(f"{program}\n\n{tests}\n\nprint({marker!r})\n", limits=limits)
    return result.is_ok and result.stdout.rstrip().endswith(marker)


def _run(folder: Path, files: dict[str, Path], limits: CodeLimits) -> int | None:
    numbers = (
        max(int(limits.timeout_s + 1), 1),
        limits.memory_mib * MIB,
        limits.file_mib * MIB,
        process_limit(limits.num_processes),
        os.getpid(),
    )
    mark = new_mark()
    with (
        files["stdin"].open("rb") as stdin,
        files["stdout"].open("wb") as stdout,
        files["stderr"].open("wb") as stderr,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", RUNNER, *map(str, numbers)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=folder / "work",
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(folder / "work"),
                "LANG": "C.UTF-8",
                # Whoever ends this process by its own mark finds the program by it as well.
                MARK_VARIABLE: f"{os.environ.get(MARK_VARIABLE, '')}{mark}",
            },
            start_new_session=True,
        )
        try:
            return process.wait(limits.timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            end_marked(mark, but=process.pid)
            process.wait()


def _start_of(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_SHOWN).decode(errors="replace")
