"""The memory of a process whose steps are alike: what to look through, and what to keep."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of mallopt(3)


@contextmanager
def collecting_only_new_objects() -> Iterator[None]:
    """Keep Python's collector off what there is before: the libraries alone are half a million
    objects, and looking through them takes 0.2 s several times a step.
    """
    pass_over_old_objects()
    try:
        yield
    finally:
        gc.unfreeze()


def pass_over_old_objects() -> None:
    """Keep Python's collector off all objects that there are now, until `gc.unfreeze`. DeepSpeed
    collects each time training states leave the device, and would look through them all.
    """
    gc.collect()
    gc.freeze()


def keep_freed_memory() -> None:
    """Give what is free now back to the system, and keep what is freed from now on: the next step
    takes as much. Without it each large tensor gets new pages, which takes up to a sixth of an
    update on a CPU.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.malloc_trim(0)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def human_size(num_bytes: float) -> str:
    """Return a size as people read it: 3.4 MB, 0.27 GB, 14.2 GB."""
    if num_bytes < 1e8:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes / 1e9:.{1 if num_bytes >= 1e10 else 2}f} GB"
