"""Threads whose errors are told to somebody, and one that runs calls one after the other.

They are daemons: a program that ends in an error does not wait for them.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

CLOSE_S = 10.0  # until a call that does not end is left behind
LOOK_S = 0.1  # between two looks at blocks with a time limit

Call = Callable[[], None]
OnError = Callable[[BaseException], None]


@dataclass(frozen=True)
class _telling:
    """A block whose error, if any, goes to `on_error` and no further."""

    on_error: OnError

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.on_error(error)
        return True


def start_thread(name: str, run: Call, on_error: OnError) -> threading.Thread:
    """Run something in a thread of its own; `on_error` is told there what it raised."""

    def target() -> None:
        with _telling(on_error):
            run()

    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


class OverdueError(BaseException):
    """A block took longer than it may; no `except Exception` inside of it is to swallow this."""


class time_limit:
    """A block of Python code, in any thread, that ends in OverdueError when it takes too long.

    What runs below Python, such as one operation on huge numbers, is interrupted when it returns.
    """

    _running: ClassVar[dict[time_limit, tuple[int, float]]] = {}  # thread, and when it is too late
    _watcher: ClassVar[threading.Thread | None] = None

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self._running[self] = (threading.get_ident(), time.monotonic() + self.seconds)
        watcher = time_limit._watcher
        if watcher is None or not watcher.is_alive():  # a forked process has none
            time_limit._watcher = threading.Thread(target=self._watch, daemon=True)
            time_limit._watcher.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Let OverdueError pass; wait for it where it is on its way to this thread."""
        while self._running.pop(self, None) is None and kind is not OverdueError:
            time.sleep(LOOK_S)

    @classmethod
    def _watch(cls) -> None:
        while True:
            time.sleep(LOOK_S)
            for block, (ident, end_s) in list(cls._running.items()):
                if time.monotonic() > end_s and cls._running.pop(block, None) is not None:
                    late = ctypes.py_object(OverdueError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), late)


class EventThread:
    """Runs calls in the order in which they come, so that what they change needs no lock; any
    thread may bring them.
    """

    def __init__(self, name: str, on_error: OnError) -> None:
        """`on_error` is told in the thread what a call raised; nothing is run after that."""
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._later: list[tuple[float, int, Call]] = []  # a heap of (time, number, call)
        self._numbers = itertools.count()
        self._is_closed = False
        self._thread = start_thread(name, self._run, on_error)

    def soon(self, call: Call) -> None:
        """Run a call after those that are waiting."""
        self._calls.put(call)

    def later(self, delay_s: float, call: Call) -> None:
        """Run a call when some time has passed; from a call only."""
        heapq.heappush(self._later, (time.monotonic() + delay_s, next(self._numbers), call))

    def close(self) -> None:
        """Run nothing more, and wait for the call that is running."""
        self._is_closed = True
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._is_closed:
            call = self._next()
            if call is not None and not self._is_closed:
                call()

    def _next(self) -> Call | None:
        """The next call; None when a time has come or the thread is to end."""
        if not self._later:
            return self._calls.get()
        delay_s = self._later[0][0] - time.monotonic()
        if delay_s <= 0:
            return heapq.heappop(self._later)[2]
        with suppress(queue.Empty):
            return self._calls.get(timeout=delay_s)
        return None
