"""Engines whose requests are awaitables on an event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Protocol

from openrlhf.engines.base import Completion, GenerationRequest
from openrlhf.engines.request_desk import AbortsRequests, TakesRequests
from openrlhf.engines.request_gatherer import AnswersRequests, taking_requests


class Sampler(Protocol):
    """One engine: in this process (LocalSampler), or an actor (RaySampler)."""

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        """Return the completions of a request; raises EngineError.

        Cancelling it stops the sampling.
        """

    async def drain(self) -> None:
        """Wait until the engine has stopped what was cancelled."""

    async def close(self) -> None:
        """Stop all that is sampled; an engine that is down has forgotten it."""


class LocalSampler:
    """An engine in this process."""

    def __init__(self, engine: TakesRequests | AnswersRequests) -> None:
        self._engine = taking_requests(engine)
        self._aborted: set[Future[list[Completion]]] = set()  # and still sampled

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        """Return the completions of a request."""
        (pending,) = self._engine.submit([request])
        try:
            return await asyncio.shield(asyncio.wrap_future(pending))
        except asyncio.CancelledError:
            if isinstance(self._engine, AbortsRequests):
                self._engine.abort([pending])
            self._aborted.add(pending)
            pending.add_done_callback(self._aborted.discard)
            raise

    async def drain(self) -> None:
        """Wait until the engine has stopped what was cancelled."""
        left = [asyncio.wrap_future(pending) for pending in self._aborted.copy()]
        await asyncio.gather(*left, return_exceptions=True)

    async def close(self) -> None:
        """Stop all that is sampled: it was cancelled one by one."""
