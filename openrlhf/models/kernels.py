"""Kernels of other packages, put under a model on request: Liger, expert layers, 4-bit weights.

Says in one line what a request lacks here, before another library raises its own error; which
attention a model gets is decided in loading.py.
"""

from __future__ import annotations

import importlib.util

import torch
from transformers import PreTrainedModel

from openrlhf.errors import ConfigError


def is_installed(package: str) -> bool:
    """Whether a package could be imported."""
    return importlib.util.find_spec(package) is not None


def require_cuda_package(flag: str, package: str, *, pip_name: str, is_cuda: bool) -> None:
    """Raise ConfigError that names what `flag` lacks: the package, a GPU, or both."""
    lacks = [] if is_installed(package) else [f"the {pip_name} package is not installed"]
    if not is_cuda:
        lacks.append("torch sees no CUDA device")
    if lacks:
        remedy = f"Install {pip_name}" if is_cuda else "Run on a GPU"
        raise ConfigError(f"{flag}: {' and '.join(lacks)}. {remedy}, or leave {flag} out.")


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
    require_cuda_package(
        "--use_liger_kernel", "liger_kernel", pip_name="liger-kernel", is_cuda=is_cuda
    )
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
