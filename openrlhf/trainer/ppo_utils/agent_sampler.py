"""Turns as awaitables over an engine whose calls block: thousands may wait without threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol, runtime_checkable

from openrlhf.engines.base import Completion, GenerationRequest

GATHER_S = 0.005  # turns that are asked for within this time go to the engine together


@runtime_checkable
class TakesRequests(Protocol):
    """An engine that takes requests while it runs and answers each as soon as it is done."""

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        """One future a request, in order."""


class AnswersRequests(Protocol):
    """An engine or a pool of them that answers when all of a call are done."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Completions of every request."""


class TurnSampler:
    """Samples single turns; `sample` may be awaited on any loop."""

    def __init__(self, engine: TakesRequests | AnswersRequests) -> None:
        self._engine = engine if isinstance(engine, TakesRequests) else _Gatherer(engine)
        self._pending: set[Future[list[Completion]]] = set()

    async def sample(self, request: GenerationRequest) -> Completion:
        """The one completion of a request; raises what the engine raises.

        The engine is not told when the waiting is cancelled: it finishes what it has begun.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Completion]] = loop.create_future()
        (pending,) = self._engine.submit([request])
        self._pending.add(pending)
        pending.add_done_callback(self._pending.discard)
        pending.add_done_callback(partial(_tell, loop, answer))
        (completion,) = await answer
        return completion

    def drain(self, wait_s: float) -> None:
        """Wait until the engine has answered what it was asked up to now."""
        wait(list(self._pending), timeout=wait_s)


def _tell(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Any], pending: Future[Any]
) -> None:
    """Carry a result over to its loop; a loop that was closed waits for nothing."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, answer, pending)


def _settle(answer: asyncio.Future[Any], pending: Future[Any]) -> None:
    if answer.done():  # nobody waits any more
        return
    error = pending.exception()
    if error is None:
        answer.set_result(pending.result())
    else:
        answer.set_exception(error)


Waiting = tuple[GenerationRequest, "Future[list[Completion]]"]


class _Gatherer:
    """Makes batches of single requests: while one is sampled, the next is gathered."""

    def __init__(self, engine: AnswersRequests) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="agent-turns")
        self._lock = threading.Lock()
        self._waiting: list[Waiting] = []
        self._batch: list[Waiting] = []
        self._is_busy = False

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        """One future a request, in order."""
        items: list[Waiting] = [(request, Future()) for request in requests]
        with self._lock:
            self._waiting += items
            self._start_if_idle()
        return [future for _, future in items]

    def _start_if_idle(self) -> None:
        if self._waiting and not self._is_busy:
            self._is_busy = True
            self._pool.submit(self._generate).add_done_callback(self._answered)

    def _generate(self) -> list[list[Completion]]:
        time.sleep(GATHER_S)
        with self._lock:
            self._batch, self._waiting = self._waiting, []
        return self._engine.generate([request for request, _ in self._batch])

    def _answered(self, call: Future[list[list[Completion]]]) -> None:
        batch, self._batch = self._batch, []
        with self._lock:
            self._is_busy = False
            self._start_if_idle()
        error = call.exception()
        for index, (_, future) in enumerate(batch):
            if error is None:
                future.set_result(call.result()[index])
            else:
                future.set_exception(error)
