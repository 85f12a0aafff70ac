"""Whether vLLM is there, asked before anything heavy starts; does not import it."""

from __future__ import annotations

from importlib.util import find_spec

from openrlhf.errors import ConfigError


def check_vllm_is_installed(*, instead: str) -> None:
    """Raise ConfigError where it is not; `instead` is what to type to do without it."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is to generate, and it is not installed. Type pip install '.[vllm]' in the "
            f"checkout (make install on a machine without GPUs), or {instead}."
        )
