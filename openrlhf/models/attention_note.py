"""What becomes of an attention that packed rows cannot have: flash attention where its GPU or its
package is not there, and the eager one.
"""

from __future__ import annotations

import torch

from openrlhf.config.base import is_given
from openrlhf.config.run import RunConfig
from openrlhf.models.kernels import FLASH_2
from openrlhf.models.loading import has_flash_attention
from openrlhf.utils.logging import notice

PATH = "ds.attn_implementation"


def say_attention(config: RunConfig, requested: str) -> None:
    """Say that an attention is not what runs; the main rank calls.

    Flash attention is the default: without a GPU only who typed it is told.
    """
    if requested == "eager":
        notice("eager attention is not for packed rows: they use torch's own (SDPA)")
    elif not torch.cuda.is_available():
        if is_given(config, PATH) and requested.startswith("flash"):
            notice(f"{requested} needs a GPU: packed rows use torch's own attention here (SDPA)")
    elif requested == FLASH_2 and not has_flash_attention():
        notice("flash-attn is not installed: packed rows use torch's own attention (SDPA)")
