"""The settings of an engine in vLLM's words, with the choices that a CPU needs."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from openrlhf.engines.vllm_engine import VLLMEngineConfig

CPU_CACHE_FRACTION = 0.2  # of the free memory, at most
CPU_BLOCK_SIZE = 32  # vLLM takes 128, more than many a prompt has


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
    if config.tensor_parallel_size == 1:
        own["distributed_executor_backend"] = "uni"
    index = own.pop("device_index")
    own["device_ids"] = [index] if index else None
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
