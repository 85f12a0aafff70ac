"""What models and machines support: found from a model's config and this machine before weights are
read, and said in one line each.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.config.common import DeepSpeedConfig
from openrlhf.errors import ConfigError
from openrlhf.utils.gpus import check_gpus
from openrlhf.utils.packable import why_padded

FLASH_2 = "flash_attention_2"
# Attention that is never refused: where it is missing, torch's own takes its place.
OWN_ATTENTION = ("auto", "sdpa", "eager", FLASH_2)
# Attention of transformers, and the module and package it needs beside a GPU.
GPU_ATTENTION = {
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_4": ("flash_attn.cute", "flash-attn-4"),
    "flex_attention": ("torch", "torch"),
}
# Of the plans in which transformers says how layers are split: those that AutoTP follows.
SPLIT_STYLES = frozenset(
    {
        "colwise",
        "colwise_gather_output",
        "colwise_rep",
        "embedding_rowwise",
        "replicated_with_grad_allreduce",
        "rowwise",
    }
)


def is_installed(package: str) -> bool:
    """Return True if a package, or a module of one, could be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # the package that the module is of is not there, or broken
        return False


def check_here(ds: DeepSpeedConfig, *, trains: bool = True, is_cuda: bool | None = None) -> None:
    """Raise ConfigError that lists what these settings need and this machine does not have."""
    if is_cuda is None:
        check_gpus()
        is_cuda = torch.cuda.is_available()
    if problems := list(_missing(ds, trains=trains, is_cuda=is_cuda)):
        raise ConfigError(problems)


def _missing(ds: DeepSpeedConfig, *, trains: bool, is_cuda: bool) -> Iterator[str]:
    name = ds.attn_implementation
    flag = f"--attn_implementation {name}"
    wanted = []  # flag, module and package that need a GPU
    if "/" in name:  # a kernel of the hub
        wanted.append((flag, "kernels", "kernels"))
    elif name in GPU_ATTENTION:
        wanted.append((flag, *GPU_ATTENTION[name]))
    elif name not in OWN_ATTENTION:
        known = ", ".join((*OWN_ATTENTION, *GPU_ATTENTION))
        yield f"{flag} is not known. Type one of {known}, or a kernel's hub id."
    if trains and ds.use_liger_kernel:
        wanted.append(("--use_liger_kernel", "liger_kernel", "liger-kernel"))
    for flag, module, package in wanted:
        lacks = [] if is_installed(module) else [f"the {package} package is not installed"]
        lacks += [] if is_cuda else ["torch sees no CUDA device"]
        if lacks:
            remedy = f"Install {package}" if is_cuda else "Run on a GPU"
            yield f"{flag}: {' and '.join(lacks)}. {remedy}, or leave {flag} out."
    if ds.experts_implementation == "deepgemm":
        yield (
            "--ds.experts_implementation deepgemm: the kernel computes no gradients. "
            "Use grouped_mm."
        )
    if ds.load_in_4bit and not is_installed("bitsandbytes"):
        yield (
            "--load_in_4bit: the bitsandbytes package is not installed. "
            "Install bitsandbytes, or leave --load_in_4bit out."
        )
    if trains and ds.deepcompile and not is_cuda:
        yield (
            "--deepcompile: DeepSpeed compiles for CUDA GPUs only, and torch sees no CUDA device. "
            "Run on a GPU, or leave --deepcompile out."
        )
    is_fp16 = trains and ds.param_dtype == "fp16" and not is_cuda
    if is_fp16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        yield (
            "--ds.param_dtype fp16: this CPU does not train in fp16. Type --bf16 or "
            "--ds.param_dtype fp32, or run on a GPU."
        )


def num_positions(config: PretrainedConfig) -> int | None:
    """Return the tokens of the longest sequence that the model reads; None where it has no limit.

    Rotary tables that change with the length of a sequence (dynamic NTK, LongRoPE) are used up to
    the length where they begin to: beyond, they would depend on the longest sequence of a row.
    """
    text = config.get_text_config()
    # An attribute: some families keep it under a name of their own (GPT-2: `n_positions`).
    limit = getattr(text, "max_position_embeddings", None)
    scaling = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [part for part in scaling.values() if isinstance(part, Mapping)]
    kinds = {part.get("rope_type") for part in by_layer_type or [scaling]}
    if limit is None or "dynamic" in kinds:
        return limit
    if "longrope" in kinds:
        parts = by_layer_type or [scaling]
        return min(part.get("original_max_position_embeddings", limit) for part in parts)
    factor = scaling.get("factor")
    if factor is None:
        return limit
    return max(limit, int(scaling.get("original_max_position_embeddings", limit) * factor))


