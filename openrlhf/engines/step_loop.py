"""One thread that steps an engine, takes requests while it runs, and runs commands in between.

Callers block on futures, from any thread. An error of a step ends the loop and fails every waiting
call; an error of a command belongs to its caller alone.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from openrlhf.errors import EngineError
from openrlhf.utils.threads import telling

Answer = TypeVar("Answer")


# Something for the thread to do, and the futures that fail when it never will.
Item = tuple[Callable[[], None], list[Future[Any]]]


class StepLoop:
    """The thread, its inbox, and the futures of the calls that wait.

    It drives a stepper, such as VLLMStepper, by four calls: `add(key, request)`, `has_work()`,
    `step()`, which returns the keys and results of the requests it finished, and `abort(keys)`.
    """

    def __init__(self, make_stepper: Callable[[], Any], name: str) -> None:
        """Start the thread; it makes the stepper itself, so that no other thread computes."""
        self.name = name
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._waiting: dict[str, Future[Any]] = {}
        self.num_steps = 0  # done since the start
        self.is_paused = False  # set by commands; requests are still taken and wait
        self._is_closing = False
        self._death: BaseException | None = None
        self._lock = threading.Lock()  # held to put into the inbox or to close it
        self._num_requests = 0
        made: Future[Any] = Future()
        target = partial(self._run, make_stepper, made)
        self._thread = threading.Thread(target=target, name=name, daemon=True)
        self._thread.start()
        self.stepper = made.result()

    def submit(self, requests: Iterable[Any]) -> list[Future[Any]]:
        """Return one future a request, in order; they may be served before the call returns."""
        pairs: list[tuple[Future[Any], Any]] = [(Future(), request) for request in requests]

        def add() -> None:
            for future, request in pairs:
                self._add(future, request)

        futures = [future for future, _ in pairs]
        self._put(add, futures)
        return futures

    def call(self, command: Callable[[], Answer]) -> Answer:
        """Run a command between two steps and answer what it answers."""
        future: Future[Answer] = Future()

        def run() -> None:
            with telling(future.set_exception):
                future.set_result(command())

        self._put(run, [future])
        return future.result()

    @property
    def is_busy(self) -> bool:
        """Return True while requests wait and the loop is not paused; from any thread."""
        return bool(self._waiting) and not self.is_paused

    @property
    def num_waiting(self) -> int:
        """Requests that were taken and not answered (from a command)."""
        return len(self._waiting)

    def fail_waiting(self, message: str) -> None:
        """Fail every request that was not answered (from a command)."""
        keys = list(self._waiting)
        for key in keys:
            self._waiting.pop(key).set_exception(EngineError(message))
        self.stepper.abort(keys)

    def abort(self, futures: Iterable[Future[Any]]) -> None:
        """Forget requests that nobody waits for any more; their futures are cancelled. Does not
        wait, and does nothing for those that are answered.
        """
        unwanted = set(futures)

        def run() -> None:
            keys = [key for key, future in self._waiting.items() if future in unwanted]
            self.stepper.abort(keys)
            for key in keys:
                self._waiting.pop(key).cancel()

        with contextlib.suppress(EngineError):  # a loop that is down has forgotten them all
            self._put(run, [])

    def close(self) -> None:
        """Fail what waits, end the thread and wait for it."""

        def close() -> None:
            self._is_closing = True

        with contextlib.suppress(EngineError):
            self._put(close, [])
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, run: Callable[[], None], futures: list[Future[Any]]) -> None:
        with self._lock:
            if self._is_closing:
                raise self._error()
            self._inbox.put((run, futures))

    def _error(self) -> EngineError:
        error = EngineError(f"{self.name} is down: {self._death or 'it was shut down'}")
        error.__cause__ = self._death
        return error

    def _add(self, future: Future[Any], request: Any) -> None:
        key = str(self._num_requests)
        self._num_requests += 1

        def refuse(error: BaseException) -> None:
            future.set_exception(EngineError(f"{self.name} refused a request: {error}"))

        with telling(refuse):
            self.stepper.add(key, request)
            self._waiting[key] = future

    def _run(self, make_stepper: Callable[[], Any], made: Future[Any]) -> None:
        with telling(made.set_exception):
            self.stepper = make_stepper()
            made.set_result(self.stepper)
        if made.exception() is not None:
            return
        with telling(self._die):
            while not self._is_closing:
                self._take_inbox()
                if not self.is_paused and self.stepper.has_work():
                    for key, result in self.stepper.step():
                        self._waiting.pop(key).set_result(result)
                    self.num_steps += 1
        self._end()

    def _die(self, error: BaseException) -> None:
        self._death = error

    def _take_inbox(self) -> None:
        """Run all that is in the inbox; wait for something when there is nothing else to do."""
        is_idle = self.is_paused or not self.stepper.has_work()
        with contextlib.suppress(queue.Empty):
            while not self._is_closing:
                run, _ = self._inbox.get(block=is_idle)
                run()
                is_idle = False

    def _end(self) -> None:
        with self._lock:  # from here on nothing comes into the inbox
            self._is_closing = True
        unanswered = list(self._waiting.values())
        with contextlib.suppress(queue.Empty):
            while True:
                unanswered += self._inbox.get(block=False)[1]
        for future in unanswered:
            future.set_exception(self._error())
        self._waiting.clear()
