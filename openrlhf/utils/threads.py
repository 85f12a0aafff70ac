"""Threads whose errors go to a function, and one that runs an event loop.

They are daemons: a program that ends in an error does not wait for them.
"""

import asyncio
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

OMP_PAUSE_SOFT = 1  # omp_pause_resource_t of OpenMP 5.0
# Idle threads must sleep soon, for others want their cores, but not between two kernels. Read by
# OpenMP when torch is imported.
IDLE_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}
CLOSE_S = 10.0  # until a call that does not end is left behind
NUM_CALLS = 6  # of a stack that are named
IN_CALLS = ", stuck in "  # before them, in a message
NICE = 10  # a tenth of a core that others want

Call = Callable[[], None]
OnError = Callable[[BaseException], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class errors_to:
    """Pass an error of the block to `on_error`, and go on behind the block."""

    on_error: OnError

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.on_error(error)
        return True


def start_thread(name: str, run: Call, on_error: OnError) -> threading.Thread:
    """Call `run` in a new thread, which passes an error to `on_error`."""

    def target() -> None:
        with errors_to(on_error):
            run()

    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def on_loop(method: Callable[..., Coroutine[Any, Any, Result]]) -> Callable[..., Result]:
    """Make a coroutine of an object with a `loop: LoopThread` a method for other threads, which
    wait until it has run on that loop.
    """

    @wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Result:
        result: Result = self.loop.run(method(self, *arguments, **named))
        return result

    return call


def where_is(thread_id: int) -> str:
    """Return the calls that a thread is in, the innermost first, as words; empty if it has ended.

    Example: `"wait (threading.py:355) < all_reduce (distributed_c10d.py:2810) < run (run.py:9)"`
    """
    frame = sys._current_frames().get(thread_id)
    calls = traceback.extract_stack(frame)[: -NUM_CALLS - 1 : -1] if frame else []
    return " < ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in calls)


_busy: set[threading.Thread] = set()  # that are held by a call


def is_any_busy() -> bool:
    """Return True while a thread is held by a call: Python's own end would crash under it."""
    return bool(_busy)


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.is_running = True
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of work on the loop, for another thread that waits; where that thread
        is interrupted, the work is cancelled, and does no more when this raises.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        finally:
            if future.cancel() and self.is_running:
                seen = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop)
                with suppress(TimeoutError):
                    seen.result(CLOSE_S)

    async def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return the result of a function that holds this thread meanwhile; for any other loop."""

        async def work() -> Result:
            _busy.add(self._thread)
            try:
                return function(*arguments)
            finally:
                _busy.discard(self._thread)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self.loop))

    def close(self) -> None:
        """End the loop and its thread."""
        self.is_running = False
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_S)


def yield_cores() -> None:
    """Have the calling thread, and those that it starts, leave busy cores to others."""
    if sys.platform == "linux":  # elsewhere this would be the whole process
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, max(NICE, os.getpriority(os.PRIO_PROCESS, own)))


def waiting_of_threads() -> dict[str, str]:
    """Return the settings of idle threads: those of the user, or else that they sleep early."""
    own = {name: os.environ[name] for name in IDLE_THREADS if name in os.environ}
    return own or IDLE_THREADS


def load_per_core() -> float:
    """Return the threads of all programs by the cores, of the last minute; 0: not known."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def release_cores() -> None:
    """End the OpenMP threads of the calling thread, which are made anew when it computes next.

    Each thread that has computed keeps as many as there are cores. If there are more than cores,
    libgomp lets all of them sleep at every barrier: a model in another thread takes a fifth longer.
    """
    for library in _openmp():
        library.omp_pause_resource_all(OMP_PAUSE_SOFT)


@cache
def _openmp() -> list[ctypes.CDLL]:
    """Return the OpenMP libraries of this process, of which torch brings one; none but on Linux."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}
    found = [ctypes.CDLL(path) for path in sorted(paths)]
    return [library for library in found if hasattr(library, "omp_pause_resource_all")]