def head_size(config: PretrainedConfig) -> int | None:
    """Return the numbers in an attention head; None where the family does not say it in the usual
    words, or compresses keys and values (MLA).
    """
    text = config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None)
    width = getattr(text, "hidden_size", None)
    if not num_heads or not width or getattr(text, "kv_lora_rank", None):
        return None
    return int(getattr(text, "head_dim", None) or width // num_heads)


def causal_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of a family's language models; None for code that comes with weights."""
    found = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    return found if isinstance(found, type) else None


def padding_note(config: PretrainedConfig, path: str) -> str | None:
    """Return what to say of the model at `path` if its rows are padded."""
    model_class = causal_class(config)
    reason = None if model_class is None else why_padded(model_class, config)
    if model_class is None or reason is None:
        return None
    return (
        f"{path}: {model_class.__name__} has {reason}: the sequences of a micro-batch are padded "
        "to the longest, not packed, which takes more time and memory"
    )


def refuse_unsupported(
    config: PretrainedConfig,
    path: str,
    ds: DeepSpeedConfig,
    *,
    has_token_budget: bool = False,
    has_router_loss: bool = False,
) -> None:
    """Raise ConfigError that lists the settings which a model cannot be used with; reads no
    weights.
    """
    problems = [*_split_problems(config, path, ds)]
    if padding_note(config, path) is None:
        problems += _shared_head_problems(config, path, ds)
    elif ds.ring_attn_size > 1:
        problems.append(
            f"--ring_attn_size {ds.ring_attn_size}: {path} cannot be shared, its rows are padded, "
            "not packed. Leave it out."
        )
    elif has_token_budget:
        problems.append(
            f"--use_dynamic_batch: the rows of {path} are padded, so a budget of tokens does not "
            "bound their memory. Leave it out and set --micro_train_batch_size."
        )
    if has_router_loss and not num_experts_per_token(config):
        problems.append(f"--aux_loss_coef is set, and {path} has no experts. Leave it out.")
    if problems:
        raise ConfigError(problems)


def _shared_head_problems(
    config: PretrainedConfig, path: str, ds: DeepSpeedConfig
) -> Iterator[str]:
    num_ranks = ds.ranks_per_share
    is_shared = ds.ring_attn_size > 1 and ds.cp_mode == "ulysses"
    if is_shared and (num_heads := _fewest_heads(config, num_ranks)) is not None:
        yield (
            f"--cp_mode ulysses shares heads, and {path} has {num_heads}, not a multiple of the "
            f"{num_ranks} ranks that work on the same samples. Type --cp_mode ring."
        )


def _split_problems(config: PretrainedConfig, path: str, ds: DeepSpeedConfig) -> Iterator[str]:
    size, text = ds.tensor_parallel_size, config.get_text_config()
    if size == 1:
        return
    plan = getattr(text, "base_model_tp_plan", None) or {}
    has_norms = getattr(text, "use_qk_norm", False) or getattr(text, "qk_layernorm", False)
    knows_norms = any("norm" in name for name in plan)
    if not plan or set(plan.values()) - SPLIT_STYLES or (has_norms and not knows_norms):
        yield (
            f"--ds_tensor_parallel_size {size}: {path} is of the family {config.model_type}, which "
            "DeepSpeed's AutoTP cannot split. Leave it out, and type --zero_stage 3 instead."
        )
    elif (num_heads := _fewest_heads(config, size)) is not None:
        yield (
            f"--ds_tensor_parallel_size {size}: {path} has {num_heads} heads, not a multiple of "
            "it. Type a divisor."
        )


def num_experts_per_token(config: PretrainedConfig) -> int:
    """Return the experts that a token is sent to; 0 if the model has none."""
    return int(config.get_text_config().to_dict().get("num_experts_per_tok") or 0)


def _fewest_heads(config: PretrainedConfig, num_ranks: int) -> int | None:
    """Return the number of query or key heads if a number of ranks does not divide both."""
    text = config.get_text_config()
    heads = {text.num_attention_heads, getattr(text, "num_key_value_heads", None) or num_ranks}
    return min(heads) if any(count % num_ranks for count in heads) else None


def refuse_own_code(model: PreTrainedModel, path: str) -> None:
    """Raise ConfigError if code that comes with the weights does not take packed rows."""
    reason = why_padded(type(model), model.config)
    if reason is not None and causal_class(model.config) is None:
        raise ConfigError(
            f"{path}: {type(model).__name__} has {reason}. Code of its own must use Transformers' "
            "attention interface."
        )
