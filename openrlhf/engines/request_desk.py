"""Requests given to an engine one by one, their answers fetched when somebody comes for them.

For callers in other processes: no thread waits for a request, and no call takes longer than the
caller wants.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from openrlhf.engines.base import Completion, GenerationRequest
from openrlhf.utils.mailboxes import Mailboxes

Answer = Future[list[Completion]]


class TakesRequests(Protocol):
    """An engine that takes requests while it runs, and can stop them."""

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Return one future a request, in order."""

    def abort(self, futures: Iterable[Answer]) -> None:
        """Stop requests and cancel their futures; those that are answered stay so."""


@dataclass(frozen=True)
class FinishedRequest:
    """The answer to a request."""

    request_id: str
    completions: list[Completion]


class RequestDesk:
    """Takes requests for an engine; all calls may come from any thread."""

    def __init__(self, engine: TakesRequests) -> None:
        self._engine = engine
        self._finished: Mailboxes[FinishedRequest] = Mailboxes()
        self._pending: dict[str, dict[str, Answer]] = {}  # by owner, by request id
        self._lock = threading.Lock()

    def submit_requests(self, owner: str, requests: Sequence[GenerationRequest]) -> None:
        """Take requests; their answers are kept for `owner`. Raises EngineError when the engine is
        down.
        """
        with self._lock:
            pending = self._pending.setdefault(owner, {})
        for request, answer in zip(requests, self._engine.submit(requests), strict=True):
            pending[request.request_id] = answer
            answer.add_done_callback(partial(self._answered, owner, request.request_id))

    def finished_requests(self, owner: str, wait_s: float) -> list[FinishedRequest]:
        """Answers since the last call; waits up to `wait_s` seconds for the first of them.

        Raises the error of a request that failed.
        """
        return self._finished.fetch(owner, wait_s)

    def abandon_requests(self, owner: str) -> None:
        """Stop sampling for an owner, where the engine can, and forget what it did not fetch; a
        call that waits for answers returns.
        """
        self._finished.close(owner)
        with self._lock:
            pending = self._pending.pop(owner, {})
        self._abort(list(pending.values()))

    def abort_requests(self, owner: str, request_ids: Sequence[str]) -> None:
        """Stop sampling for some requests, where the engine can."""
        pending = self._pending.get(owner, {}).copy()
        self._abort([pending[name] for name in request_ids if name in pending])

    def _abort(self, answers: list[Answer]) -> None:
        if answers:
            self._engine.abort(answers)

    def _answered(self, owner: str, request_id: str, answer: Answer) -> None:
        self._pending.get(owner, {}).pop(request_id, None)
        if not answer.cancelled():  # else it was abandoned
            error = answer.exception()
            self._finished.put(owner, error or FinishedRequest(request_id, answer.result()))
