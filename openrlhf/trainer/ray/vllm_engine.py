"""Rollout engines as Ray actors, and the pool that shares requests among them."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from openrlhf.engines.base import (
    SHARED_MEMORY,
    Completion,
    GenerationRequest,
    RolloutEngine,
    SyncReceipt,
    WeightBucket,
    WeightRoute,
)
from openrlhf.engines.request_desk import FinishedRequest, RequestDesk
from openrlhf.engines.vllm_engine import VLLMEngine, VLLMEngineConfig
from openrlhf.errors import EngineError, OpenRLHFError
from openrlhf.rollout.samplers import LocalSampler, Sampler
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.launcher import CALL_TIMEOUT_S, get, start_actor
from openrlhf.trainer.ray.model_actor import Health
from openrlhf.trainer.ray.placement import Slot
from openrlhf.trainer.ray.utils import node_address, own_gpu
from openrlhf.trainer.ray.weight_sync import FetchedBuckets
from openrlhf.utils.logging import redirect_framework_logs

MAX_CONCURRENT_CALLS = 64
FETCH_S = 2.0  # of one look at an engine; a result ends it at once
CLOSE_S = 10.0  # until an engine that does not let go is left behind


class LLMRayActor(VLLMEngine):
    """A vLLM engine in a process of its own."""

    def __init__(self, config: VLLMEngineConfig, name: str, run_dir: str) -> None:
        redirect_framework_logs(run_dir, name, capture_streams=True)
        super().__init__(replace(config, device_index=own_gpu()))
        self._desk = RequestDesk(self)
        self._buckets = FetchedBuckets()

    def ready(self) -> str:
        """Answer once the engine is up: the address of its node."""
        return node_address()

    def health(self) -> Health:
        """Return how far the engine is; a step is a forward pass."""
        work = "generating" if self._loop.is_busy else None
        return Health(work, self._loop.num_steps, os.getpid())

    def receive_bucket(self, bucket: WeightBucket) -> None:
        """Load the tensors of one bucket, which may lie in Ray's object store."""
        if "object" in bucket.handle:
            bucket = self._buckets.fetched(bucket)
        super().receive_bucket(bucket)

    def submit_requests(self, owner: str, requests: Sequence[GenerationRequest]) -> None:
        """See RequestDesk."""
        self._desk.submit_requests(owner, requests)

    def finished_requests(self, owner: str, wait_s: float) -> list[FinishedRequest]:
        """See RequestDesk."""
        return self._desk.finished_requests(owner, wait_s)

    def abandon_requests(self, owner: str) -> None:
        """See RequestDesk."""
        self._desk.abandon_requests(owner)

    def abort_requests(self, owner: str, request_ids: Sequence[str]) -> None:
        """Stop sampling for some requests."""
        self._desk.abort_requests(owner, request_ids)


@dataclass(eq=False)
class RayEngine:
    """An engine actor seen as an engine; can be sent to other workers."""

    handle: Any
    name: str
    weight_route: WeightRoute = SHARED_MEMORY
    timeout_s: float = CALL_TIMEOUT_S
    node: str = ""  # address of the engine's node; empty until it is up

    @property
    def who(self) -> str:
        """The engine in the words of an error."""
        return f"{self.name} on node {self.node}" if self.node else self.name

    def _call(self, method: Callable[..., Any], *args: object, **options: object) -> Any:
        reference = getattr(self.handle, method.__name__).remote(*args, **options)
        return get(reference, self.who, self.timeout_s)

    def ready(self) -> None:
        """Wait until the engine is up."""
        self.node = self._call(LLMRayActor.ready)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """See RolloutEngine."""
        return self._call(LLMRayActor.generate, requests)  # type: ignore[no-any-return]

    def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """See RolloutEngine."""
        self._call(LLMRayActor.init_weight_transfer, init_info)

    def begin_weight_update(self, *, keep_running: bool = False) -> None:
        """See RolloutEngine."""
        self._call(LLMRayActor.begin_weight_update, keep_running=keep_running)

    def receive_bucket(self, bucket: WeightBucket) -> None:
        """See RolloutEngine."""
        self._call(LLMRayActor.receive_bucket, bucket)

    def finish_weight_update(self, weight_version: int) -> SyncReceipt:
        """See RolloutEngine."""
        return self._call(LLMRayActor.finish_weight_update, weight_version)  # type: ignore[no-any-return]

    def sleep(self) -> None:
        """See RolloutEngine."""
        self._call(LLMRayActor.sleep)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """See RolloutEngine."""
        self._call(LLMRayActor.wake_up, tags)

    def shutdown(self) -> None:
        """See RolloutEngine."""
        self._call(LLMRayActor.shutdown)


