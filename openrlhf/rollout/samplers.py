"""Engines whose requests are awaitables on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from openrlhf.engines.base import Completion, GenerationRequest
from openrlhf.engines.request_desk import TakesRequests

GATHER_S = 0.005  # requests that come within this time are sampled together

Answer = list[Completion]


class Sampler(Protocol):
    """One engine: in this process (LocalSampler, BatchSampler), or an actor (RaySampler)."""

    async def sample(self, request: GenerationRequest) -> Answer:
        """Return the completions of a request; raises EngineError.

        Cancelling it stops the sampling.
        """

    async def drain(self) -> None:
        """Wait until the engine has stopped what was cancelled."""


class SamplesBatches(Protocol):
    """An engine that returns when all requests of a call are done."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Return the completions of every request."""


class LocalSampler:
    """An engine in this process that takes requests while it runs."""

    def __init__(self, engine: TakesRequests) -> None:
        self._engine = engine
        self._aborted: set[Future[Answer]] = set()  # and still sampled

    async def sample(self, request: GenerationRequest) -> Answer:
        """Return the completions of a request."""
        (pending,) = self._engine.submit([request])
        try:
            return await asyncio.shield(asyncio.wrap_future(pending))
        except asyncio.CancelledError:
            self._engine.abort([pending])
            self._aborted.add(pending)
            pending.add_done_callback(self._aborted.discard)
            raise

    async def drain(self) -> None:
        """Wait until the engine has stopped what was cancelled."""
        left = [asyncio.wrap_future(pending) for pending in self._aborted.copy()]
        await asyncio.gather(*left, return_exceptions=True)


class BatchSampler:
    """An engine that samples whole batches: while one is sampled, the next is gathered."""

    def __init__(self, engine: SamplesBatches) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="own-generate")
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Answer]]] = []
        self._work: asyncio.Future[None] | None = None

    async def sample(self, request: GenerationRequest) -> Answer:
        """Return the completions of a request.

        One that is cancelled before its batch begins is left out; else its batch goes on.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._sample_batches())
        return await answer

    async def drain(self) -> None:
        """Wait until no batch is sampled."""
        if self._work is not None:
            await asyncio.wait([self._work])

    async def _sample_batches(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            batch = [item for item in self._waiting if not item[1].done()]
            self._waiting = []
            if not batch:
                continue
            loop = asyncio.get_running_loop()
            requests = [request for request, _ in batch]
            call = loop.run_in_executor(self._thread, self._engine.generate, requests)
            await asyncio.wait([call])
            error = call.exception()
            for index, (_, answer) in enumerate(batch):
                if answer.done():  # cancelled meanwhile
                    continue
                if error is None:
                    answer.set_result(call.result()[index])
                else:
                    answer.set_exception(error)
