"""How the C library hands out memory while weights are replaced on a CPU.

Every update frees the packed copy of a layer and takes one of the same size. The GNU C library
gives such large pieces back to the system at once and asks for new ones, which the system has to
clear page by page, which takes longer than packing itself.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

# Parameters of mallopt(3); other C libraries have no such function, and nothing is changed there.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
MMAP_THRESHOLD = 32 << 20  # what the library comes to by itself in a process like ours
MMAP_MAX = 65_536  # the library's own
NEVER = 2**31 - 1


def share_one_heap() -> None:
    """Let all threads started from now on take memory from one heap, which keeps what is freed."""
    _set(M_ARENA_MAX, 1)
    _set(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    _set(M_TRIM_THRESHOLD, NEVER)


def use_heap_for_large_pieces(*, is_on: bool) -> None:
    """Whether pieces above 32 MiB come from the heap too, and so are used again."""
    _set(M_MMAP_MAX, 0 if is_on else MMAP_MAX)


def _set(parameter: int, value: int) -> None:
    library = _c_library()
    if library is not None:
        library.mallopt(parameter, value)


@lru_cache(maxsize=1)
def _c_library() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") else None
