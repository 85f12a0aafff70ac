"""Engines as one awaitable: every request goes to the engine with the least to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from openrlhf.engines.base import Completion, GenerationRequest
from openrlhf.rollout.samplers import BatchSampler, Sampler

MAX_DESCRIBED = 4  # engines that are told of by name


class EnginePool:
    """Engines behind one call; used on one event loop."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self.samplers = list(samplers)
        self._loads = [0] * len(self.samplers)  # samples that each engine works on
        self._heard_at = [time.monotonic()] * len(self.samplers)  # a result, or nothing to do

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Return the completions of a request; raises EngineError."""
        k = min(range(len(self._loads)), key=self._loads.__getitem__)
        if not self._loads[k]:
            self._heard_at[k] = time.monotonic()
        self._loads[k] += request.sampling.num_samples
        try:
            return await self.samplers[k].sample(request)
        finally:
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

    async def drain(self) -> None:
        """Wait until the engines have stopped what was cancelled."""
        await asyncio.gather(*(sampler.drain() for sampler in self.samplers))
