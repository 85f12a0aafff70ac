"""Ends what other people's code started, wherever it went: processes know each other by a word in
the environment that they were given.
"""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "OPENRLHF_STARTED_BY"
MAX_ROUNDS = 5  # of killing: what is killed may just have started others


def new_mark() -> str:
    """A word for the environment of a process that nobody else has."""
    return secrets.token_hex(16)


def end_marked(mark: str, *, but: int) -> None:
    """End every process with a word in its environment, but one; Linux only.

    What was started in a session of its own, or has lost its parent, is found by it as well.
    """
    for _ in range(MAX_ROUNDS):
        found = [pid for pid in marked(mark) if pid != but]
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Processes of this user that were given a word in their environment and have not ended."""
    word, found = mark.encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if word in path.read_bytes():
                found.append(int(path.parent.name))
    return found
