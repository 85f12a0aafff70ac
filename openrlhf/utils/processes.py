"""Finds, counts and ends what other people's code started, wherever it went: processes know each
other by a word in the environment that they were given.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "OPENRLHF_STARTED_BY"
MAX_END_S = 5.0  # of killing: what is killed may just have started others
ROUND_S = 0.01  # between two rounds of it
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
GIB = 1024.0**3


def new_mark() -> str:
    """A word for the environment of a process that nobody else has."""
    return secrets.token_hex(16)


def end_marked(mark: str, *, but: int) -> None:
    """End every process with a word in its environment, but one; Linux only.

    What was started in a session of its own, or has lost its parent, is found by it as well.
    """
    deadline = time.monotonic() + MAX_END_S
    while found := [pid for pid in marked(mark) if pid != but]:
        end_all(found)
        if time.monotonic() > deadline:
            return
        time.sleep(ROUND_S)


def end_all(pids: Iterable[int]) -> None:
    """End processes that may have ended already."""
    for pid in pids:
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


def resident_gib(pid: int) -> float:
    """Memory a process holds, shared or not; 0 where /proc does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * PAGE_BYTES / GIB


def process_limit(more: int) -> int:
    """The RLIMIT_NPROC that lets this user have so many more processes, at most the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = num_tasks() + more
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def num_tasks() -> int:
    """Processes and threads of this user now: the kernel's limit counts them all."""
    own, count = os.getuid(), 0
    for status in Path("/proc").glob("[0-9]*/task"):
        with suppress(OSError):
            if status.stat().st_uid == own:
                count += len(os.listdir(status))
    return count
