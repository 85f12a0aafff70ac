"""Engines as one awaitable: every request goes to the engine with the least to do, and to another
one if that is lost; what it returns is checked and decoded.
"""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from openrlhf.engines.base import Completion, GenerationRequest
from openrlhf.errors import EngineError, LostEngineError, LostRankError
from openrlhf.rollout.rollout import RolloutRequest
from openrlhf.utils.rollout import Rollout, checked_arrays, sequence_tensors
from openrlhf.utils.threads import LoopThread
from openrlhf.utils.tokenizer import Tokenizer, decode_rest

WAIT_S = 4 * 3600.0  # for an engine to finish any request
GATHER_S = 0.005  # requests that come within this time are sampled together
LOOK_EVERY_S = 0.05  # for an engine, while none is up

Completions = list[Completion]


class SamplingEngine(Protocol):
    """One engine: vLLM in this process or in an actor, or a model that generates in batches."""

    # While it is not up: the rank that has to start again before it can have weights.
    waits_for: LostRankError | None

    @property
    def is_up(self) -> bool:
        """Return False while a new engine is started in its place; raise if none could be."""

    async def sample(self, request: GenerationRequest) -> Completions:
        """Return the completions of a request; raises EngineError, LostEngineError if another
        engine can sample them. After that `is_up` says when this one samples again.

        Cancelling it stops the sampling, and ends when the engine has stopped.
        """


