"""Single requests for an engine that only answers whole calls: while one batch is sampled, the next
is gathered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from openrlhf.engines.base import Completion, GenerationRequest
from openrlhf.engines.request_desk import TakesRequests

GATHER_S = 0.005  # requests that come within this time go to the engine together


class AnswersRequests(Protocol):
    """An engine or a pool of them that answers when all of a call are done."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Completions of every request."""


def taking_requests(engine: TakesRequests | AnswersRequests) -> TakesRequests:
    """The engine itself where it takes requests while it runs."""
    return engine if isinstance(engine, TakesRequests) else RequestGatherer(engine)


Waiting = tuple[GenerationRequest, Future[list[Completion]]]


class RequestGatherer:
    """Makes batches of single requests: while one is sampled, the next is gathered."""

    def __init__(self, engine: AnswersRequests) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine-requests")
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

    def abort(self, futures: Iterable[Future[list[Completion]]]) -> None:
        """Take out what waits; what is sampled now is sampled to its end."""
        unwanted = set(futures)
        with self._lock:
            given_up = [future for _, future in self._waiting if future in unwanted]
            self._waiting = [item for item in self._waiting if item[1] not in unwanted]
        for future in given_up:
            future.cancel()

    def _start_if_idle(self) -> None:
        if self._waiting and not self._is_busy:
            self._is_busy = True
            self._pool.submit(self._generate).add_done_callback(self._answered)

    def _generate(self) -> list[list[Completion]]:
        time.sleep(GATHER_S)
        with self._lock:
            self._batch, self._waiting = self._waiting, []
        requests = [request for request, _ in self._batch]
        return self._engine.generate(requests) if requests else []

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
