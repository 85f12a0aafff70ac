"""Rollout engines as Ray actors: an event loop around the thread that steps vLLM."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from openrlhf.engines.base import Completion, GenerationRequest, Result, WeightBucket
from openrlhf.engines.vllm_engine import ABORT_S, VLLMEngine
from openrlhf.trainer.ray.launcher import CALL_TIMEOUT_S, get, start_actor
from openrlhf.trainer.ray.utils import node_address, own_gpu
from openrlhf.utils.framework_logs import redirect_framework_logs
from openrlhf.utils.images import ImageProcessor
from openrlhf.utils.progress import Health

MAX_CONCURRENT_CALLS = 10_000  # requests that wait in an actor's event loop


class LLMRayActor(VLLMEngine):
    """A vLLM engine in a process of its own."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        processor: ImageProcessor | None,
        name: str,
        run_dir: str,
    ) -> None:
        self.settings, self.processor = settings, processor
        self.name, self.run_dir = name, run_dir

    def ready(self) -> str:
        """Start the engine; return the address of its node."""
        redirect_framework_logs(self.run_dir, self.name, capture_streams=True)
        index = own_gpu()
        settings = dict(self.settings, device_ids=[index] if index else None)
        super().__init__(settings, self.processor)
        return node_address()

    def health(self) -> Health:
        """Return the progress of the engine; a step is a forward pass."""
        work = "generating" if self.is_busy else None
        return Health(work, self.num_steps, None, os.getpid())

    def receive_bucket(self, bucket: WeightBucket) -> None:
        """Load the tensors of one bucket, which may lie in Ray's object store."""
        if "object" in bucket.handle:
            bucket = replace(bucket, handle={"bytes": ray.get(bucket.handle["object"])})
        super().receive_bucket(bucket)

    async def run(self, method: str, *args: object) -> Any:
        """Run a method of this class in a thread, while the event loop takes requests."""
        return await asyncio.to_thread(getattr(self, method), *args)


@dataclass(eq=False)
class RayEngine:
    """An engine actor seen as an engine; can be sent to other workers."""

    handle: Any
    name: str
    log: str = ""  # begins the names of its logs
    node: str = ""  # address of the engine's node; empty until it is up

    @property
    def who(self) -> str:
        """Return the engine in the words of an error."""
        return f"{self.name} on node {self.node}" if self.node else self.name

    def call(self, method: Callable[..., Result], *args: object) -> Result:
        reference = self.handle.run.remote(method.__name__, *args)
        return get(reference, self.who, CALL_TIMEOUT_S, log=self.log)  # type: ignore[no-any-return]

    def ready(self) -> None:
        """Wait until the engine is up."""
        self.node = self.call(LLMRayActor.ready)

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        reference = self.handle.sample.remote(request)
        answer = asyncio.wrap_future(reference.future())
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            ray.cancel(reference)
            await asyncio.wait([answer], timeout=ABORT_S)
            if answer.done() and not answer.cancelled():
                answer.exception()  # nobody waits for it, and asyncio would print it
            raise
        if answer.exception() is None:
            return answer.result()
        return get(reference, self.who, 0.0, log=self.log)  # type: ignore[no-any-return]  # raises


def create_vllm_engines(
    settings: Mapping[str, Any],
    slots: Sequence[dict[str, Any]],
    processor: ImageProcessor | None = None,
    *,
    run_dir: str,
) -> list[RayEngine]:
    """Start one engine actor a slot; `ready` waits until it is up.

    Engine k draws its random numbers from the seed of the settings plus k.
    """
    return [
        RayEngine(
            start_actor(
                LLMRayActor,
                (
                    dict(settings, seed=settings["seed"] + index),
                    processor,
                    f"vllm-{index}",
                    run_dir,
                ),
                slot | {"max_concurrency": MAX_CONCURRENT_CALLS},
            ),
            f"vllm-{index}",
            f"{run_dir}/logs/vllm-{index}",
        )
        for index, slot in enumerate(slots)
    ]
