"""The memory of a process whose steps are alike: what to look through, and what to keep."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of mallopt(3)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 2**31 - 1  # bytes: mallopt takes an int


@contextmanager
def collecting_only_new_objects() -> Iterator[None]:
    """Keep Python's collector off what there is before: the libraries alone are half a million
    objects, and looking through them takes 0.2 s several times a step.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next step. New pages from the system take longer than
    copying a column into pages that are there. For a process that holds no model: its peak is that
    of a step's columns.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # None beside another C library
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST)
        mallopt(M_TRIM_THRESHOLD, LARGEST)
