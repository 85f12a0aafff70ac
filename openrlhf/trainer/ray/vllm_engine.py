"""Rollout engines as Ray actors, and the pool that shares requests among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from openrlhf.engines.base import (
    SHM_BACKEND,
    Completion,
    GenerationRequest,
    RolloutEngine,
    SyncReceipt,
    WeightBucket,
)
from openrlhf.engines.vllm_engine import VLLMEngine, VLLMEngineConfig
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.launcher import CALL_TIMEOUT_S, get, start_actor
from openrlhf.trainer.ray.placement import Slot
from openrlhf.utils.logging import counter, is_terminal, progress, redirect_framework_logs

MAX_CONCURRENT_CALLS = 64
POLL_S = 0.5  # between two looks at how far the engines are


class LLMRayActor(VLLMEngine):
    """A vLLM engine in a process of its own."""

    def __init__(self, config: VLLMEngineConfig, name: str, run_dir: str) -> None:
        redirect_framework_logs(run_dir, name, capture_streams=True)
        super().__init__(config)

    def ready(self) -> bool:
        """Answer once the engine is up."""
        return True


@dataclass(frozen=True)
class RayEngine:
    """An engine actor seen as an engine; can be sent to other workers."""

    handle: Any
    name: str
    weight_transfer_backend: str = SHM_BACKEND
    timeout_s: float = CALL_TIMEOUT_S

    def _call(self, method: Callable[..., Any], *args: object) -> Any:
        reference = getattr(self.handle, method.__name__).remote(*args)
        return get(reference, self.name, self.timeout_s)

    def ready(self) -> None:
        """Wait until the engine is up."""
        self._call(LLMRayActor.ready)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """See RolloutEngine."""
        return self._call(LLMRayActor.generate, requests)  # type: ignore[no-any-return]

    def num_samples_done(self) -> int:
        """Samples the engine has finished since it started."""
        return self._call(LLMRayActor.num_samples_done)  # type: ignore[no-any-return]

    def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """See RolloutEngine."""
        self._call(LLMRayActor.init_weight_transfer, init_info)

    def begin_weight_update(self) -> None:
        """See RolloutEngine."""
        self._call(LLMRayActor.begin_weight_update)

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
    config: VLLMEngineConfig, slots: Sequence[Slot], *, run_dir: str, num_threads: int
) -> list[RayEngine]:
    """Start one engine actor a slot; `ready` waits until it is up."""
    names = [f"vllm-{index}" for index in range(len(slots))]
    return [
        RayEngine(
            start_actor(
                LLMRayActor,
                (config, name, run_dir),
                slot,
                num_threads=num_threads,
                max_concurrency=MAX_CONCURRENT_CALLS,
            ),
            name,
            config.weight_transfer_backend,
        )
        for name, slot in zip(names, slots, strict=True)
    ]


@runtime_checkable
class CountsSamples(Protocol):
    """An engine that can be asked how far it is while it generates."""

    def num_samples_done(self) -> int:
        """Samples finished since the start."""


class EnginePool:
    """Several engines answering as one: every request goes to exactly one of them."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self.engines = list(engines)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Completions of all requests, in order; a terminal shows how many samples are done."""
        width = len(self.engines)
        with ThreadPoolExecutor(max_workers=width) as pool:
            pending = [
                pool.submit(engine.generate, requests[k::width])
                for k, engine in enumerate(self.engines[: len(requests)])
            ]
            if is_terminal():
                self._show_progress(pending, sum(r.sampling.num_samples for r in requests))
            parts = [future.result() for future in pending]
        return interleave(parts, len(requests), width=width)

    def _show_progress(self, pending: Sequence[Future[Any]], num_samples: int) -> None:
        counting = [engine for engine in self.engines if isinstance(engine, CountsSamples)]
        start = sum(engine.num_samples_done() for engine in counting)
        with counter("generating") as show:
            while wait(pending, timeout=POLL_S).not_done:
                num_done = sum(engine.num_samples_done() for engine in counting) - start
                show(min(num_done, num_samples), num_samples)

    def each(self, call: Callable[[RolloutEngine], None]) -> None:
        """Make the same call on every engine."""
        for engine in self.engines:
            call(engine)


class GroupGenerator:
    """The policy's own ranks as generators (no vLLM); requests are shared among them."""

    def __init__(self, group: WorkerGroup, method: Callable[..., Any]) -> None:
        self.group = group
        self.method = method

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Completions of all requests, in order."""
        width = self.group.num_ranks
        # A rank answers nothing while it generates: the bar only shows that work is going on.
        # Several ranks may be several controllers on one terminal, which must not all draw.
        with progress("generating") if width == 1 else nullcontext():
            parts = self.group.start(self.method, [(requests[k::width],) for k in range(width)])()
        return interleave(parts, len(requests), width=width)


def interleave(
    parts: Sequence[Sequence[list[Completion]]], total: int, *, width: int
) -> list[list[Completion]]:
    """Undo `requests[k::width]`; parts at the end may be missing when they would be empty."""
    answers: list[list[Completion]] = [[] for _ in range(total)]
    for k, part in enumerate(parts):
        answers[k::width] = part
    return answers
