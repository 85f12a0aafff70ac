"""Kernels that a run asks for: attention, Liger, expert layers, 4-bit weights.

What a request lacks on this machine is one line, before data are read and before another library
raises its own error.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from openrlhf.config.common import DeepSpeedConfig
from openrlhf.errors import ConfigError
from openrlhf.utils.gpus import check_gpus

FLASH_2 = "flash_attention_2"
# Attention that is never refused: where it is missing, torch's own takes its place.
OWN_ATTENTION = ("auto", "sdpa", "eager", FLASH_2)
# Attention of transformers, and the module and package it needs beside a GPU.
GPU_ATTENTION = {
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_4": ("flash_attn.cute", "flash-attn-4"),
    "flex_attention": ("torch", "torch"),
}


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
    yield from _attention_problems(ds.attn_implementation, is_cuda=is_cuda)
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
    if trains:
        yield from _training_problems(ds, is_cuda=is_cuda)


def _training_problems(ds: DeepSpeedConfig, *, is_cuda: bool) -> Iterator[str]:
    if ds.use_liger_kernel:
        yield from _package_problems("--use_liger_kernel", "liger_kernel", "liger-kernel", is_cuda)
    if is_cuda:
        return
    if ds.deepcompile:
        yield (
            "--deepcompile: DeepSpeed compiles for CUDA GPUs only, and torch sees no CUDA device. "
            "Run on a GPU, or leave --deepcompile out."
        )
    if ds.param_dtype == "fp16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        yield (
            "--ds.param_dtype fp16: this CPU does not train in fp16. Type --bf16 or "
            "--ds.param_dtype fp32, or run on a GPU."
        )
    if ds.param_dtype == "auto" and ds.grad_accum_dtype in ("bf16", "fp16"):
        yield (  # on a GPU, auto is the checkpoint's own type
            f"--grad_accum_dtype {ds.grad_accum_dtype} with fp32 parameters, as they are on a CPU: "
            "add --bf16 or leave it out."
        )


def _attention_problems(name: str, *, is_cuda: bool) -> Iterator[str]:
    """Yield why an attention cannot be had; names with a slash are kernels of the hub."""
    flag = f"--attn_implementation {name}"
    if "/" in name:
        yield from _package_problems(flag, "kernels", "kernels", is_cuda)
    elif name in GPU_ATTENTION:
        yield from _package_problems(flag, *GPU_ATTENTION[name], is_cuda)
    elif name not in OWN_ATTENTION:
        known = ", ".join((*OWN_ATTENTION, *GPU_ATTENTION))
        yield f"{flag} is not known. Type one of {known}, or a kernel's hub id."


def _package_problems(flag: str, package: str, pip_name: str, is_cuda: bool) -> Iterator[str]:
    lacks = [] if is_installed(package) else [f"the {pip_name} package is not installed"]
    if not is_cuda:
        lacks.append("torch sees no CUDA device")
    if lacks:
        remedy = f"Install {pip_name}" if is_cuda else "Run on a GPU"
        yield f"{flag}: {' and '.join(lacks)}. {remedy}, or leave {flag} out."


def keep_4bit_trainable(model: PreTrainedModel) -> None:
    """Keep a CPU's 4-bit weights as they are packed for training.

    In evaluation bitsandbytes (0.50) repacks them for a kernel without a backward pass and never
    turns back: later gradients would miss the path through the base.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def apply_liger(model: PreTrainedModel) -> None:
    """Put Liger's norms, rotary embeddings and gated MLPs under a loaded model.

    Its loss kernels are left out: they replace the model's forward pass, and the head here already
    works in chunks.
    """
    from liger_kernel.transformers import (  # noqa: PLC0415 - imports Triton
        _apply_liger_kernel_to_instance,
    )
    from liger_kernel.transformers.monkey_patch import (  # noqa: PLC0415
        MODEL_TYPE_TO_APPLY_LIGER_FN,
    )

    family = model.config.model_type
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"--use_liger_kernel: Liger has no kernels for model type {family!r}. Leave it out."
        )
    _apply_liger_kernel_to_instance(
        model=model, cross_entropy=False, fused_linear_cross_entropy=False
    )
