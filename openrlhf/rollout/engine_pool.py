"""Engines as one awaitable: every request goes to the engine with the least to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from openrlhf.engines.base import Completion, GenerationRequest
from openrlhf.errors import EngineError
from openrlhf.utils.threads import LoopThread

WAIT_S = 4 * 3600.0  # for one request, with those before it
MAX_DESCRIBED = 4  # engines that are told of by name
GATHER_S = 0.005  # requests that come within this time are sampled together

Answer = list[Completion]


class Sampler(Protocol):
    """One engine: vLLM in this process or in an actor, or a model that generates in batches."""

    async def sample(self, request: GenerationRequest) -> Answer:
        """Return the completions of a request; raises EngineError.

        Cancelling it stops the sampling, and ends when the engine has stopped.
        """


class EnginePool:
    """Engines behind one call; used on one event loop."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self.samplers = list(samplers)
        self._loads = [0] * len(self.samplers)  # samples that each engine works on
        self._heard_at = [time.monotonic()] * len(self.samplers)  # a result, or nothing to do

    async def generate(self, request: GenerationRequest) -> Answer:
        """Return the completions of a request; raises EngineError."""
        k = min(range(len(self._loads)), key=self._loads.__getitem__)
        if not self._loads[k]:
            self._heard_at[k] = time.monotonic()
        self._loads[k] += request.sampling.num_samples
        work = asyncio.ensure_future(self.samplers[k].sample(request))
        try:  # wait_for would lose a cancellation that comes together with the result
            await asyncio.wait([work], timeout=WAIT_S)
            if not work.done():
                raise EngineError(f"engine {k} did not answer in {WAIT_S:g} s")
            return work.result()
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait([work])
            self._loads[k] -= request.sampling.num_samples
            self._heard_at[k] = time.monotonic()

    @property
    def in_rounds(self) -> bool:
        """True where requests are sampled in batches: those that come together end together."""
        return any(isinstance(sampler, BatchSampler) for sampler in self.samplers)

    def describe(self) -> str:
        """Return which engines work, the most silent first."""
        now = time.monotonic()
        busy = [(now - self._heard_at[k], k, load) for k, load in enumerate(self._loads) if load]
        words = [
            f"engine {k} has {load} samples, none finished for {silence_s:.0f} s"
            for silence_s, k, load in sorted(busy, reverse=True)[:MAX_DESCRIBED]
        ]
        if len(busy) > len(words):
            words.append(f"{len(busy) - len(words)} more engines work")
        return "; ".join(words)


class BatchSampler:
    """A model that samples whole batches: while one is sampled, the next is gathered."""

    def __init__(self, generate: Callable[[Sequence[GenerationRequest]], list[Answer]]) -> None:
        """`generate` returns the completions of every request."""
        self._generate = generate
        # One thread, which the end of the program does not wait for, as it would for an executor's.
        self._thread = LoopThread("own-generate")
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Answer]]] = []
        self._work: asyncio.Future[None] | None = None
        self._call: asyncio.Future[list[Answer]] | None = None  # of the batch that is sampled

    async def sample(self, request: GenerationRequest) -> Answer:
        """Return the completions of a request.

        One that is cancelled before its batch begins is left out; else its batch goes on.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._sample_batches())
        try:
            return await answer
        except asyncio.CancelledError:
            if self._call is not None:
                await asyncio.wait([self._call])
            raise

    async def _sample_batches(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            batch = [item for item in self._waiting if not item[1].done()]
            self._waiting = []
            if not batch:
                continue
            requests = [request for request, _ in batch]
            self._call = asyncio.ensure_future(self._thread.call(self._generate, requests))
            await asyncio.wait([self._call])
            error = self._call.exception()
            for index, (_, answer) in enumerate(batch):
                if answer.done():  # cancelled meanwhile
                    continue
                if error is None:
                    answer.set_result(self._call.result()[index])
                else:
                    answer.set_exception(error)
