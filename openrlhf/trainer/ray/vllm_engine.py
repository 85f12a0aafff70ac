"""Rollout engines as Ray actors, and the pool that shares requests among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

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
from openrlhf.utils.logging import redirect_framework_logs

MAX_CONCURRENT_CALLS = 64


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


class EnginePool:
    """Several engines answering as one: every request goes to exactly one of them."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self.engines = list(engines)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Completions of all requests, in order."""
        width = len(self.engines)
        with ThreadPoolExecutor(max_workers=width) as pool:
            parts = list(
                pool.map(
                    lambda k: (
                        self.engines[k].generate(requests[k::width]) if requests[k::width] else []
                    ),
                    range(width),
                )
            )
        return interleave(parts, len(requests))

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
        parts = self.group.start(self.method, [(requests[k::width],) for k in range(width)])()
        return interleave(parts, len(requests))


def interleave(parts: Sequence[Sequence[list[Completion]]], total: int) -> list[list[Completion]]:
    """Undo `requests[k::width]`."""
    answers: list[list[Completion]] = [[] for _ in range(total)]
    for k, part in enumerate(parts):
        answers[k :: len(parts)] = part
    return answers
