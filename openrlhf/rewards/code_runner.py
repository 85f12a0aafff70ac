"""Runs and tests programs that a model wrote, in processes with limits.

NOT A SECURITY BOUNDARY: what the processes cannot do stands in SECURITY.md, and depends on the
kernel. Programs of models you do not trust belong into a container or a virtual machine.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from openrlhf.rewards.program_process import PASSED
from openrlhf.utils.processes import kill_tree

MIB = 1024**2
MAX_FILE_BYTES = 16 * MIB  # of any file, output included
MAX_SHOWN = 10_000  # characters of output that are kept
PROGRAM_PROCESS = Path(__file__).with_name("program_process.py")


@dataclass(frozen=True)
class CodeResult:
    """Result of a finished program."""

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
    return _run("run", program, stdin, timeout_s, memory_mib)


def passes_tests(
    program: str, tests: str, *, timeout_s: float = 5.0, memory_mib: int = 512
) -> bool:
    """Return True if tests (assert statements) run to their end against a program.

    The tests run in another process than the program, which never learns what they expect, and
    whose exit code, output and memory decide nothing. They get copies of plain data that the
    program returns; an object of its own equals none of their values.
    """
    return _run("test", program, tests, timeout_s, memory_mib).exit_code == PASSED


def _run(mode: str, program: str, stdin: str, timeout_s: float, memory_mib: int) -> CodeResult:
    numbers = (int(timeout_s + 1), memory_mib * MIB, MAX_FILE_BYTES, os.getpid())
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        # A lone surrogate cannot be written as UTF-8: the program then fails on what stands there.
        Path(folder, "program.py").write_text(program, "utf-8", errors="replace")
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", str(PROGRAM_PROCESS), mode, *map(str, numbers)],
            stdin=given,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_tree(process.pid)
            process.wait()
        return CodeResult(code, _start_of(output), _start_of(errors))


def _start_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_SHOWN).decode(errors="replace")
