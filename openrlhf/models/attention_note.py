"""What becomes of flash attention where there is no GPU for it."""

from __future__ import annotations

import torch

from openrlhf.config.base import is_given
from openrlhf.config.run import RunConfig
from openrlhf.utils.logging import notice

PATH = "ds.attn_implementation"


def say_attention(config: RunConfig, requested: str) -> None:
    """Say that a flash attention somebody typed is not the one that runs; the main rank calls."""
    if is_given(config, PATH) and requested.startswith("flash") and not torch.cuda.is_available():
        notice(f"{requested} needs a GPU: packed rows use torch's own attention here (SDPA)")
