"""An event loop in a thread of its own, watched from outside: user code may block it for ever.

A blocked loop cannot be repaired, only left behind; whoever watches starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from openrlhf.utils.user_code import file_of

Answer = TypeVar("Answer")
CLEAN_UP_S = 0.05  # for what is cancelled at the end


class LoopThread:
    """Runs coroutines; any thread may hand them in."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_closing = False
        self._beat_asked_at: float | None = None  # None: the last beat was answered
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, callback: Callable[..., object], *args: object) -> None:
        """Have the loop call something soon; nothing happens once it is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback, *args)

    def run(self, coroutine: Coroutine[Any, Any, Answer], timeout_s: float) -> Answer:
        """What a coroutine answers; TimeoutError when it takes longer."""
        future: Future[Answer] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result(timeout_s)

    def seconds_behind(self) -> float:
        """For how long the loop has not come round; call it again and again."""
        asked_at = self._beat_asked_at
        if asked_at is None:
            self._beat_asked_at = time.monotonic()
            self.call(self._beat)
            return 0.0
        return time.monotonic() - asked_at

    def current_task(self) -> str | None:
        """The name of the task that holds the loop now."""
        task = asyncio.current_task(self.loop)
        return None if task is None else task.get_name()

    def place_in(self, path: str | Path) -> str | None:
        """`file:line` of the deepest place in a user's file that the thread is at, if any."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        file = file_of(path)
        while frame is not None:
            if frame.f_code.co_filename == file:
                return f"{path}:{frame.f_lineno}"
            frame = frame.f_back
        return None

    def abandon(self) -> None:
        """Give up a blocked loop: it ends when its thread comes back, or at its next Python line
        if there is one.
        """
        self._is_closing = True
        self.loop.set_exception_handler(_ignore)
        self.call(self.loop.stop)
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))

    def close(self, timeout_s: float = 1.0) -> None:
        """Cancel what runs and end the thread; one that does not end is left behind."""
        self._is_closing = True
        self.call(self.loop.stop)
        self._thread.join(timeout_s)

    def _beat(self) -> None:
        self._beat_asked_at = None

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._is_closing:
            self._run_until_stopped()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_later(CLEAN_UP_S, self.loop.stop)
        self._run_until_stopped()
        self.loop.close()

    def _run_until_stopped(self) -> None:
        # User code may call exit(): the loop tells its task and stops; there is more to run.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            self.loop.run_forever()


def _ignore(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What ends in a loop that was given up is nobody's news."""