class Dispatcher:
    """Sends each request to the engine with the least to do. Another one finishes what a lost one
    has begun, as far as its tokens are known, and samples the rest anew.
    """

    def __init__(self, engines: Sequence[SamplingEngine], *, may_mix: bool = False) -> None:
        """`may_mix`: a response may be of several versions of the weights."""
        self.engines, self.may_mix = list(engines), may_mix
        self._loads = [0] * len(self.engines)  # samples that each engine works on
        self._num_finished = [0] * len(self.engines)  # requests
        self._lost: set[int] = set()

    async def sample(self, request: GenerationRequest, *, home: int | None = None) -> Completions:
        """Return the completions of a request, from the engine `home` while that is up; raises
        EngineError.
        """
        while True:
            k = await self._choose(home)
            try:
                return await self._sample_on(k, request)
            except LostEngineError as error:
                self._lost.add(k)
                # An end that is a text may begin in one engine and end in another: it is not seen.
                if error.made and not request.sampling.stop:
                    found = await self._finish(request, error.made, home)
                    if self.may_mix or not any(each.version_starts for each in found):
                        return found

    async def _finish(
        self, request: GenerationRequest, made: Mapping[int, Completion], home: int | None
    ) -> Completions:
        """Return the completions of a request of which a lost engine has made these beginnings."""
        sampling = request.sampling
        num_own = 1 if sampling.temperature == 0 else sampling.num_samples  # greedy ones are alike
        rests = [
            asyncio.ensure_future(self._rest(request, k, made.get(k), home)) for k in range(num_own)
        ]
        try:
            return await asyncio.gather(*rests) * (sampling.num_samples // num_own)
        finally:
            for rest in rests:  # the others, if one has failed
                if not rest.cancelling():  # twice would cut the wait for its engine
                    rest.cancel()
            await asyncio.wait(rests)

    async def _rest(
        self, request: GenerationRequest, k: int, begun: Completion | None, home: int | None
    ) -> Completion:
        """Return sample k of a request, which goes on behind what was made of it."""
        if begun is not None and begun.finish_reason:
            return begun
        own = request.sampling.for_sample(k)
        ids = () if begun is None else begun.token_ids
        if ids:  # other numbers than those that the first tokens have had
            own = own.for_part(len(ids))
        rest = replace(
            request,
            request_id=f"{request.request_id}/{k}",
            prompt_token_ids=(*request.prompt_token_ids, *ids),
            sampling=replace(own, max_new_tokens=own.max_new_tokens - len(ids)),
        )
        [found] = await self.sample(rest, home=home)
        return found if begun is None else begun.followed_by(found)

    async def _choose(self, home: int | None) -> int:
        while not (up := [k for k in range(len(self.engines)) if self._is_up(k)]):
            for engine in self.engines:  # its weights come from a trainer that has lost a rank
                if engine.waits_for is not None:
                    raise engine.waits_for
            await asyncio.sleep(LOOK_EVERY_S)
        return home if home in up else min(up, key=self._loads.__getitem__)

    def _is_up(self, k: int) -> bool:
        if k in self._lost and self.engines[k].is_up:
            self._lost.remove(k)
        return k not in self._lost

    async def _sample_on(self, k: int, request: GenerationRequest) -> Completions:
        self._loads[k] += request.sampling.num_samples
        work = asyncio.ensure_future(self.engines[k].sample(request))
        try:  # wait_for would lose a cancellation that comes together with the result
            # Requests wait for those before them. Nothing of a batch is finished before all of it.
            limit_s = None if isinstance(self.engines[k], BatchedEngine) else WAIT_S
            while not work.done():
                before = self._num_finished[k]
                await asyncio.wait([work], timeout=limit_s)
                if not work.done() and self._num_finished[k] == before:
                    raise EngineError(f"engine {k} finished no request in {WAIT_S:g} s")
            return work.result()
        finally:
            self._num_finished[k] += 1
            if not work.done():
                work.cancel()
                await asyncio.wait([work])
            self._loads[k] -= request.sampling.num_samples


class EnginePool:
    """Makes the samples of prompts, one turn each; used on one event loop."""

    def __init__(
        self,
        engines: Sequence[SamplingEngine],
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        may_mix: bool = False,
    ) -> None:
        self.dispatcher = Dispatcher(engines, may_mix=may_mix)
        self.tokenizer = copy.deepcopy(tokenizer)  # tokenizers are not shared between threads
        self.vocab_size = vocab_size
        # Requests are sampled in batches: those that come together end together.
        self.in_rounds = any(isinstance(engine, BatchedEngine) for engine in engines)

    async def samples_of(self, request: RolloutRequest) -> list[Rollout]:
        """Return the samples of a prompt, with their texts; raises EngineError."""
        prompt = request.prompt
        asked = GenerationRequest(
            request.name, prompt.prompt_token_ids, request.sampling, prompt.images
        )
        completions = await self.dispatcher.sample(asked)
        if len(completions) != asked.sampling.num_samples:
            raise EngineError(
                f"request {asked.request_id}: {len(completions)} completions, "
                f"asked for {asked.sampling.num_samples}"
            )
        ids = [list(completion.token_ids) for completion in completions]
        names = [f"{asked.request_id}/{k}" for k in range(len(ids))]
        arrays = [
            checked_arrays(
                name, completion.token_ids, completion.logprobs, vocab_size=self.vocab_size
            )
            for name, completion in zip(names, completions, strict=True)
        ]
        texts = decode_rest(self.tokenizer, ids, skip_special_tokens=False)
        plain = decode_rest(self.tokenizer, ids, skip_special_tokens=True)
        request.metrics.add("num_generated_tokens", sum(map(len, ids)), reduction="sum")
        group = []
        for k, completion in enumerate(completions):
            response_ids, logprobs = arrays[k]
            token_ids, action_mask = sequence_tensors(prompt.prompt_token_ids, response_ids)
            rollout = Rollout(
                sample_id=names[k],
                group_id=request.group_id,
                token_ids=token_ids,
                action_mask=action_mask,
                logprobs=torch.from_numpy(logprobs),
                weight_versions=_versions_of(completion),
                finish_reason=completion.finish_reason,
                prompt_text=prompt.prompt_text,
                response_text=texts[k],
                plain_response=plain[k],
                **prompt.of_samples,
            )
            group.append(rollout)
        return group

    async def close(self) -> None:
        """Leave the engines to those who started them."""


def _versions_of(completion: Completion) -> torch.Tensor:
    """Return `token_versions`, (A,) int32, without a number of Python's for each token."""
    versions = torch.full((len(completion.token_ids),), completion.weight_version)
    for start, version in completion.version_starts:
        versions[start:] = version
    return versions.int()


class BatchedEngine:
    """A model that samples whole batches: while one is sampled, the next is gathered."""

    is_up = True  # it ends with this process
    waits_for: LostRankError | None = None

    def __init__(
        self, generate: Callable[[Sequence[GenerationRequest]], list[Completions]]
    ) -> None:
        """`generate` returns the completions of every request."""
        self._generate = generate
        # One thread, which the end of the program does not wait for, as it would for an executor's.
        self._thread = LoopThread("own-generate")
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[Completions]]] = []
        self._work: asyncio.Future[None] | None = None
        self._call: asyncio.Future[list[Completions]] | None = None  # of the batch that is sampled

    async def sample(self, request: GenerationRequest) -> Completions:
        """Return the completions of a request.

        One that is cancelled before its batch begins is left out; else its batch goes on.
        """
        completions: asyncio.Future[Completions] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, completions))
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._sample_batches())
        try:
            return await completions
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
            for index, (_, completions) in enumerate(batch):
                if completions.done():  # cancelled meanwhile
                    continue
                if error is None:
                    completions.set_result(self._call.result()[index])
                else:
                    completions.set_exception(error)
