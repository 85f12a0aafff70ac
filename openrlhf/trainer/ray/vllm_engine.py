"""Rollout engines as Ray actors, and the pool that shares requests among them."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import ray

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
from openrlhf.engines.request_gatherer import AnswersRequests
from openrlhf.engines.vllm_engine import VLLMEngine, VLLMEngineConfig
from openrlhf.errors import EngineError, OpenRLHFError
from openrlhf.rollout.samplers import LocalSampler, Sampler
from openrlhf.trainer.ppo_utils.samples_generator import OnGroup
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.launcher import CALL_TIMEOUT_S, get, start_actor
from openrlhf.trainer.ray.model_actor import Health
from openrlhf.trainer.ray.placement import Slot
from openrlhf.trainer.ray.utils import node_address, own_gpu
from openrlhf.trainer.ray.weight_sync import FetchedBuckets
from openrlhf.utils.logging import is_terminal, redirect_framework_logs
from openrlhf.utils.progress import counter, progress

MAX_CONCURRENT_CALLS = 64
FETCH_S = 2.0  # of one look at an engine; a result ends it at once
CLOSE_S = 10.0  # until an engine that does not let go is left behind
POLL_S = 0.5  # between two looks at how far the engines are

Finished = list[tuple[int, list[Completion]]]  # position of a request, what was sampled for it


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

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[Finished]:
        """Sample for all requests; what is finished, as it is finished."""
        yield from finished_in_turn(self.submit(requests))

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

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[Finished]:
        """Sample for all requests; what is finished, as it is finished."""
        method = getattr(self.handle, LLMRayActor.stream.__name__)
        answers = method.options(num_returns="streaming").remote(requests)
        deadline = time.monotonic() + self.timeout_s
        while True:
            seconds_left = max(deadline - time.monotonic(), 0.0)
            ready, _ = ray.wait([answers], timeout=seconds_left, fetch_local=False)
            if not ready:
                raise EngineError(f"{self.who} did not answer in {self.timeout_s:.0f} s")
            reference = next(answers, None)
            if reference is None:
                return
            yield get(reference, self.who, self.timeout_s)

    def submit_requests(self, owner: str, requests: Sequence[GenerationRequest]) -> None:
        """See RequestDesk."""
        self._call(LLMRayActor.submit_requests, owner, requests)

    def finished_requests(self, owner: str, wait_s: float) -> list[FinishedRequest]:
        """See RequestDesk."""
        return self._call(LLMRayActor.finished_requests, owner, wait_s)  # type: ignore[no-any-return]

    def abandon_requests(self, owner: str) -> None:
        """See RequestDesk."""
        self._call(LLMRayActor.abandon_requests, owner)

    def num_samples_done(self) -> int:
        """Samples the engine has finished since it started."""
        return self._call(LLMRayActor.num_samples_done)  # type: ignore[no-any-return]

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


@runtime_checkable
class CountsSamples(Protocol):
    """An engine that can be asked how far it is while it generates."""

    def num_samples_done(self) -> int:
        """Samples finished since the start."""


@runtime_checkable
class Streams(Protocol):
    """An engine elsewhere that sends what is finished before all of it is."""

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[Finished]:
        """What is finished, as it is finished."""


@runtime_checkable
class Submits(Protocol):
    """An engine in this process that does not keep its caller waiting."""

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        """A future for each request."""


def finished_in_turn(futures: Sequence[Future[list[Completion]]]) -> Iterator[Finished]:
    """Results as they come, with their positions; several at a time where they came together."""
    positions = {future: k for k, future in enumerate(futures)}
    pending = set(futures)
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        yield sorted(((positions[f], f.result()) for f in done), key=lambda pair: pair[0])


def stream_of(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> Iterator[Finished]:
    """What an engine finishes, as soon as it can say so."""
    if isinstance(engine, Streams):
        return engine.stream(requests)
    if isinstance(engine, Submits):
        return finished_in_turn(engine.submit(requests))
    return all_at_once(engine, requests)


def all_at_once(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> Iterator[Finished]:
    """The same of an engine that only answers when everything is finished."""
    yield list(enumerate(engine.generate(requests)))


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


def samplers_of(engines: Sequence[RolloutEngine | AnswersRequests]) -> list[Sampler]:
    """Return engines with awaitable requests."""
    return [
        RaySampler(engine) if isinstance(engine, RayEngine) else LocalSampler(engine)
        for engine in engines
    ]


class EnginePool:
    """Several engines answering as one: every request goes to exactly one of them."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self.engines = list(engines)

    def generate(
        self, requests: Sequence[GenerationRequest], on_group: OnGroup | None = None
    ) -> list[list[Completion]]:
        """Completions of all requests, in order; a terminal shows how many samples are done.

        `on_group` is called in this thread with each position and its completions as they come.
        """
        width = len(self.engines)
        answers: list[list[Completion]] = [[] for _ in requests]

        stream = all_at_once if on_group is None else stream_of

        def ask(k: int, arrivals: queue.SimpleQueue[Finished | None]) -> None:
            try:
                for finished in stream(self.engines[k], requests[k::width]):
                    arrivals.put([(k + width * at, answer) for at, answer in finished])
            finally:
                arrivals.put(None)

        pool = ThreadPoolExecutor(max_workers=width)
        try:
            arrivals: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
            pending = [pool.submit(ask, k, arrivals) for k in range(min(width, len(requests)))]
            num_samples = sum(r.sampling.num_samples for r in requests)
            for position, answer in self._arriving(arrivals, len(pending), num_samples):
                answers[position] = answer
                if on_group is not None:
                    on_group(position, answer)
        finally:
            pool.shutdown(wait=False)  # who leaves this call does not wait for the engines
        for future in pending:
            future.result()
        return answers

    def _arriving(
        self, arrivals: queue.SimpleQueue[Finished | None], num_open: int, num_samples: int
    ) -> Iterator[tuple[int, list[Completion]]]:
        """What comes from `num_open` engines until each has said None, with a bar."""
        has_bar = is_terminal()
        counting = [e for e in self.engines if isinstance(e, CountsSamples) and has_bar]
        start = sum(engine.num_samples_done() for engine in counting)
        shown_s = time.monotonic()
        with counter("generating") if has_bar else nullcontext() as show:
            while num_open:
                with suppress(queue.Empty):
                    arrival = arrivals.get(timeout=POLL_S)
                    num_open -= arrival is None
                    yield from arrival or ()
                if show is not None and time.monotonic() - shown_s >= POLL_S:
                    num_done = sum(e.num_samples_done() for e in counting) - start
                    show(min(num_done, num_samples), num_samples)
                    shown_s = time.monotonic()

    def samplers(self) -> list[Sampler]:
        """Return the engines with awaitable requests."""
        return samplers_of(self.engines)


class GroupGenerator:
    """The policy's own ranks as generators (no vLLM); requests are shared among them."""

    def __init__(self, group: WorkerGroup, method: Callable[..., Any]) -> None:
        self.group = group
        self.method = method

    def generate(
        self, requests: Sequence[GenerationRequest], on_group: OnGroup | None = None
    ) -> list[list[Completion]]:
        """Return the completions of all requests, in order; `on_group` sees them at the end."""
        width = self.group.num_shares
        # A rank answers nothing while it generates: the bar only shows that work is going on.
        # Several ranks may be several controllers on one terminal, which must not all draw.
        with progress("generating") if width == 1 else nullcontext():
            shares = [(requests[k::width],) for k in range(width)]
            parts = self.group.start(self.method, shares)()
        answers = interleave(parts, len(requests), width=width)
        if on_group is not None:
            for position, answer in enumerate(answers):
                on_group(position, answer)
        return answers


def interleave(
    parts: Sequence[Sequence[list[Completion]]], total: int, *, width: int
) -> list[list[Completion]]:
    """Undo `requests[k::width]`; parts at the end may be missing when they would be empty."""
    answers: list[list[Completion]] = [[] for _ in range(total)]
    for k, part in enumerate(parts):
        answers[k::width] = part
    return answers
