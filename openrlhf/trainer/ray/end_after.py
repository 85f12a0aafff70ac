"""Sees that processes end with another one.

As a program, `end_after.py PID OTHERS…`, it has the standard library alone: it ends the others soon
after a process has ended in any way. One with a name, `PID=NAME`, is named if it died first and
took the process with it. Linux only; elsewhere it just fails.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

TOLD = signal.SIGUSR1
LEAVE_S = 2.0  # for the others to end by themselves


def ending_after_this_process(
    others: Iterable[int], names: Mapping[int, str]
) -> subprocess.Popen[bytes]:
    """Start the program for this process; to be killed where the others have ended in order."""
    nothing = subprocess.DEVNULL
    pids = [str(os.getpid()), *(f"{pid}={names.get(pid, '')}" for pid in others)]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *pids],
        stdin=nothing,
        stdout=nothing,
        start_new_session=True,  # Ctrl-C is not meant for it
    )


def end_after(first: int, others: Mapping[int, str]) -> None:
    """Wait for the end of a process, then kill those of the others, by name, that are left."""
    is_told: list[bool] = []  # by the process itself, which says so by a signal
    signal.signal(TOLD, lambda *_: is_told.append(True))
    process, left = os.pidfd_open(first), {}
    for other in others:
        with suppress(ProcessLookupError):
            left[os.pidfd_open(other)] = other
    first_dead: list[int] = []
    while process not in (ended := select.select([process, *left.keys() - first_dead], [], [])[0]):
        if _is_ending(first):  # some of Ray's end with it, and sooner
            break
        first_dead += ended
    named = [handle for handle in first_dead if others[left[handle]]]
    if named and not is_told:
        sys.stderr.write(f"error: {others[left[named[0]]]} (pid {left[named[0]]}) died\n")
    os.close(2)  # nobody is to wait for more
    time.sleep(LEAVE_S)
    for handle in left:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


def _is_ending(pid: int) -> bool:
    """Return True for a process whose main thread has ended, or that is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


if __name__ == "__main__":
    words = [word.partition("=") for word in sys.argv[2:]]
    end_after(int(sys.argv[1]), {int(pid): name for pid, _, name in words})
