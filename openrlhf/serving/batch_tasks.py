"""The tasks of batch_inference: prompts that an engine responds to, responses that a reward model
scores.

Every prompt has seeds of its own, so its responses depend neither on the ranks nor on which prompts
were done before a restart. Rows hold the prompt as the model read it, so that later commands score
and learn it so; a message list stays one.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.datasets.chat import RENDERED, to_messages
from openrlhf.datasets.command_data import inference_data, prompt_format, scored_format
from openrlhf.datasets.problems import Gathered
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import EvalEngine
from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.engines.vllm_cpu import check_head_size
from openrlhf.engines.vllm_engine import VLLMEngine, VLLMEngineConfig, check_vllm_is_installed
from openrlhf.errors import ConfigError, RewardError
from openrlhf.models.loading import is_value_model, load_causal_lm, load_config
from openrlhf.models.support import head_size, num_positions
from openrlhf.models.value_head import RewardModel
from openrlhf.serving.post_processors import wish_template
from openrlhf.serving.served_model import load_options
from openrlhf.utils.adapter_folder import refuse_adapter
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.progress import progress
from openrlhf.utils.tokenizer import eos_token_ids, load_tokenizer

Rows = list[dict[str, Any]]  # what one item gave
Record = Callable[[Mapping[int, Rows]], None]  # keeps the rows of finished items
# Settings that change neither the rows nor their order.
FREE_SETTINGS = {"output_path", "local_rank", "micro_batch_size", "vllm", "reward"}
BATCHES_BETWEEN_WRITES = 16
BATCHES_IN_CHUNK = 4  # forward batches between two writes
CHUNKS_IN_FLIGHT = 3  # keep a vLLM engine full while finished chunks are written
SEED_BITS = 63


class BatchTask(ABC):
    """Items to work on, each by itself; made before a model is loaded."""

    samples: Any  # the tokenised data, a sample for each item

    def __init__(self, config: BatchInferenceConfig) -> None:
        """Read and check; of the ranks on a machine the one that goes first tokenises and shows it,
        the others read what it leaves in the cache.
        """
        path = config.model.model_name_or_path
        assert path is not None, "a model is needed"
        self.config = config
        self.model_path = path
        gathered, data = Gathered(), config.data
        trust = config.trust_remote_code
        facts = gathered.attempt(lambda: load_config(path, trust_remote_code=trust))
        if facts is not None:
            gathered.attempt(lambda: self._check_model(facts))
        tokenizer = gathered.attempt(
            lambda: load_tokenizer(
                path,
                chat_template=data.tokenizer_chat_template,
                use_fast=not data.disable_fast_tokenizer,
                trust_remote_code=trust,
            )
        )
        rows = inference_data(config).read(gathered)
        if rows is not None and tokenizer is not None:
            self.rows, self.tokenizer = rows, tokenizer
            gathered.attempt(self._tokenise)
        gathered.raise_if_any()
        assert facts is not None, "or else problems were raised"
        self.model_config = facts

    def _check_model(self, facts: PretrainedConfig) -> None:
        """Raise ConfigError for a model that is to score and cannot."""
        if self.config.eval_task == "rm" and not is_value_model(facts):
            raise ConfigError(
                f"The model at {self.model_path!r} has no value head. Give a trained reward model."
            )

    @abstractmethod
    def _tokenise(self) -> None:
        """Make `samples` of `rows`, with a bar; raises DataError."""

    @abstractmethod
    def work(self, mine: Sequence[int], record: Record, strategy: DeepSpeedStrategy) -> None:
        """Load the model and do this rank's items; all ranks call, also without any."""

    @property
    def items(self) -> range:
        """Return the indices of the items, in the order of their rows in the output."""
        return range(len(self.samples))

    def columns_of(self, item: int) -> dict[str, Any]:
        """Return the columns of an item's row, without bytes, which JSON cannot hold."""
        schema, row = self.rows.features.arrow_schema, self.rows[self.samples.row_ids[item]]
        return {name: row[name] for name in row if "binary" not in str(schema.field(name).type)}

    @property
    def key(self) -> str:
        """A hash of settings, model and data: with another one, other rows would come out."""
        settings = self.config.model_dump(mode="json", exclude=FREE_SETTINGS)
        facts = [settings, files_of_model(self.model_path), self.samples.fingerprint]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _longest_first(self, items: Sequence[int], size: int) -> list[list[int]]:
        """Cut items into batches of like length."""
        ordered = sorted(items, key=lambda index: -int(self.samples.lengths[index]))
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]