def create_vllm_engines(
    config: VLLMEngineConfig, slots: Sequence[Slot], *, run_dir: str
) -> list[RayEngine]:
    """Start one engine actor a slot; `ready` waits until it is up.

    Engine k draws its random numbers from the seed `config.seed + k`.
    """
    return [
        RayEngine(
            start_actor(
                LLMRayActor,
                (replace(config, seed=config.seed + index), f"vllm-{index}", run_dir),
                slot,
                max_concurrency=MAX_CONCURRENT_CALLS,
            ),
            f"vllm-{index}",
            config.weight_route,
        )
        for index, slot in enumerate(slots)
    ]


class RaySampler:
    """Requests of an engine actor as awaitables; one coroutine fetches all that is finished."""

    def __init__(self, engine: RayEngine) -> None:
        self.engine = engine
        self._owner = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[list[Completion]]] = {}
        self._listening: asyncio.Future[None] | None = None
        self._unwanted: list[str] = []  # cancelled, and not yet told to the engine
        self._aborting: set[asyncio.Future[None]] = set()

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        """Return the completions of a request; raises EngineError.

        Cancelling it stops the sampling.
        """
        # A request that begins again must not get what its first try sampled.
        request_id = f"{request.request_id}~{next(self._numbers)}"
        answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answer
        if self._listening is None or self._listening.done():
            self._listening = asyncio.ensure_future(self._listen())
        try:
            named = replace(request, request_id=request_id)
            await self._call(LLMRayActor.submit_requests, self._owner, [named])
            return await answer
        except asyncio.CancelledError:
            self._unwanted.append(request_id)
            if len(self._unwanted) == 1:
                aborting = asyncio.ensure_future(self._abort_unwanted())
                self._aborting.add(aborting)
                aborting.add_done_callback(self._aborting.discard)
            raise
        finally:
            del self._waiting[request_id]

    async def drain(self) -> None:
        """Wait until the engine has stopped what was cancelled."""
        await asyncio.gather(*self._aborting)

    async def close(self) -> None:
        """Stop all that is sampled; an engine that is down has forgotten it."""
        await self.drain()
        with suppress(OpenRLHFError):
            await self._call(LLMRayActor.abandon_requests, self._owner, timeout_s=CLOSE_S)

    async def _abort_unwanted(self) -> None:
        await asyncio.sleep(0)  # one call for all that are cancelled together
        unwanted, self._unwanted = self._unwanted, []
        with suppress(OpenRLHFError):  # an engine that is down samples nothing
            await self._call(LLMRayActor.abort_requests, self._owner, unwanted, timeout_s=CLOSE_S)

    async def _listen(self) -> None:
        try:
            while self._waiting:
                for item in await self._call(LLMRayActor.finished_requests, self._owner, FETCH_S):
                    if item.request_id in self._waiting:
                        self._waiting[item.request_id].set_result(item.completions)
        except OpenRLHFError as error:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)

    async def _call(
        self, method: Callable[..., Any], *args: object, timeout_s: float | None = None
    ) -> Any:
        timeout_s = timeout_s or self.engine.timeout_s
        reference = getattr(self.engine.handle, method.__name__).remote(*args)
        future = asyncio.wrap_future(reference.future())
        done, _ = await asyncio.wait({future}, timeout=timeout_s)
        if not done:
            raise EngineError(f"{self.engine.who} did not answer in {timeout_s:.0f} s")
        if future.exception() is None:
            return future.result()
        return get(reference, self.engine.who, timeout_s)  # raises it in the terms of a user


def samplers_of(engines: Sequence[RolloutEngine]) -> list[Sampler]:
    """Return engines with awaitable requests."""
    return [
        RaySampler(engine) if isinstance(engine, RayEngine) else LocalSampler(engine)
        for engine in engines
    ]


class GroupGenerator:
    """The policy's own ranks as one engine (no vLLM); requests are shared among them."""

    def __init__(self, group: WorkerGroup, method: Callable[..., Any]) -> None:
        self.group = group
        self.method = method

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Return the completions of all requests, in order."""
        width = self.group.num_shares
        parts = self.group.start(self.method, [(requests[k::width],) for k in range(width)])()
        answers: list[list[Completion]] = [[] for _ in requests]
        for k, part in enumerate(parts):
            answers[k::width] = part
        return answers
