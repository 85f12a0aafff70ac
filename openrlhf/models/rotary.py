"""Rotary positions whose tables depend on the length of a sequence (dynamic NTK, LongRoPE): each
sequence gets those that it has alone.

Transformers makes one table for all positions it is given, by the longest of them, and dynamic NTK
keeps it for later calls: a sequence would be read in another way beside a longer neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from openrlhf.errors import ConfigError

Tables = tuple[Tensor, ...]  # cosines and sines, (R, T, D) each


def own_length(config: PretrainedConfig) -> int | None:
    """The tokens up to which all sequences have the same tables; None where all have."""
    text = config.get_text_config()
    scaling = getattr(text, "rope_parameters", None) or {}
    nested = [part for part in scaling.values() if isinstance(part, Mapping)]  # by type of layer
    limits = []
    for part in nested or [scaling]:
        if part.get("rope_type") == "longrope":
            limits.append(part["original_max_position_embeddings"])
        elif part.get("rope_type") == "dynamic":
            limits.append(text.max_position_embeddings)
    return min(limits, default=None)


def refuse_padded_rows(config: PretrainedConfig, name: str) -> None:
    """Raise ConfigError for a family that sees padded rows: their lengths are not told."""
    if (limit := own_length(config)) is not None:
        raise ConfigError(
            f"{name} has rotary positions that change beyond {limit} tokens, and its rows are "
            "padded: they would depend on the longest. Use another model, or another rope_type in "
            "its config.json."
        )


def give_each_its_own(model: nn.Module) -> None:
    """Let every rotary embedding of the model make its tables sequence by sequence."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", "")
        kinds = kinds.values() if isinstance(kinds, Mapping) else [kinds]
        if any("dynamic" in kind or kind == "longrope" for kind in kinds):
            module.forward = partial(_tables_of_each, module, module.forward)


def _tables_of_each(
    module: nn.Module,
    make: Callable[..., Tables],
    x: Tensor,
    position_ids: Tensor,  # (R, T): a sequence begins at each 0
    *args: object,
    **kwargs: object,
) -> Tables:
    if position_ids.dim() != 2:  # of an image's height and width
        return make(x, position_ids, *args, **kwargs)
    rows = []
    for row in position_ids.split(1):
        starts = (row[0] == 0).nonzero().flatten().tolist()
        bounds = sorted({0, *starts, row.size(1)})
        parts = []
        for start, end in pairwise(bounds):
            _forget_lengths(module)
            parts.append(make(x, row[:, start:end], *args, **kwargs))
        rows.append([torch.cat(tables, dim=1) for tables in zip(*parts, strict=True)])
    return tuple(torch.cat(tables) for tables in zip(*rows, strict=True))


def _forget_lengths(module: nn.Module) -> None:
    """Put the tables of short sequences back, which Transformers does not do at every length."""
    for name in [name for name in dir(module) if name.endswith("original_inv_freq")]:
        setattr(module, name.replace("original_", ""), getattr(module, name))
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        setattr(module, name, module.original_max_seq_len)
