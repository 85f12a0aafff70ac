"""Ends a process with all that it started, and sees that a process ends with its parent."""

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress

import psutil

PR_SET_PDEATHSIG = 1


def kill_tree(pid: int) -> None:
    """Kill a process that leads a session, its session, and its children wherever they went."""
    children: list[psutil.Process] = []
    with suppress(psutil.Error):
        children = psutil.Process(pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for child in children:
        with suppress(psutil.Error):
            child.kill()


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process with the thread that started it; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            sys.exit("the parent process is gone")


def limit_memory(num_bytes: int) -> None:
    """Limit the private memory of this process; what it starts has the same limit of its own.

    Data is limited instead of the address space, of which CUDA reserves more than a machine has.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
