"""Kernels of other packages, put under a model on request: Liger, expert layers, 4-bit weights.

Says in one line what a request lacks here, before data are read and before another library raises
its own error; which attention a model gets is decided in loading.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from openrlhf.config.common import DeepSpeedConfig, LoadConfig
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
    """Whether a package, or a module of one, could be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # the package that the module is of is not there, or broken
        return False


def require_cuda_package(flag: str, package: str, *, pip_name: str, is_cuda: bool) -> None:
    """Raise ConfigError that names what `flag` lacks: the package, a GPU, or both."""
    lacks = [] if is_installed(package) else [f"the {pip_name} package is not installed"]
    if not is_cuda:
        lacks.append("torch sees no CUDA device")
    if lacks:
        remedy = f"Install {pip_name}" if is_cuda else "Run on a GPU"
        raise ConfigError(f"{flag}: {' and '.join(lacks)}. {remedy}, or leave {flag} out.")


def check_here(ds: LoadConfig, *, is_cuda: bool | None = None) -> None:
    """Raise ConfigError that lists what these settings need and this machine does not have."""
    if is_cuda is None:
        check_gpus()
        is_cuda = torch.cuda.is_available()
    if problems := list(_missing(ds, is_cuda=is_cuda)):
        raise ConfigError(problems)


def _missing(ds: LoadConfig, *, is_cuda: bool) -> Iterator[str]:
    checks = [lambda: check_attention(ds.attn_implementation, is_cuda=is_cuda)]
    is_trained = isinstance(ds, DeepSpeedConfig)
    if is_trained:
        checks.append(lambda: check_fp16(ds.param_dtype, is_cuda=is_cuda))
    checks.append(lambda: check_experts(ds.experts_implementation))
    if is_trained and ds.use_liger_kernel:
        checks.append(lambda: check_liger(is_cuda=is_cuda))
    if is_trained and ds.deepcompile:
        checks.append(lambda: check_deepcompile(is_cuda=is_cuda))
    if ds.load_in_4bit:
        checks.append(check_4bit)
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield from error.problems
    if is_trained and not is_cuda and ds.param_dtype == "auto":  # a checkpoint's own on a GPU
        dtype = ds.grad_accum_dtype
        if dtype in ("bf16", "fp16"):
            yield (
                f"--grad_accum_dtype {dtype} with fp32 parameters, as they are on a CPU: "
                "add --bf16 or leave it out."
            )


def check_attention(name: str, *, is_cuda: bool) -> None:
    """Refuse an attention that there is not, or not here; names with a slash are kernels of the
    hub.
    """
    flag = f"--attn_implementation {name}"
    if "/" in name:
        require_cuda_package(flag, "kernels", pip_name="kernels", is_cuda=is_cuda)
    elif name in GPU_ATTENTION:
        module, pip_name = GPU_ATTENTION[name]
        require_cuda_package(flag, module, pip_name=pip_name, is_cuda=is_cuda)
    elif name not in OWN_ATTENTION:
        known = ", ".join((*OWN_ATTENTION, *GPU_ATTENTION))
        raise ConfigError(f"{flag} is not known. Type one of {known}, or a kernel's hub id.")


def check_fp16(param_dtype: str, *, is_cuda: bool) -> None:
    """DeepSpeed trains in fp16 on GPUs, and on CPUs whose matrix products know it."""
    if param_dtype == "fp16" and not is_cuda and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        raise ConfigError(
            "--ds.param_dtype fp16: this CPU does not train in fp16. Type --bf16 or "
            "--ds.param_dtype fp32, or run on a GPU."
        )


def check_liger(*, is_cuda: bool) -> None:
    """`--use_liger_kernel` needs its package, and Triton's GPU."""
    require_cuda_package(
        "--use_liger_kernel", "liger_kernel", pip_name="liger-kernel", is_cuda=is_cuda
    )


def check_deepcompile(*, is_cuda: bool) -> None:
    """`--deepcompile`: DeepSpeed 0.19.8 compiles collectives for CUDA only."""
    if not is_cuda:
        raise ConfigError(
            "--deepcompile: DeepSpeed compiles for CUDA GPUs only, and torch sees no CUDA device. "
            "Run on a GPU, or leave --deepcompile out."
        )


def check_4bit() -> None:
    """`--load_in_4bit` needs bitsandbytes, which has kernels for GPUs and slow ones for CPUs."""
    if not is_installed("bitsandbytes"):
        raise ConfigError(
            "--load_in_4bit: the bitsandbytes package is not installed. "
            "Install bitsandbytes, or leave --load_in_4bit out."
        )


def keep_4bit_trainable(model: PreTrainedModel) -> None:
    """Keep a CPU's 4-bit weights as they are packed for training.

    In evaluation bitsandbytes (0.50) repacks them for a kernel without a backward pass and never
    turns back: later gradients would miss the path through the base.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def check_experts(implementation: str | None) -> None:
    """Refuse the kernel of expert layers that has no backward pass in transformers."""
    if implementation == "deepgemm":
        raise ConfigError(
            "--ds.experts_implementation deepgemm: the kernel computes no gradients. "
            "Use grouped_mm."
        )


def apply_liger(model: PreTrainedModel, *, is_cuda: bool | None = None) -> None:
    """Put Liger's norms, rotary embeddings and gated MLPs under a loaded model.

    Its loss kernels are left out: they replace the model's forward pass, and the head here already
    works in chunks.
    """
    if is_cuda is None:
        is_cuda = torch.cuda.is_available()
    check_liger(is_cuda=is_cuda)
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
