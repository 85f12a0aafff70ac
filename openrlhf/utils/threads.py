"""Threads whose errors are told to somebody, and one that runs calls one after the other.

They are daemons: a program that ends in an error does not wait for them.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

CLOSE_S = 10.0  # until a call that does not end is left behind

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
