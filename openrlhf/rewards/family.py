"""What a reward worker and all that it started take together: processes and memory.

That takes a look at every process of the machine: one for all workers, and seldom where there are
many. What left both its session and its parent is not seen; it ends with the worker all the same.
"""

from __future__ import annotations

import resource
import threading
import time
from dataclasses import dataclass, field

from openrlhf.utils.processes import ProcessTable, joint_gib, process_limit, resident_gib

FIRST_LOOK_S = 0.2  # after the start of a call: most are over by then
LOOK_S = 0.25  # between two looks
LOOK_COST = 20.0  # times as long as a look took must pass before the next
MORE_TASKS = 16_384  # beside those that the user has: far more than a worker may have
RENEW_S = 10.0  # between two renewals of that limit


class Census:
    """The processes of the machine as of a moment ago; asked from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table: ProcessTable | None = None
        self._next_look_s = 0.0

    def family(self, pid: int) -> list[int]:
        """See ProcessTable."""
        with self._lock:
            if self._table is None or time.monotonic() >= self._next_look_s:
                start_s = time.thread_time()
                self._table = ProcessTable()
                self._next_look_s = _next_look_s(start_s)
            return self._table.family(pid)


CENSUS = Census()


@dataclass
class FamilyWatch:
    """Looks at a worker's family during one call."""

    pid: int
    max_processes: int
    max_gib: float
    next_look_s: float = field(default_factory=lambda: time.monotonic() + FIRST_LOOK_S)

    def excess(self) -> str | None:
        """What the family has too much of; None when it is fine or it is no time to look."""
        if time.monotonic() < self.next_look_s:
            return None
        start_s = time.thread_time()
        excess = self._look()
        self.next_look_s = _next_look_s(start_s)
        return excess

    def _look(self) -> str | None:
        pids = CENSUS.family(self.pid)
        if len(pids) > self.max_processes:
            return (
                f"ran more than {self.max_processes} processes at once; serve what needs as many "
                "with --remote_rm_url http://..."
            )
        # What forked processes share is in the memory of each, so a second look decides.
        if sum(map(resident_gib, pids)) > self.max_gib and joint_gib(pids) > self.max_gib:
            return (
                f"took more than {self.max_gib:g} GiB with the {len(pids) - 1} processes that it "
                "started (--reward_memory_gib)"
            )
        return None


def _next_look_s(start_s: float) -> float:
    """When to look again after a look that began at that much of this thread's computing time."""
    cost_s = time.thread_time() - start_s  # the clock on the wall runs on where others compute
    return time.monotonic() + max(LOOK_S, LOOK_COST * cost_s)


class TaskLimit:
    """The kernel's limit on new processes during a call: it holds between two looks of the parent.

    It counts all processes and threads of the user, which come and go, so it is counted anew now
    and then. What a file starts when it is imported is not held by it, nor is root.
    """

    def __init__(self) -> None:
        self._soft, self._hard = resource.getrlimit(resource.RLIMIT_NPROC)
        self._limit = 0
        self._counted_at_s = -RENEW_S

    def __enter__(self) -> None:
        """Set it to what the user runs now and some; where that is too little, as it was."""
        if time.monotonic() >= self._counted_at_s + RENEW_S:
            self._counted_at_s = time.monotonic()
            self._limit = process_limit(MORE_TASKS)
        if self._soft != resource.RLIM_INFINITY and self._limit >= self._soft:
            return
        self._set(self._limit)
        # The kernel also counts what /proc does not show: the user's processes in other containers.
        if not _can_start():
            self._set(self._soft)

    def __exit__(self, *error: object) -> None:
        """Put back what was."""
        self._set(self._soft)

    def _set(self, soft: int) -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, self._hard))


def _can_start() -> bool:
    thread = threading.Thread(target=int)
    try:
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    return True
