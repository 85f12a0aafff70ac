"""A program of the standard library alone: `end_after.py PID OTHERS…` ends the others soon after a
process has ended in any way. Linux only; elsewhere it just fails.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

LEAVE_S = 2.0  # for the others to end by themselves


def ending_after_this_process(others: Iterable[int]) -> subprocess.Popen[bytes]:
    """Start the program for this process; to be killed where the others have ended in order."""
    nothing = subprocess.DEVNULL
    pids = map(str, (os.getpid(), *others))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *pids],
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        start_new_session=True,  # Ctrl-C is not meant for it
    )


def end_after(first: int, *others: int) -> None:
    """Wait for the end of a process, then kill those of the others that are left."""
    process, left = os.pidfd_open(first), []
    for other in others:
        with suppress(ProcessLookupError):
            left.append(os.pidfd_open(other))
    select.select([process], [], [])
    time.sleep(LEAVE_S)
    for handle in left:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


if __name__ == "__main__":
    end_after(*map(int, sys.argv[1:]))
