"""Answering prompts in bulk: the tasks generate_vllm and generate of batch_inference.

Every rank has an engine of its own. Every prompt has seeds of its own, so its answers depend
neither on the ranks nor on which prompts were done before a restart. Rows hold the prompt as the
model read it, so that later commands score and learn it so; a message list stays one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.datasets.command_data import prompt_format
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.engines.vllm_cpu import check_head_size
from openrlhf.engines.vllm_engine import VLLMEngine, VLLMEngineConfig, check_vllm_is_installed
from openrlhf.errors import ConfigError
from openrlhf.models.families import head_size, num_positions
from openrlhf.models.loading import load_causal_lm, load_config
from openrlhf.trainer.answer_parts import Rows
from openrlhf.trainer.batch_task import BatchTask, Record, asked_columns, load_options
from openrlhf.trainer.post_processors import wish_template
from openrlhf.utils.adapter_folder import refuse_adapter
from openrlhf.utils.progress import progress
from openrlhf.utils.tokenizer import eos_token_ids

BATCHES_IN_CHUNK = 4  # forward batches between two writes
CHUNKS_IN_FLIGHT = 3  # keep a vLLM engine full while finished chunks are written
SEED_BITS = 63


class PromptTask(BatchTask):
    """Prompts that fit, sampled by an engine."""

    def __init__(self, config: BatchInferenceConfig) -> None:
        super().__init__(config)
        self.notices = self.prompts.notices
        self.max_model_len = int(self.prompts.lengths.max()) + config.rollout.max_new_tokens
        self._check_positions()
        self._sampling = sampling_settings(config, self._stop_token_ids())

    def _tokenise(self) -> None:
        form, csft = prompt_format(self.config.data), self.config.csft
        if csft.enable:
            form = replace(form, around=wish_template(csft.prompt))
        self.prompts = PromptDataset(self.rows, self.tokenizer, form)

    @property
    def items(self) -> range:
        """The slice of --iter, or all prompts."""
        rollout = self.config.rollout
        if rollout.iter is None:
            return range(len(self.prompts))
        return slice_of(len(self.prompts), rollout.batch_size, rollout.iter)

    def row_id(self, item: int) -> int:
        """The row of a prompt."""
        return self.prompts[item].row_id

    @property
    def data_key(self) -> str:
        """A hash of all prompts' tokens."""
        return self.prompts.fingerprint

    def work(self, mine: Sequence[int], record: Record, strategy: DeepSpeedStrategy) -> None:
        """Answer prompts, the longest first, a chunk at a time."""
        is_vllm = self.config.eval_task == "generate_vllm"
        if not mine and not is_vllm:  # vLLM makes groups among all ranks while it starts
            return
        engine = self._vllm_engine() if is_vllm else self._own_engine(strategy)
        lengths = self.prompts.lengths
        ordered = sorted(mine, key=lambda index: -int(lengths[index]))
        size = self._chunk_size()
        chunks = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        pool = ThreadPoolExecutor(CHUNKS_IN_FLIGHT if is_vllm else 1)
        try:
            with progress("answering prompts", len(ordered)) as advance:
                answered = pool.map(lambda chunk: self._answer(engine, chunk), chunks)
                for chunk, answers in zip(chunks, answered, strict=True):
                    record(self._rows_of(chunk, answers))
                    advance(len(chunk))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(engine, VLLMEngine):
                engine.shutdown()

    def _chunk_size(self) -> int:
        """Prompts of a chunk."""
        config = self.config
        width = (
            config.vllm.max_num_seqs
            if config.eval_task == "generate_vllm"
            else config.micro_batch_size * BATCHES_IN_CHUNK
        )
        return max(width // config.rollout.best_of_n, 1)

    def _answer(
        self, engine: VLLMEngine | OwnGenerate, chunk: Sequence[int]
    ) -> list[list[Completion]]:
        requests = [
            GenerationRequest(
                str(index),
                self.prompts[index].prompt_token_ids,
                replace(self._sampling, seed=self._seed(index)),
            )
            for index in chunk
        ]
        return engine.generate(requests)

    def _rows_of(
        self, chunk: Sequence[int], answers: Sequence[Sequence[Completion]]
    ) -> Mapping[int, Rows]:
        return {
            index: [self._row(index, completion) for completion in completions]
            for index, completions in zip(chunk, answers, strict=True)
        }

    def _row(self, index: int, completion: Completion) -> dict[str, Any]:
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        asked = asked_columns(self.prompts.asked(index))
        return {**asked, "output": text, "finish_reason": completion.finish_reason}

    def _seed(self, index: int) -> int:
        """Far enough from other prompts': sample k of a prompt takes the seed plus k."""
        return ((self.config.seed << 32) + index * self.config.rollout.best_of_n) % 2**SEED_BITS

    def _stop_token_ids(self) -> tuple[int, ...]:
        trust = self.config.trust_remote_code
        return eos_token_ids(self.model_path, self.tokenizer, trust_remote_code=trust)

    def _check_positions(self) -> None:
        limit = num_positions(self.model_config)
        if limit is not None and self.max_model_len > limit:
            longest = self.max_model_len - self.config.rollout.max_new_tokens
            raise ConfigError(
                f"The longest prompt has {longest} tokens; with --max_new_tokens "
                f"{self.config.rollout.max_new_tokens} that is more than the {limit} positions of "
                "the model. Type a smaller --max_new_tokens or --prompt_max_len."
            )

    def _own_engine(self, strategy: DeepSpeedStrategy) -> OwnGenerate:
        model = load_causal_lm(self.model_path, **load_options(self.config))
        model = model.to(strategy.device).eval()
        return OwnGenerate(model, max_num_rows=self.config.micro_batch_size)

    def _vllm_engine(self) -> VLLMEngine:
        config = self.config
        num_gpus = torch.cuda.device_count()
        dtypes = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        default = "auto" if num_gpus else "float32"
        return VLLMEngine(
            VLLMEngineConfig(
                self.model_path,
                dtype=dtypes.get(config.ds.param_dtype, default),
                max_model_len=self.max_model_len,
                tensor_parallel_size=config.vllm.tensor_parallel_size or max(num_gpus, 1),
                gpu_memory_utilization=config.vllm.gpu_memory_utilization,
                enable_prefix_caching=config.vllm.enable_prefix_caching,
                max_num_seqs=config.vllm.max_num_seqs,
                seed=config.seed,
                trust_remote_code=config.trust_remote_code,
            )
        )


def check_vllm(config: BatchInferenceConfig) -> None:
    """Refuse what vLLM cannot do: to be used where it is not, and to read adapters."""
    if config.eval_task == "generate_vllm":
        check_vllm_is_installed(instead="--eval_task generate, which does without it")
        path = config.model.model_name_or_path or ""
        refuse_adapter(path, "--pretrain")
        facts = load_config(path, trust_remote_code=config.trust_remote_code)
        check_head_size(head_size(facts), path, instead="--eval_task generate")


def sampling_settings(
    config: BatchInferenceConfig, stop_token_ids: tuple[int, ...]
) -> SamplingSettings:
    """How answers are sampled."""
    rollout = config.rollout
    return SamplingSettings(
        num_samples=rollout.best_of_n,
        temperature=0.0 if rollout.is_greedy else rollout.temperature,
        top_p=rollout.top_p,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=stop_token_ids,
        repetition_penalty=rollout.repetition_penalty,
    )


def slice_of(num_prompts: int, size: int, iteration: int) -> range:
    """Slice number `iteration` of the prompts; after the last, which may be short, the first again.

    Example: of 5 prompts in slices of 2, iterations 0, 1, 2 and 3 are 0-1, 2-3, 4 and 0-1.
    """
    num_slices = -(-num_prompts // size)
    start = iteration % num_slices * size
    return range(start, min(start + size, num_prompts))
