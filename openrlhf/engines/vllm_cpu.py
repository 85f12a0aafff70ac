"""Quirks of vLLM's CPU build, and nothing else; every function does nothing on a GPU.

Remove a quirk when vLLM no longer needs it; the condition stands at each. All are of vLLM 0.32.
"""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from openrlhf.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CACHE_FRACTION = 0.2  # of the free memory, at most
# That every backend of vLLM computes: it takes seconds to import, and is asked about others only.
USUAL_HEAD_SIZES = (32, 64, 128)
BLOCK_SIZE = 32  # vLLM takes 128, more than many a prompt has


def is_cpu() -> bool:
    """Return True if engines of this process run on a CPU."""
    return not torch.cuda.is_available()


def adapt_settings(settings: dict[str, Any]) -> None:
    """Change an engine's settings to what a CPU engine can do."""
    if not is_cpu():
        return
    # CPU workers refuse sleep mode at the start, and accept the calls: remove when they do not.
    settings["enable_sleep_mode"] = False
    # Compiling takes minutes and gains little: remove when it does not.
    settings["enforce_eager"] = True
    settings["block_size"] = BLOCK_SIZE
    # A piece of a prompt makes vLLM turn its request's generator back, which torch has for GPUs
    # only, and with seeds the engine would die: remove when torch's CPU generator can do it.
    settings["enable_chunked_prefill"] = False
    # A tower is run on the largest image to measure memory that a CPU does not run out of: remove
    # when CPU workers do not measure.
    if "limit_mm_per_prompt" in settings:
        settings["skip_mm_profiling"] = True


def limit_cache(vllm_config: Any) -> None:
    """Take room for `max_num_seqs` sequences of full length, at most a part of the free memory.

    A CPU engine would take `gpu_memory_utilization` of the machine: remove when it takes less.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not is_cpu():
        return
    parallel = vllm_config.parallel_config
    values_per_token = (
        2
        * model.get_num_layers(parallel)
        * model.get_num_kv_heads(parallel)
        * model.get_head_size()
    )
    cache.kv_cache_memory_bytes = cache_bytes(
        values_per_token * model.dtype.itemsize,
        max_len=model.max_model_len,
        num_seqs=vllm_config.scheduler_config.max_num_seqs,
        block_size=cache.block_size,
    )


def cache_bytes(
    bytes_per_token: int, *, max_len: int, num_seqs: int, block_size: int = BLOCK_SIZE
) -> int:
    """Return the size of the cache of `num_seqs` sequences, or what is spared of the memory."""
    needed = num_seqs * -(-max_len // block_size) * block_size * bytes_per_token
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(needed, CACHE_FRACTION * free))


def check_head_size(model_config: "PretrainedConfig", path: str, *, instead: str) -> None:
    """Raise ConfigError for a model whose heads the CPU build has no kernel for; `instead` is what
    to type to do without vLLM. An engine would start, and fail at its first step.
    """
    text = model_config.get_text_config()
    num_heads, is_latent = getattr(text, "num_attention_heads", 0), hasattr(text, "kv_lora_rank")
    if not num_heads or is_latent:
        return
    size = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    if size in USUAL_HEAD_SIZES:
        return
    from vllm.platforms import current_platform  # noqa: PLC0415 - takes seconds

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import (  # noqa: PLC0415 - takes seconds
        CPUAttentionBackend as Backend,
    )

    if not Backend.supports_head_size(size):
        known = ", ".join(map(str, Backend.get_supported_head_sizes()))
        raise ConfigError(
            f"{path} has attention heads of size {size}, and vLLM on a CPU computes those of "
            f"{known} only. Take another model, or type {instead}."
        )


def before_reload(model: nn.Module) -> None:
    """Have the experts of mixtures packed anew: where they have a kernel already, vLLM takes the
    plain weights for packed ones. Remove when `UnquantizedFusedMoEMethod` packs at every reload.
    """
    if is_cpu():
        for layer in model.modules():
            if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
                layer.quant_method.moe_kernel = None


def after_reload(model: nn.Module) -> None:
    """Pack LM heads anew that are tied to the embedding: nothing is loaded into them, and they
    would keep their old weights. Remove when vLLM's layerwise reload processes tied layers.
    """
    if is_cpu():
        for layer in model.modules():
            if getattr(layer, "cpu_linear", None) is not None and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
