"""vLLM as a rollout engine in this process, stepped by one thread that takes requests as it runs.

Between two steps the same thread pauses, replaces weights, resets the prefix cache, sleeps and
wakes up. A tensor parallel engine starts vLLM's own worker processes. vLLM is imported when an
engine is made, for that takes seconds and its environment has to be set before.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch

from openrlhf.engines.base import (
    SHM_BACKEND,
    Completion,
    GenerationRequest,
    SyncReceipt,
    WeightBucket,
)
from openrlhf.engines.host_memory import share_one_heap
from openrlhf.engines.step_loop import StepLoop
from openrlhf.errors import ConfigError, EngineError, WeightSyncError
from openrlhf.utils.logging import warn_once

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer may need the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU_CACHE_FRACTION = 0.2  # of the free memory, at most
CPU_BLOCK_SIZE = 32  # vLLM takes 128, more than many a prompt has


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
    distributed_executor_backend: str | None = None  # of a tensor parallel engine: "mp" or "ray"
    block_size: int | None = None  # tokens of a cache block: prompts are shared in such pieces


class VLLMEngine:
    """A RolloutEngine; all calls may come from any thread."""

    def __init__(self, config: VLLMEngineConfig) -> None:
        self.config = config
        self.weight_version = 0
        self._is_current = True  # False from the begin to the end of a weight update
        self._update_failed = False
        set_environment(config)
        if not torch.cuda.is_available():
            share_one_heap()  # before the engine has threads
        import vllm  # noqa: F401, PLC0415 - takes seconds, and reads the environment just set

        self._loop = StepLoop(lambda: _VLLMStepper(config), "vLLM engine")
        self._stepper: _VLLMStepper = self._loop.stepper

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Sample for all requests with continuous batching; answers in the order of the requests.

        Waits while weights are replaced. Log-probs are those before top-p. Raises EngineError when
        the engine is down, a prompt does not fit, or this vLLM cannot report them with top_p < 1.
        """
        return [future.result() for future in self.submit(requests)]

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        """The same without waiting: a future for each request."""
        if self._update_failed:
            raise EngineError(
                "the engine holds half of a failed weight update; send the weights again"
            )
        return self._loop.submit(requests)

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

    def begin_weight_update(self) -> None:
        """Stop serving tokens and get ready to receive; requests in flight go on afterwards."""

        def begin() -> None:
            self._loop.pause()
            self._is_current = False
            self._guarded(self._stepper.begin)

        self._loop.call(begin)

    def receive_bucket(self, bucket: WeightBucket) -> None:
        """Load the tensors of one bucket; raises WeightSyncError for an unknown tensor."""
        self._loop.call(lambda: self._guarded(lambda: self._stepper.load(bucket)))

    def finish_weight_update(self, weight_version: int) -> SyncReceipt:
        """Make the new weights live, drop every cached prefix, and say what is held now.

        Requests in flight are computed again under the new weights before they go on.
        Raises WeightSyncError when a parameter is missing.
        """

        def finish() -> SyncReceipt:
            fingerprints = self._stepper.finish(weight_version)
            self.weight_version = weight_version
            self._is_current, self._update_failed = True, False
            self._loop.resume()
            return SyncReceipt(weight_version, fingerprints, is_cache_reset=True)

        return self._loop.call(lambda: self._guarded(finish))

    def sleep(self) -> None:
        """Give device memory back (weights and cache); a no-op on CPU.

        Raises EngineError while requests are in flight.
        """

        def sleep() -> None:
            if self._stepper.has_work():
                raise EngineError("the engine cannot sleep while requests are in flight")
            if self._stepper.sleep():
                self._loop.pause()

        self._loop.call(sleep)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take device memory again; tags "weights" or "kv_cache" for a part of it."""
        wanted = None if tags is None else list(tags)

        def wake_up() -> None:
            if self._stepper.wake_up(wanted) and self._is_current:
                self._loop.resume()

        self._loop.call(wake_up)

    def shutdown(self) -> None:
        """Free everything; waiting and later calls raise EngineError."""
        self._loop.close()
        self._stepper.shutdown()

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


class _VLLMStepper:
    """vLLM's LLMEngine behind the calls of the step loop."""

    def __init__(self, config: VLLMEngineConfig) -> None:
        import vllm  # noqa: PLC0415 - takes seconds
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415 - as above

        from openrlhf.engines import vllm_held, vllm_plugin  # noqa: PLC0415 - import vLLM

        vllm_plugin.register()
        self.vllm, self.check_held = vllm, vllm_held.check_held
        set_num_threads = torch.set_num_threads
        try:
            args = engine_args(config, vllm_plugin.RECEIPT_EXTENSION)
            vllm_config = args.create_engine_config()
        except ValueError as error:
            raise ConfigError(f"vLLM refuses {config}: {error}") from error
        self.is_cpu = vllm_config.device_config.device_type == "cpu"
        if self.is_cpu and config.kv_cache_memory_bytes is None:
            vllm_config.cache_config.kv_cache_memory_bytes = cpu_cache_bytes(vllm_config)
        self.engine: Any = LLMEngine.from_vllm_config(vllm_config, disable_log_stats=True)
        # vLLM disables this function for the whole process; the trainer may share it.
        torch.set_num_threads = set_num_threads
        # Small functions of vLLM's sampler are compiled even in eager mode: up to 16 s for nothing.
        self.stance = "force_eager" if vllm_config.model_config.enforce_eager else "default"
        self.max_model_len = vllm_config.model_config.max_model_len
        self.engine.set_weight_version("0")
        self.backend = config.weight_transfer_backend
        self.num_greedy_copies: dict[str, int] = {}  # request -> samples asked for
        self.num_samples_done = 0
        self.has_full_logprobs = all(self.engine.collective_rpc("report_full_logprobs"))

    def add(self, key: str, request: GenerationRequest) -> None:
        """Hand a request to vLLM."""
        num_tokens = len(request.prompt_token_ids)
        if not 0 < num_tokens < self.max_model_len:
            raise EngineError(
                f"prompt {request.request_id} has {num_tokens} tokens, the engine takes 1 to "
                f"{self.max_model_len - 1} (max_model_len {self.max_model_len})"
            )
        if request.sampling.top_p < 1 and not self.has_full_logprobs:
            raise EngineError(
                f"--top_p is {request.sampling.top_p}, and vLLM {self.vllm.__version__} can only "
                "report log-probs of what top-p leaves. Use --top_p 1 or another version of vLLM."
            )
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_token_ids)}
        params = self._sampling_params(request)
        if params.temperature == 0 and params.n > 1:  # vLLM refuses it: they are all the same
            self.num_greedy_copies[key], params.n = params.n, 1
        self.engine.add_request(key, prompt, params)

    def step(self) -> list[tuple[str, list[Completion]]]:
        """One forward pass."""
        with torch.compiler.set_stance(self.stance):
            finished = [output for output in self.engine.step() if output.finished]
        return [(out.request_id, self._completions(out)) for out in finished]

    def _completions(self, output: Any) -> list[Completion]:
        num_copies = self.num_greedy_copies.pop(output.request_id, 1)
        completions = [completion(c) for c in output.outputs] * num_copies
        self.num_samples_done += len(completions)
        return completions

    def has_work(self) -> bool:
        """Whether requests are in flight."""
        return self.engine.has_unfinished_requests()

    def abort(self, keys: Iterable[str]) -> None:
        """Drop requests."""
        self.engine.abort_request(list(keys))

    def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """Tell every worker how to meet the trainer."""
        self.engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def begin(self) -> None:
        """Start an update in every worker, also over an update that failed."""
        self.engine.collective_rpc("abandon_weight_update")
        self.engine.collective_rpc("start_weight_update")

    def load(self, bucket: WeightBucket) -> None:
        """Give one bucket to every worker."""
        if "update_info" in bucket.handle:
            info = bucket.handle["update_info"]
        else:
            info = {name: getattr(bucket, name) for name in bucket.__dataclass_fields__}
        self.engine.collective_rpc("update_weights", kwargs={"update_info": info})

    def finish(self, weight_version: int) -> dict[str, int]:
        """End the update and drop the prefix cache; answers what every worker received."""
        self.engine.collective_rpc("finish_weight_update")
        if not self.check_held(self.engine.collective_rpc("held_bits")):
            warn_once("what the engine holds after a sync cannot be compared for this model")
        if not self.engine.reset_prefix_cache(reset_running_requests=True):
            raise WeightSyncError("the engine could not drop its prefix cache")
        self.engine.set_weight_version(str(weight_version))
        first, *others = self.engine.collective_rpc("weight_fingerprints")
        if any(other != first for other in others):
            raise WeightSyncError(
                "the workers of a tensor parallel engine received different tensors"
            )
        return first

    def sleep(self) -> bool:
        """Free device memory, the weights kept in main memory; answers whether it sleeps now."""
        if not self.is_cpu:
            self.engine.sleep(level=1)
        return not self.is_cpu

    def wake_up(self, tags: list[str] | None) -> bool:
        """Take device memory again; answers whether all of it is there."""
        return self.is_cpu or self.engine.wake_up(tags)

    def shutdown(self) -> None:
        """End the workers.

        vLLM's own way would also destroy torch.distributed in this process, which a trainer and
        other engines may share.
        """
        if self.engine is None:
            return
        client = self.engine.engine_core
        client._finalizer.detach()
        client.engine_core.model_executor.shutdown()
        client.engine_core.scheduler.shutdown()
        self.engine = client = None
        gc.unfreeze()
        gc.collect()
        if not self.is_cpu:
            torch.cuda.empty_cache()

    def _sampling_params(self, request: GenerationRequest) -> Any:
        sampling = request.sampling
        return self.vllm.SamplingParams(
            n=sampling.num_samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # exactly the given ids stop
            seed=sampling.seed,
            logprobs=0,  # of the sampled token
            flat_logprobs=True,
            detokenize=False,
            skip_clone=True,
            output_kind=self.vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )


