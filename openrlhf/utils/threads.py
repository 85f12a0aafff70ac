"""Threads whose errors are told to somebody, and one that runs an event loop.

They are daemons: a program that ends in an error does not wait for them.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

CLOSE_S = 10.0  # until a call that does not end is left behind
LOOK_S = 0.1  # between two looks at blocks with a time limit

Call = Callable[[], None]
OnError = Callable[[BaseException], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class telling:
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
        with telling(on_error):
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


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.is_running = True
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return what work on the loop returns, for another thread that waits."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """End the loop and its thread."""
        self.is_running = False
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_S)
