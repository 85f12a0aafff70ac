"""vLLM as a rollout engine in this process, stepped by one thread that takes requests as it runs.

Between two steps the same thread pauses, replaces weights, resets the prefix cache, sleeps and
wakes up. A tensor parallel engine starts vLLM's own worker processes. vLLM is imported when an
engine is made, for that takes seconds and its environment has to be set before.
"""

import asyncio
import gc
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from openrlhf.engines import vllm_cpu
from openrlhf.engines.base import (
    Beginning,
    Completion,
    GenerationRequest,
    SamplingSettings,
    WeightBucket,
)
from openrlhf.errors import (
    ConfigError,
    EngineError,
    LostEngineError,
    LostRankError,
    MachineError,
    OpenRLHFError,
    WeightSyncError,
    first_line,
)
from openrlhf.utils.images import ImageProcessor
from openrlhf.utils.threads import errors_to, release_cores

Result = TypeVar("Result")

NUM_SEEDS = 2**32  # vLLM gives an engine's to numpy, which takes no others
ABORT_S = 10.0  # until a request that does not stop is left behind
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer may need the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def check_vllm_is_installed(*, instead: str) -> None:
    """Raise ConfigError where vLLM is not; `instead` is what to type to do without it."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is to generate, and it is not installed. Type pip install '.[vllm]' in the "
            f"checkout (make install on a machine without GPUs), or {instead}."
        )


class VLLMEngine:
    """A RolloutEngine; all calls may come from any thread.

    Its thread works off a queue: each item is a command or one step of vLLM, and a step queues the
    next one after what came in meanwhile. An error of a step, or of the device or a worker in a
    command, ends the engine: every waiting and later call raises LostEngineError. Any other error
    of a command belongs to its caller alone; one for want of memory, a MachineError, ends the
    engine too.
    """

    who = "the vLLM engine"
    # Errors of the device or a worker; vLLM asserts where workers of several have died before.
    ends_with: tuple[type[Exception], ...] = (RuntimeError, AssertionError)
    waits_for: LostRankError | None = None  # an engine of this process ends with the trainer

    def __init__(
        self, settings: Mapping[str, Any], processor: ImageProcessor | None = None
    ) -> None:
        """`settings` are those of vLLM's EngineArgs; a model that sees images has a processor."""
        self.processor = processor
        self.num_steps = 0  # done since the start
        # For requests with pixels, by their samples
        self._rooms: dict[int, asyncio.Semaphore] = {}
        self._waiting: dict[str, tuple[GenerationRequest, Future[list[Completion]]]] = {}
        self._num_requests = 0
        self._is_stepping = False  # a step is in the queue
        self._is_current = True  # False from the begin to the end of a weight update
        self._end: BaseException | None = None  # why nothing is sampled any more
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm  # noqa: PLC0415 - takes seconds, and reads the environment just set

        self._vllm = vllm
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.who)
        # In the thread that will step it, so that no other one computes.
        if processor is not None:
            settings = with_images(settings, processor)
        self.llm: Any = self._thread.submit(start_llm, settings).result()
        # Small functions of vLLM's sampler are compiled even in eager mode: up to 16 s for nothing.
        is_eager = self.llm.model_config.enforce_eager
        self._stance = "force_eager" if is_eager else "default"

    @property
    def is_up(self) -> bool:
        """Return True; raise EngineError once the engine has ended."""
        self._check_is_up()
        return True

    def call(self, method: Callable[..., Result], *args: object) -> Result:
        """Run a method of this class."""
        return method(self, *args)

    def lose(self, why: LostEngineError) -> None:
        """Raise the error: it ends with this process."""
        raise why

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Sample for all requests with continuous batching; return results in their order.

        Waits while weights are replaced. Log-probs are those before top-p. Raises EngineError when
        the engine is down or a prompt does not fit.
        """
        return [future.result() for future in self.submit(requests)]

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        prompts: Sequence[dict[str, Any]] | None = None,
    ) -> list[Future[list[Completion]]]:
        """Return a future for each request, without waiting; `prompts` are their inputs, if they
        were made.
        """
        futures: list[Future[list[Completion]]] = [Future() for _ in requests]
        prompts = prompts or [engine_input(request, self.processor) for request in requests]
        self._thread.submit(self._add, requests, prompts, futures)
        return futures

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        """Return the completions of a request, for an event loop; raises as `generate` does.

        Cancelling it stops the sampling, and ends when that has stopped.
        """
        if not request.images:
            return await self._sample(request)
        # Pixels take time, for which neither loop nor engine should wait, and memory until the end:
        # those of the requests that are sampled now, and of as many more.
        num_samples = request.sampling.num_samples
        if num_samples not in self._rooms:
            num_running = self.llm.vllm_config.scheduler_config.max_num_seqs
            num_requests = max(num_running // num_samples, 1)
            self._rooms[num_samples] = asyncio.Semaphore(2 * num_requests)
        async with self._rooms[num_samples]:
            prompt = await asyncio.to_thread(engine_input, request, self.processor)
            return await self._sample(request, [prompt])

    async def _sample(
        self, request: GenerationRequest, *prompts: list[dict[str, Any]]
    ) -> list[Completion]:
        (pending,) = self.submit([request], *prompts)
        try:
            return await asyncio.wrap_future(pending)
        except asyncio.CancelledError:
            stopped = asyncio.wrap_future(self.abort([pending]))
            await asyncio.wait([stopped], timeout=ABORT_S)
            raise

    def abort(self, futures: Iterable[Future[list[Completion]]]) -> Future[None]:
        """Cancel these futures; return one that is done when vLLM has stopped sampling for them."""
        for future in futures:
            future.cancel()
        return self._queue(self._drop_done)

    def new_beginnings(self, num_known: dict[tuple[str, int], int]) -> Iterator[Beginning]:
        """Yield the tokens of unfinished requests beyond the number of each sample that is known,
        which is brought up to date. For the thread that steps.
        """
        known = dict(num_known)
        num_known.clear()
        for key, output in unfinished_outputs(self.llm):
            ids, name = output.token_ids, (key, output.index)
            start, num_known[name] = known.get(name, 0), len(ids)
            if start < len(ids):
                request, _ = self._waiting[key]
                yield Beginning(
                    request.tag,
                    output.index,
                    start,
                    array("i", ids[start:]),
                    array("f", output.logprobs.logprobs[start:]),
                    version_starts_of(output),
                    output.finish_reason or "",
                )

    @property
    def is_busy(self) -> bool:
        """Return True while requests are sampled: they wait while weights or memory are away."""
        return bool(self._waiting) and self._is_current and not self.llm.is_sleeping()

    def memory_locations(self) -> list[str]:
        """Return the nodes and GPUs whose memory the workers can open."""

        def locations() -> list[str]:
            return [place for places in self._rpc("memory_locations") for place in places]

        return self._call(locations)

    def init_weight_transfer(self, init_info: dict[str, object]) -> None:
        """Join the trainer's group; wait until all are there."""

        def join() -> None:
            self._rpc("init_weight_transfer_engine", init_info=init_info)
            self._check_transfer()

        self._call(join)

    def begin_weight_update(self, keep_running: bool) -> None:
        """Pause, and get ready for buckets. Requests that run are refused with a WeightSyncError:
        no sample is of two policies by accident. With `keep_running` they keep their tokens, and
        their keys and values are computed again under the new weights, so that later log-probs are
        those of the new policy.

        That is vLLM's `pause_generation(mode="keep")` with its caches cleared, and what AReaL does
        (arXiv 2505.24298); PipelineRL (2509.19128) keeps the old cache and saves the forward.
        """

        def begin() -> None:
            if self._is_current and self._waiting and not keep_running:
                raise WeightSyncError(
                    f"{len(self._waiting)} requests are running, and new weights would come in "
                    "the middle of them"
                )
            if not self._is_current:
                self._rpc("break_off_weight_update")
            self._is_current = False
            self._rpc("start_weight_update")

        self._call(begin)

    def receive_bucket(self, bucket: WeightBucket) -> None:
        """Load the tensors of one bucket; raises WeightSyncError for an unknown tensor."""

        def receive() -> None:
            self._rpc("update_weights", update_info={"bucket": bucket})
            self._check_transfer()

        self._update(receive)

    def finish_weight_update(self, weight_version: int) -> dict[str, int]:
        """Make the new weights live and drop every cached prefix; return the fingerprints of the
        tensors that came.

        Raises WeightSyncError when a parameter is missing or does not hold what came.
        """

        def finish() -> dict[str, int]:
            self._rpc("finish_weight_update")
            receipt, *others = self._rpc("weight_receipt")
            if any(other != receipt for other in others):
                raise WeightSyncError("the workers of the engine received different tensors")
            if not self.llm.reset_prefix_cache(reset_running_requests=True):
                raise WeightSyncError("the engine could not drop its prefix cache")
            if self.llm.model_config.is_multimodal_model:
                self.llm.reset_encoder_cache()  # images as the old tower saw them
            self.llm.set_weight_version(str(weight_version))
            self._is_current = True
            return dict(receipt)

        return self._update(finish)

    def sleep(self) -> None:
        """Give device memory back (weights and cache). Nothing is sampled until weights have been
        sent again and all memory is there. On a CPU vLLM only notes that it sleeps.

        Raises EngineError while requests are in flight.
        """

        def sleep() -> None:
            if self._waiting:
                raise EngineError("the engine cannot sleep while requests are in flight")
            self.llm.sleep(level=2)  # weights are dropped, not copied: they are sent
            self._is_current = False

        self._call(sleep)

    def wake_up(self, tag: str) -> None:
        """Take device memory again: "weights" or "kv_cache"."""
        self._call(lambda: self.llm.wake_up([tag]))

    def shutdown(self) -> None:
        """Free everything; waiting and later calls raise EngineError."""

        def close() -> None:
            self._fail(EngineError("it was shut down"))
            # vLLM's own way would also destroy torch.distributed in this process, which a trainer
            # and other engines may share.
            client = self.llm.engine_core
            client._finalizer.detach()
            client.engine_core.model_executor.shutdown()
            client.engine_core.scheduler.shutdown()
            self.llm = None

        if self.llm is not None:
            self._thread.submit(close).result()
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()

    def _queue(self, command: Callable[[], Result]) -> Future[Result]:
        """Have the engine's thread run a command, before its next step."""

        def run() -> Result:
            self._check_is_up()
            try:
                return command()
            except NotImplementedError:
                raise
            except self.ends_with as error:
                # The error of one of several workers comes as a text.
                is_full = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
                if not is_full:
                    self._fail(error)
                    raise self._down() from error
                full = MachineError(  # another engine would have no more
                    f"{first_line(error)} Type a smaller --vllm_gpu_memory_utilization."
                )
                self._fail(full)
                raise full from error
            finally:
                self._queue_step()

        return self._thread.submit(run)

    def _call(self, command: Callable[[], Result]) -> Result:
        return self._queue(command).result()

    def _check_is_up(self) -> None:
        if self._end is not None:
            raise self._down() from self._end

    def _down(self) -> EngineError:
        """Return the error of every call from now on; one that is ours would come again in another
        engine.
        """
        assert self._end is not None
        kind = EngineError if isinstance(self._end, OpenRLHFError) else LostEngineError
        return kind(f"vLLM engine is down: {first_line(self._end)}")

    def _add(
        self,
        requests: Sequence[GenerationRequest],
        prompts: Sequence[dict[str, Any]],
        futures: Sequence[Future[Any]],
    ) -> None:
        """Hand requests to vLLM; those that come with a wrong one are refused with it."""

        def refuse(error: BaseException) -> None:
            for future in futures:
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            self._drop_done()

        with errors_to(refuse):
            self._check_is_up()
            for request, prompt, future in zip(requests, prompts, futures, strict=True):
                num_tokens = len(request.prompt_token_ids)
                limit = self.llm.model_config.max_model_len
                if not 0 < num_tokens < limit:
                    raise EngineError(
                        f"prompt {request.request_id} has {num_tokens} tokens, the engine takes 1 "
                        f"to {limit - 1} (max_model_len {limit})"
                    )
                key = str(self._num_requests)
                self._num_requests += 1
                self.llm.add_request(key, prompt, self._sampling_params(request.sampling))
                self._waiting[key] = (request, future)
        self._queue_step()

    def _queue_step(self) -> None:
        """Queue a step, unless there is one or nothing to do."""
        if self.is_busy and not self._is_stepping:
            self._is_stepping = True
            self._thread.submit(self._step)
        elif not self._waiting:
            release_cores()

    def _step(self) -> None:
        """Do one forward pass and hand out what it finished, unless a command has paused."""
        self._is_stepping = False
        if not self.is_busy:
            return
        with errors_to(self._fail), torch.compiler.set_stance(self._stance):
            outputs = self.llm.step()
            self.num_steps += 1
            for output in outputs:
                if output.finished:
                    request, future = self._waiting.pop(output.request_id)
                    answer = [completion(part) for part in output.outputs]
                    if future.set_running_or_notify_cancel():  # greedy samples are all the same
                        future.set_result(answer * (request.sampling.num_samples // len(answer)))
        self._queue_step()

    def _fail(self, error: BaseException) -> None:
        """End the engine for every waiting and later call."""
        self._end = self._end or error
        for _, future in self._waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self._down())
        self._waiting.clear()

    def _drop_done(self) -> None:
        """Have vLLM forget requests that failed or were cancelled."""
        keys = [key for key, (_, future) in self._waiting.items() if future.done()]
        for key in keys:
            del self._waiting[key]
        self.llm.abort_request(keys)

    def _check_transfer(self) -> None:
        """Raise EngineError if the transfer to a worker was broken off: an error that a worker of
        several raised itself would leave vLLM with the replies of the others.
        """
        for problem in filter(None, self._rpc("transfer_problem")):
            raise EngineError(problem)

    def _rpc(self, method: str, **options: object) -> Any:
        """Call a method of every worker; return the results, by worker."""
        return self.llm.collective_rpc(method, kwargs=options)

    def _update(self, command: Callable[[], Result]) -> Result:
        """Run a part of an update; the engine ends where it fails: it holds half of the weights.
        Where it is broken off nothing is sampled until another one is whole.
        """

        assert not self._is_current, "begin_weight_update was not called"

        def run() -> Result:
            try:
                return command()
            except (EngineError, torch.OutOfMemoryError):
                raise
            except BaseException as error:
                self._fail(error)
                raise

        return self._call(run)

    def _sampling_params(self, sampling: SamplingSettings) -> Any:
        is_greedy = sampling.temperature == 0  # vLLM refuses several: they are all the same
        return self._vllm.SamplingParams(
            n=1 if is_greedy else sampling.num_samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            stop=list(sampling.stop),
            ignore_eos=True,  # exactly the given ids stop
            seed=sampling.seed,
            logprobs=0,  # of the sampled token
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            skip_clone=True,
            logit_bias=None if self.processor is None else self.processor.logit_bias,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )


def start_llm(settings: Mapping[str, Any]) -> Any:
    """Return vLLM's LLMEngine, with the receiver of weights in every worker."""
    from vllm.config import WeightTransferConfig  # noqa: PLC0415 - takes seconds
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - takes seconds
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415 - takes seconds
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415 - takes seconds

    from openrlhf.engines import weight_receiver  # noqa: PLC0415 - imports vLLM

    own = dict(settings)
    if "seed" in own:
        own["seed"] %= NUM_SEEDS
    if own.get("tensor_parallel_size", 1) == 1:
        own["distributed_executor_backend"] = "uni"
    vllm_cpu.adapt_settings(own)
    set_num_threads = torch.set_num_threads
    try:
        vllm_config = EngineArgs(
            **own,
            skip_tokenizer_init=False,  # stop texts are found in text
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            worker_extension_cls=weight_receiver.WORKER_EXTENSION,
            weight_transfer_config=WeightTransferConfig(backend=weight_receiver.BACKEND),
            disable_log_stats=True,
        ).create_engine_config(UsageContext.LLM_CLASS)  # batches as large as those of vllm.LLM
        vllm_cpu.limit_cache(vllm_config)
        forget_closed_groups()
        llm = LLMEngine.from_vllm_config(vllm_config, disable_log_stats=True)
    except ValueError as error:
        remedy = "Take another model, or generate without vLLM: --vllm_num_engines 0, "
        remedy += "--eval_task generate."
        if "memory" in str(error):  # free memory, or that for the cache of one sequence
            remedy = "Type another --vllm_gpu_memory_utilization, or smaller lengths."
        raise ConfigError(f"vLLM refuses {own['model']}: {first_line(error)}. {remedy}") from error
    # vLLM disables this function for the whole process; the trainer may share it.
    torch.set_num_threads = set_num_threads
    llm.set_weight_version("0")
    llm.collective_rpc("report_full_logprobs")
    return llm


def with_images(settings: Mapping[str, Any], processor: ImageProcessor) -> dict[str, Any]:
    """Return the settings of a model that sees images, whose pixels come ready."""
    own = {**settings, "limit_mm_per_prompt": {"video": 0}}
    own["mm_device_do_normalize"] = False  # they are normalised
    own["mm_processor_cache_gb"] = 0
    own["mm_processor_kwargs"] = processor.limits  # its caches hold the largest image
    # Transformers goes by the whole's, some models of vLLM by that of the text.
    is_tied = getattr(processor.family.config, "tie_word_embeddings", False)
    own["hf_overrides"] = {"text_config": {"tie_word_embeddings": is_tied}}
    return own


def engine_input(request: GenerationRequest, processor: ImageProcessor | None) -> dict[str, Any]:
    """Return a request as vLLM takes one that is processed: it neither tokenises nor resizes."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
    if not request.images:
        return prompt | {"type": "token"}
    from vllm.multimodal.inputs import (  # noqa: PLC0415 - takes seconds
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    assert processor is not None, f"{request.request_id} has images, and the model sees none"
    images = processor.pixels(request.images)
    by_row, by_picture = processor.family.engine_inputs(images.pixels, images.grid)
    rows_I = images.grid.prod(-1)
    fields = dict.fromkeys(by_row, MultiModalFieldConfig.flat_from_sizes("image", rows_I))
    fields |= dict.fromkeys(by_picture, MultiModalFieldConfig.batched("image", keep_on_cpu=True))
    values: Any = by_row | by_picture
    is_placeholder_T = torch.tensor(request.prompt_token_ids) == processor.image_token_id
    ranges = []
    for positions in processor.placeholders(request.prompt_token_ids, request.images):
        start, end = positions[0], positions[-1] + 1  # text may stand between placeholders
        ranges.append(PlaceholderRange(start, end - start, is_embed=is_placeholder_T[start:end]))
    return prompt | {
        "type": "multimodal",
        "mm_kwargs": MultiModalKwargsItems.from_hf_inputs(values, fields),
        "mm_hashes": {"image": [picture.sha256 for picture in request.images]},
        "mm_placeholders": {"image": ranges},
    }


def forget_closed_groups() -> None:
    """Have vLLM form new process groups if a trainer in this process closed those of an earlier
    engine.
    """
    from vllm.distributed import parallel_state  # noqa: PLC0415 - takes seconds

    world = parallel_state._WORLD
    if world is None or world.device_group in dist.distributed_c10d._world.pg_map:
        return
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, parallel_state.GroupCoordinator):
            setattr(parallel_state, name, None)


def unfinished_outputs(llm: Any) -> Iterator[tuple[str, Any]]:
    """Yield the output so far of each sample of the unfinished requests, with the request's key."""
    parents = {}
    for state in llm.output_processor.request_states.values():
        if state.parent_req is not None:  # of several samples, which finish together
            parents[state.parent_req.external_req_id] = state.parent_req
        output = state._new_completion_output([], None, None)
        output.weight_versions = state._weight_version_spans()
        yield (state.parent_req or state).external_req_id, output
    for key, parent in parents.items():
        for output in parent.output_aggregator:
            if output is not None:
                yield key, output


def completion(output: Any) -> Completion:
    """Return an output of vLLM as a Completion."""
    starts = version_starts_of(output)
    return Completion(
        tuple(output.token_ids),
        tuple(output.logprobs.logprobs),
        output.finish_reason,
        weight_version=starts[-1][1] if starts else 0,
        version_starts=starts if len(starts) > 1 else (),
    )


def version_starts_of(output: Any) -> tuple[tuple[int, int], ...]:
    """Return (index of the first token, version) of each version of the weights in an output."""
    return tuple((span.start, int(span.version)) for span in output.weight_versions or [])