def set_environment(config: VLLMEngineConfig) -> None:
    """Environment variables that vLLM reads when it is imported; those already set are kept."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if config.num_threads is not None and not torch.cuda.is_available():
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
        torch.set_num_threads(config.num_threads)


def engine_args(config: VLLMEngineConfig, worker_extension: str) -> Any:
    """The settings in vLLM's words."""
    from vllm.config import WeightTransferConfig  # noqa: PLC0415 - takes seconds
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - takes seconds

    has_gpus = torch.cuda.is_available()
    own = asdict(config)
    own.pop("num_threads")
    backend = own.pop("weight_transfer_backend")
    own["enable_sleep_mode"] = own.pop("enable_sleep") and has_gpus
    own["enforce_eager"] = config.enforce_eager or not has_gpus
    own["block_size"] = config.block_size or (None if has_gpus else CPU_BLOCK_SIZE)
    # A piece of a prompt makes vLLM turn its request's generator back, which torch has for GPUs
    # only: with seeds the engine would die.
    own["enable_chunked_prefill"] = None if has_gpus else False
    executor = config.distributed_executor_backend or "mp"
    own["distributed_executor_backend"] = "uni" if config.tensor_parallel_size == 1 else executor
    return EngineArgs(
        **own,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        worker_extension_cls=worker_extension,
        weight_transfer_config=WeightTransferConfig(backend=backend),
        disable_log_stats=True,
    )


def cpu_cache_bytes(vllm_config: Any) -> int:
    """Room for `max_num_seqs` sequences of full length, at most a part of the free memory."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    values_per_token = (
        2
        * model.get_num_layers(parallel)
        * model.get_num_kv_heads(parallel)
        * model.get_head_size()
    )
    num_blocks = (
        -(-model.max_model_len // cache.block_size) * vllm_config.scheduler_config.max_num_seqs
    )
    needed = num_blocks * cache.block_size * values_per_token * model.dtype.itemsize
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(needed, CPU_CACHE_FRACTION * free))


def completion(output: Any) -> Completion:
    """vLLM's answer in our words; raises EngineError when a log-prob is missing."""
    token_ids, logprobs = tuple(output.token_ids), tuple(output.logprobs.logprobs)
    if len(token_ids) != len(logprobs):
        raise EngineError(f"vLLM answered {len(token_ids)} tokens but {len(logprobs)} log-probs")
    spans = output.weight_versions or []
    starts = tuple((span.start, int(span.version)) for span in spans)
    return Completion(
        token_ids,
        logprobs,
        output.finish_reason,
        weight_version=starts[-1][1] if starts else 0,
        version_starts=starts if len(starts) > 1 else (),
    )
