"""vLLM's LLMEngine as a stepper: requests, weights and sleep between two forward passes.

All calls come from the one thread of the step loop.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from openrlhf.engines.base import (
    Completion,
    GenerationRequest,
    OnTokens,
    WatchedRequest,
    WeightBucket,
)
from openrlhf.engines.vllm_args import cpu_cache_bytes, engine_args
from openrlhf.errors import ConfigError, EngineError, WeightSyncError
from openrlhf.utils.logging import warn_once

if TYPE_CHECKING:
    from openrlhf.engines.vllm_engine import VLLMEngineConfig


class VLLMStepper:
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
        is_cpu = vllm_config.device_config.device_type == "cpu"
        if is_cpu and config.kv_cache_memory_bytes is None:
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
        self.watchers: dict[str, OnTokens] = {}
        self.num_samples_done = 0
        self.has_full_logprobs = all(self.engine.collective_rpc("report_full_logprobs"))

    def add(self, key: str, asked: GenerationRequest | WatchedRequest) -> None:
        """Hand a request to vLLM."""
        request = asked.request if isinstance(asked, WatchedRequest) else asked
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
        if params.n < request.sampling.num_samples:
            self.num_greedy_copies[key] = request.sampling.num_samples
        if isinstance(asked, WatchedRequest):
            params.output_kind = self.vllm.sampling_params.RequestOutputKind.CUMULATIVE
            self.watchers[key] = asked.on_tokens
        self.engine.add_request(key, prompt, params)

    def step(self) -> list[tuple[str, list[Completion]]]:
        """One forward pass."""
        with torch.compiler.set_stance(self.stance):
            outputs = self.engine.step()
        for output in outputs if self.watchers else ():
            self._tell(output)
        return [(out.request_id, self._completions(out)) for out in outputs if out.finished]

    def _tell(self, output: Any) -> None:
        """Show a watcher what there is of its sample; all of it is the answer."""
        if output.finished:
            self.watchers.pop(output.request_id, None)
        elif output.request_id in self.watchers:
            grown = output.outputs[0]
            self.watchers[output.request_id](grown.token_ids, grown.logprobs.logprobs)

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
        unwanted = list(keys)
        self.engine.abort_request(unwanted)
        for key in unwanted:
            self.num_greedy_copies.pop(key, None)
            self.watchers.pop(key, None)

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

    def sleep(self) -> None:
        """Free device memory. The weights are dropped, not copied: they are sent again anyway.

        On a CPU vLLM only notes that it sleeps.
        """
        self.engine.sleep(level=2)

    def wake_up(self, tags: list[str] | None) -> None:
        """Take device memory again, all or a part."""
        self.engine.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether any device memory is away."""
        return self.engine.is_sleeping()

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
        torch.cuda.empty_cache()

    def _sampling_params(self, request: GenerationRequest) -> Any:
        sampling = request.sampling
        is_greedy = sampling.temperature == 0  # vLLM refuses several: they are all the same
        return self.vllm.SamplingParams(
            n=1 if is_greedy else sampling.num_samples,
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
