"""Turns as awaitables over an engine whose calls block: thousands may wait without threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol, runtime_checkable

from openrlhf.engines.base import Completion, GenerationRequest, OnTokens
from openrlhf.engines.request_desk import AbortsRequests, TakesRequests
from openrlhf.engines.request_gatherer import AnswersRequests, taking_requests
from openrlhf.trainer.ppo_utils.agent_trace import EpisodeOverError


@runtime_checkable
class ShowsTokens(Protocol):
    """An engine that tells tokens while it samples them."""

    def submit_watched(
        self, request: GenerationRequest, on_tokens: OnTokens
    ) -> Future[list[Completion]]:
        """A future for one request; see `VLLMEngine.submit_watched`."""


class TurnSampler:
    """Samples single turns; `wait` may be awaited on any loop."""

    def __init__(self, engine: TakesRequests | AnswersRequests) -> None:
        self._engine = taking_requests(engine)
        self._pending: set[Future[list[Completion]]] = set()

    def start(
        self, request: GenerationRequest, on_tokens: OnTokens | None = None
    ) -> Future[list[Completion]]:
        """Ask for a turn; `on_tokens` sees it grow, where the engine can show that."""
        if on_tokens is not None and isinstance(self._engine, ShowsTokens):
            pending = self._engine.submit_watched(request, on_tokens)
        else:
            (pending,) = self._engine.submit([request])
        self._pending.add(pending)
        pending.add_done_callback(self._pending.discard)
        return pending

    async def wait(self, pending: Future[list[Completion]]) -> Completion:
        """The one completion of a turn; raises what the engine raises, EpisodeOverError when the
        turn was aborted. A turn that nobody waits for any more is aborted.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Completion]] = loop.create_future()
        pending.add_done_callback(partial(_tell, loop, answer))
        try:
            (completion,) = await answer
        except asyncio.CancelledError:
            self.abort([pending])
            raise
        return completion

    def abort(self, turns: Iterable[Future[list[Completion]]]) -> None:
        """Have the engine stop sampling for these, where it can."""
        if isinstance(self._engine, AbortsRequests):
            self._engine.abort(list(turns))

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
    if pending.cancelled():
        answer.set_exception(EpisodeOverError("the turn was given up: its episode is over"))
        return
    error = pending.exception()
    if error is None:
        answer.set_result(pending.result())
    else:
        answer.set_exception(error)