class PromptTask(BatchTask):
    """Prompts that fit, sampled by an engine; every rank has an engine of its own."""

    samples: PromptDataset

    def __init__(self, config: BatchInferenceConfig) -> None:
        super().__init__(config)
        self.max_model_len = int(self.samples.lengths.max()) + config.rollout.max_new_tokens
        self._check_positions()
        trust = config.trust_remote_code
        stop_ids = eos_token_ids(self.model_path, self.tokenizer, trust_remote_code=trust)
        self._sampling = sampling_settings(config, stop_ids)

    def _tokenise(self) -> None:
        form, csft = prompt_format(self.config.data), self.config.csft
        if csft.enable:
            form = replace(form, around=wish_template(csft.prompt))
        self.samples = PromptDataset(self.rows, self.tokenizer, form)

    @property
    def items(self) -> range:
        rollout = self.config.rollout
        if rollout.iter is None:
            return range(len(self.samples))
        return slice_of(len(self.samples), rollout.batch_size, rollout.iter)

    def work(self, mine: Sequence[int], record: Record, strategy: DeepSpeedStrategy) -> None:
        is_vllm = self.config.eval_task == "generate_vllm"
        if not mine and not is_vllm:  # vLLM makes groups among all ranks while it starts
            return
        engine = self._vllm_engine() if is_vllm else self._own_engine(strategy)
        own_width = self.config.micro_batch_size * BATCHES_IN_CHUNK
        width = self.config.vllm.max_num_seqs if is_vllm else own_width
        chunks = self._longest_first(mine, max(width // self.config.rollout.best_of_n, 1))
        pool = ThreadPoolExecutor(CHUNKS_IN_FLIGHT if is_vllm else 1)
        try:
            with progress("answering prompts", len(mine)) as advance:
                found = pool.map(lambda chunk: engine.generate(self._requests(chunk)), chunks)
                for chunk, completions in zip(chunks, found, strict=True):
                    pairs = zip(chunk, completions, strict=True)
                    record({item: [self._row(item, c) for c in group] for item, group in pairs})
                    advance(len(chunk))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(engine, VLLMEngine):
                engine.shutdown()

    def _requests(self, items: Sequence[int]) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                str(item),
                self.samples[item].prompt_token_ids,
                replace(self._sampling, seed=self._seed(item)),
            )
            for item in items
        ]

    def _row(self, item: int, completion: Completion) -> dict[str, Any]:
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        asked = asked_columns(self.samples.asked(item))
        return {**asked, "output": text, "finish_reason": completion.finish_reason}

    def _seed(self, item: int) -> int:
        """Return a seed far from other prompts': sample k of a prompt takes the seed plus k."""
        return ((self.config.seed << 32) + item * self.config.rollout.best_of_n) % 2**SEED_BITS

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


class ScoreTask(BatchTask):
    """Prompts with responses, scored by a reward model at the last of the tokens that train_rm
    would have seen.
    """

    samples: SFTDataset

    def _tokenise(self) -> None:
        self.samples = SFTDataset(self.rows, self.tokenizer, scored_format(self.config.data))

    def work(self, mine: Sequence[int], record: Record, strategy: DeepSpeedStrategy) -> None:
        """Score rows, those of like length together.

        Under ZeRO-3 every forward takes all ranks: a rank that is done scores its row 0 again and
        forgets it.
        """
        model = RewardModel.from_pretrained(
            self.model_path,
            value_head_prefix=self.config.ds.value_head_prefix,
            allow_fresh_head=False,
            **load_options(self.config),
        )
        engine = strategy.prepare_eval(model)
        batches = self._longest_first(mine, self.config.micro_batch_size)
        num_idle = 0
        if self.config.ds.zero_stage == 3:
            most = int(strategy.all_reduce_max({"n": float(len(batches))})["n"])
            num_idle = most - len(batches)
        unwritten: dict[int, Rows] = {}
        with progress("scoring rows", len(mine)) as advance:
            for number, batch in enumerate(batches, start=1):
                unwritten.update(self._score(engine, batch))
                advance(len(batch))
                if number % BATCHES_BETWEEN_WRITES == 0 or number == len(batches):
                    record(unwritten)
                    unwritten = {}
            for _ in range(num_idle):
                self._score(engine, [0])

    def _score(self, engine: EvalEngine, items: Sequence[int]) -> dict[int, Rows]:
        examples = [self.samples[item] for item in items]
        batch = PackedBatch.from_sequences(
            [example.token_ids for example in examples], [example.loss_mask for example in examples]
        )
        scores = engine(batch.to(engine.device))
        assert isinstance(scores, Tensor), "RewardModel.forward"
        pairs = zip(items, scores.tolist(), strict=True)
        return {item: [self._row(item, score)] for item, score in pairs}

    def _row(self, item: int, reward: float) -> dict[str, Any]:
        row_id = self.samples.row_ids[item]
        if not math.isfinite(reward):
            raise RewardError(f"the reward model scored row {row_id + 1} with {reward}")
        row, column = self.rows[row_id], self.samples.output_column
        if column is None:  # the dialogue ends with the response
            *asked, answer = to_messages(row[self.samples.input_column])
            return {"input": asked, "output": answer["content"], "reward": reward}
        return {**asked_columns(self.samples.asked(row)), "output": row[column], "reward": reward}


def asked_columns(asked: Any) -> dict[str, Any]:
    """Return the columns of a prompt: a message list, or text as the model read it."""
    return {"input": asked, RENDERED: True} if isinstance(asked, str) else {"input": asked}


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
    """Return how responses are sampled."""
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
    """Return slice number `iteration` of the prompts; after the last, which may be short, the first
    again.

    Example: of 5 prompts in slices of 2, iterations 0, 1, 2 and 3 are 0-1, 2-3, 4 and 0-1.
    """
    num_slices = -(-num_prompts // size)
    start = iteration % num_slices * size
    return range(start, min(start + size, num_prompts))


def files_of_model(model_path: str) -> list[list[object]]:
    """Return name, size and time of the files of a local model, which a loop may train anew."""
    folder = Path(model_path).expanduser()
    files = sorted(path for path in folder.glob("*") if path.is_file()) if folder.is_dir() else []
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
