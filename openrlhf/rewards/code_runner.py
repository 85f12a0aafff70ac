"""Runs and tests programs that a model wrote, in processes with limits.

NOT A SECURITY BOUNDARY: what the processes cannot do stands in SECURITY.md, and depends on the
kernel. Programs of models you do not trust belong into a container or a virtual machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from openrlhf.rewards.program_process import PASSED
from openrlhf.utils.processes import kill_tree

MIB = 1024**2
MAX_SHOWN = 10_000  # characters of output that are kept
PROGRAM_PROCESS = Path(__file__).with_name("program_process.py")


@dataclass(frozen=True)
class CodeLimits:
    """What a program may take."""

    timeout_s: float = 5.0  # wall clock; the same in whole seconds of CPU time
    memory_mib: int = 512
    file_mib: int = 16  # largest file, output included


@dataclass(frozen=True)
class CodeResult:
    """How a program ended."""

    exit_code: int | None  # None: it was stopped at the time limit; below 0: the signal
    stdout: str
    stderr: str

    @property
    def is_ok(self) -> bool:
        """Return True if it ended by itself without an error."""
        return self.exit_code == 0


def run_python(program: str, stdin: str = "", limits: CodeLimits | None = None) -> CodeResult:
    """Run a Python program in an empty folder with an empty environment; never raises for what the
    program does.
    """
    return _run("run", program, stdin, limits or CodeLimits())


def passes_tests(program: str, tests: str, limits: CodeLimits | None = None) -> bool:
    """Return True if tests (assert statements) run to their end against a program.

    The tests run in another process than the program, which never learns what they expect, and
    whose exit code, output and memory decide nothing. They get copies of plain data that the
    program returns; an object of its own equals none of their values.
    """
    return _run("test", program, tests, limits or CodeLimits()).exit_code == PASSED


def _run(mode: str, program: str, stdin: str, limits: CodeLimits) -> CodeResult:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        # A lone surrogate cannot be written as UTF-8: the program then fails on what stands there.
        Path(folder, "program.py").write_text(program, "utf-8", errors="replace")
        files[0].write(stdin.encode(errors="replace"))
        files[0].seek(0)
        code = _exit_code(mode, folder, files, limits)
        return CodeResult(code, _start_of(files[1]), _start_of(files[2]))


def _exit_code(mode: str, folder: str, files: list[IO[bytes]], limits: CodeLimits) -> int | None:
    cpu_s = max(int(limits.timeout_s + 1), 1)
    numbers = (cpu_s, limits.memory_mib * MIB, limits.file_mib * MIB, os.getpid())
    process = subprocess.Popen(
        [sys.executable, "-I", str(PROGRAM_PROCESS), mode, *map(str, numbers)],
        stdin=files[0],
        stdout=files[1],
        stderr=files[2],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    try:
        return process.wait(limits.timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_tree(process.pid)
        process.wait()


def _start_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_SHOWN).decode(errors="replace")
