"""What becomes of an attention that packed rows cannot have: flash attention where its GPU or its
package is not there, and the eager one. And which models have no packed rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from openrlhf.config.base import is_given
from openrlhf.config.run import RunConfig
from openrlhf.models.families import padding_note
from openrlhf.models.kernels import FLASH_2
from openrlhf.models.loading import has_flash_attention, load_config
from openrlhf.utils.logging import notice, say_notices

PATH = "ds.attn_implementation"


def say_attention(config: RunConfig, requested: str, paths: Iterable[str]) -> None:
    """Say that an attention is not what runs, and which of the models at `paths` is padded; the
    main rank calls.

    Flash attention is the default: without a GPU only who typed it is told.
    """
    named = list(dict.fromkeys(paths))
    notes = [
        padding_note(load_config(path, trust_remote_code=config.trust_remote_code), path)
        for path in named
    ]
    say_notices(filter(None, notes))
    if all(notes):
        return
    if requested == "eager":
        notice("eager attention is not for packed rows: they use torch's own (SDPA)")
    elif not torch.cuda.is_available():
        if is_given(config, PATH) and requested.startswith("flash"):
            notice(f"{requested} needs a GPU: packed rows use torch's own attention here (SDPA)")
    elif requested == FLASH_2 and not has_flash_attention():
        notice("flash-attn is not installed: packed rows use torch's own attention (SDPA)")
