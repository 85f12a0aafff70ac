"""vLLM as a rollout engine in this process, stepped by one thread that takes requests as it runs.

Between two steps the same thread pauses, replaces weights, resets the prefix cache, sleeps and
wakes up. A tensor parallel engine starts vLLM's own worker processes. vLLM is imported when an
engine is made, for that takes seconds and its environment has to be set before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf.engines.base import (
    SHM_BACKEND,
    Completion,
    GenerationRequest,
    OnTokens,
    SyncReceipt,
    WatchedRequest,
    WeightBucket,
    refuse_running,
)
from openrlhf.engines.host_memory import share_one_heap
from openrlhf.engines.step_loop import StepLoop
from openrlhf.engines.vllm_stepper import VLLMStepper
from openrlhf.errors import EngineError, WeightSyncError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer may need the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class VLLMEngineConfig:
    """What an engine is started with; None leaves the choice to vLLM."""

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True  # samples of a prompt share its computation
    enforce_eager: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    seed: int = 0
    trust_remote_code: bool = False
    enable_sleep: bool = False
    weight_transfer_backend: str = SHM_BACKEND  # or "openrlhf_nccl", "openrlhf_ipc" between GPUs
    num_threads: int | None = None  # of this process, on a CPU
    # Of a tensor parallel engine: "ray" (GPUs only), or vLLM's own processes.
    distributed_executor_backend: str = "mp"
    device_index: int = 0  # of the engine's GPU among those that the process sees
    block_size: int | None = None  # tokens of a cache block: prompts are shared in such pieces


class VLLMEngine:
    """A RolloutEngine; all calls may come from any thread."""

    who = "the vLLM engine"

    def __init__(self, config: VLLMEngineConfig) -> None:
        self.config = config
        self.weight_version = 0
        self._is_current = True  # False from the begin to the end of a weight update
        self._update_failed = False
        set_environment(config)
        if not torch.cuda.is_available():
            share_one_heap()  # before the engine has threads
        import vllm  # noqa: F401, PLC0415 - takes seconds, and reads the environment just set

        self._loop = StepLoop(lambda: VLLMStepper(config), "vLLM engine")
        self._stepper: VLLMStepper = self._loop.stepper

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Sample for all requests with continuous batching; answers in the order of the requests.

        Waits while weights are replaced. Log-probs are those before top-p. Raises EngineError when
        the engine is down, a prompt does not fit, or this vLLM cannot report them with top_p < 1.
        """
        return [future.result() for future in self.submit(requests)]

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        """The same without waiting: a future for each request."""
        return self._submit(requests)

    def submit_watched(
        self, request: GenerationRequest, on_tokens: OnTokens
    ) -> Future[list[Completion]]:
        """The same for one sample whose tokens are told while it grows; `on_tokens` is called in
        the engine's thread, and must be quick and raise nothing.
        """
        assert request.sampling.num_samples == 1, "one sample is watched, not several"
        (future,) = self._submit([WatchedRequest(request, on_tokens)])
        return future

    def _submit(
        self, requests: Sequence[GenerationRequest | WatchedRequest]
    ) -> list[Future[list[Completion]]]:
        if self._update_failed:
            raise EngineError(
                "the engine holds half of a failed weight update; send the weights again"
            )
        return self._loop.submit(requests)

    def abort(self, futures: Iterable[Future[list[Completion]]]) -> None:
        """Stop sampling for these; their futures are cancelled."""
        self._loop.abort(futures)

    def num_samples_done(self) -> int:
        """Samples finished since the engine started."""
        return self._stepper.num_samples_done

    @property
    def weight_transfer_backend(self) -> str:
        """Which buckets this engine reads."""
        return self.config.weight_transfer_backend

    def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """Meet the trainer; with NCCL this waits until all of the group are there."""
        self._loop.call(lambda: self._stepper.init_weight_transfer(init_info))

    def begin_weight_update(self, *, keep_running: bool = False) -> None:
        """See RolloutEngine. Requests in flight keep their tokens, and their keys and values are
        computed again under the new weights, so that later log-probs are those of the new policy.

        That is vLLM's `pause_generation(mode="keep")` with its caches cleared, and what AReaL does
        (arXiv 2505.24298); PipelineRL (2509.19128) keeps the old cache and saves the forward.
        """

        def begin() -> None:
            if self._is_current and not keep_running:
                refuse_running(self._loop.num_waiting)
            self._loop.pause()
            self._is_current = False
            self._guarded(self._stepper.begin)

        self._loop.call(begin)

    def receive_bucket(self, bucket: WeightBucket) -> None:
        """Load the tensors of one bucket; raises WeightSyncError for an unknown tensor."""
        self._loop.call(lambda: self._guarded(lambda: self._stepper.load(bucket)))

    def finish_weight_update(self, weight_version: int) -> SyncReceipt:
        """Make the new weights live, drop every cached prefix, and say what is held now.

        Raises WeightSyncError when a parameter is missing.
        """

        def finish() -> SyncReceipt:
            fingerprints = self._stepper.finish(weight_version)
            self.weight_version = weight_version
            self._is_current, self._update_failed = True, False
            self._resume_if_ready()
            return SyncReceipt(weight_version, fingerprints, is_cache_reset=True)

        return self._loop.call(lambda: self._guarded(finish))

    def sleep(self) -> None:
        """Give device memory back (weights and cache). Nothing is sampled until weights have been
        sent again and all memory is there.

        Raises EngineError while requests are in flight.
        """

        def sleep() -> None:
            if self._stepper.has_work():
                raise EngineError("the engine cannot sleep while requests are in flight")
            self._loop.pause()
            self._stepper.sleep()
            self._is_current = False

        self._loop.call(sleep)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take device memory again; tags "weights" or "kv_cache" for a part of it."""
        wanted = None if tags is None else list(tags)

        def wake_up() -> None:
            self._stepper.wake_up(wanted)
            self._resume_if_ready()

        self._loop.call(wake_up)

    def shutdown(self) -> None:
        """Free everything; waiting and later calls raise EngineError."""
        self._loop.close()
        self._stepper.shutdown()

    def _resume_if_ready(self) -> None:
        if self._is_current and not self._stepper.is_sleeping:
            self._loop.resume()

    def _guarded(self, command: Any) -> Any:
        """Run a part of an update; when it fails nothing is served until a whole one has come."""
        if self._is_current:
            raise WeightSyncError("begin_weight_update was not called")
        try:
            return command()
        except BaseException as error:
            self._update_failed = True
            self._loop.fail_waiting(f"a weight update failed: {error}")
            raise


def set_environment(config: VLLMEngineConfig) -> None:
    """Environment variables that vLLM reads when it is imported; those already set are kept."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if config.num_threads is not None and not torch.cuda.is_available():
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
        torch.set_num_threads(config.num_threads)
