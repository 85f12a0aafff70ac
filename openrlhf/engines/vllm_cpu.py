"""Quirks of vLLM's CPU build, and nothing else; every function does nothing on a GPU.

Remove a quirk when vLLM no longer needs it; the condition stands at each. All are of vLLM 0.32.
"""

import os
from typing import Any

import torch
from torch import nn

CACHE_FRACTION = 0.2  # of the free memory, at most
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
    num_blocks = (
        -(-model.max_model_len // cache.block_size) * vllm_config.scheduler_config.max_num_seqs
    )
    needed = num_blocks * cache.block_size * values_per_token * model.dtype.itemsize
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cache.kv_cache_memory_bytes = int(min(needed, CACHE_FRACTION * free))


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
