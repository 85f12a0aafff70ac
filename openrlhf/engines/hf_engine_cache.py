"""A key-value cache of rows that share their columns, for decoding with plain transformers models.

All rows end at the same column: a prompt is written right-aligned behind it, and whatever lies left
of a row's own beginning is masked. So a step writes one column for all rows, without copying what
is there. Suffixes: R rows, h key heads, L columns, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

DECODE_ATTENTION = "openrlhf_decode"
COLUMN_STEP = 256  # columns added at once when the cache is full


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer; columns [begin, end) are in use."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = 0
        self.end = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the storage of the first keys (R, h, L, D) and values."""
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns (R, h, new, D); answers all columns in use."""
        end = self.end + key_states.shape[2]
        self.keys = _with_room(self.keys, key_states, end)
        self.values = _with_room(self.values, value_states, end)
        self.is_initialized = True
        self.keys[:, :, self.end : end] = key_states
        self.values[:, :, self.end : end] = value_states
        self.end = end
        return self.keys[:, :, self.begin : end], self.values[:, :, self.begin : end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of columns a query of this length will see, and where they begin."""
        return self.end - self.begin + query_length, 0

    def get_seq_length(self) -> int:
        """Number of columns in use."""
        return self.end - self.begin

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def take_rows(self, index: Tensor) -> None:
        """Keep these rows, in this order; columns that are not in use go."""
        self.keys = self.keys[:, :, self.begin : self.end].index_select(0, index)
        self.values = self.values[:, :, self.begin : self.end].index_select(0, index)
        self.begin, self.end = 0, self.end - self.begin

    def join(self, other: SlotLayer) -> None:
        """Put the rows of another cache below these, right-aligned."""
        width = max(self.end - self.begin, other.end - other.begin)
        self.keys = torch.cat(
            [_aligned(self, self.keys, width), _aligned(other, other.keys, width)]
        )
        self.values = torch.cat(
            [_aligned(self, self.values, width), _aligned(other, other.values, width)]
        )
        self.begin, self.end = 0, width


class SlotCache(Cache):
    """The cache of all layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[SlotLayer() for _ in range(num_layers)])

    @property
    def width(self) -> int:
        """Number of columns in use."""
        return self.layers[0].end - self.layers[0].begin

    def drop_left(self, num_columns: int) -> None:
        """Columns at the left that no row needs any more go out of use."""
        for layer in self.layers:
            layer.begin += num_columns

    def take_rows(self, index: Tensor) -> None:
        """Keep these rows, in this order."""
        for layer in self.layers:
            layer.take_rows(index)

    def join(self, other: SlotCache) -> None:
        """Put the rows of another cache below these, right-aligned."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs)


class TokenHistory:
    """In the place of a cache, for models whose state is not one of keys and values: the tokens
    themselves, (R, L), right-aligned. Every step goes over them again.
    """

    def __init__(self) -> None:
        self.tokens_RL = torch.empty(0, 0, dtype=torch.int64)

    @property
    def width(self) -> int:
        """Number of columns in use."""
        return self.tokens_RL.shape[1]

    def append(self, tokens_RL: Tensor) -> None:
        """Put new columns at the end."""
        self.tokens_RL = torch.cat([self.tokens_RL, tokens_RL], dim=1) if self.width else tokens_RL

    def drop_left(self, num_columns: int) -> None:
        """Columns at the left that no row needs any more go."""
        self.tokens_RL = self.tokens_RL[:, num_columns:]

    def take_rows(self, index: Tensor) -> None:
        """Keep these rows, in this order."""
        self.tokens_RL = self.tokens_RL[index]

    def join(self, other: TokenHistory) -> None:
        """Put the rows of another history below these, right-aligned."""
        width = max(self.width, other.width)
        self.tokens_RL = torch.cat(
            [F.pad(h.tokens_RL, (width - h.width, 0)) for h in (self, other)]
        )


def _with_room(storage: Tensor | None, states: Tensor, end: int) -> Tensor:
    """Storage (R, h, L, D) with L >= end."""
    if storage is not None and storage.shape[2] >= end:
        return storage
    rows, heads, _, size = states.shape
    grown = states.new_empty(rows, heads, end + COLUMN_STEP, size)
    if storage is not None:
        grown[:, :, : storage.shape[2]] = storage
    return grown


def _aligned(layer: SlotLayer, storage: Tensor, width: int) -> Tensor:
    """The columns in use with zeros to their left, `width` in all."""
    return F.pad(storage[:, :, layer.begin : layer.end], (0, 0, width - layer.get_seq_length(), 0))


def register_decode_attention(fallback: str) -> str:
    """Make attention for one-token queries known to transformers; answers its name.

    Longer queries, and calls with what it cannot do (soft caps, sinks), go to `fallback`.
    """
    name = f"{DECODE_ATTENTION}_{fallback}"

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        if query.shape[2] != 1 or any(kwargs.get(k) is not None for k in ("softcap", "s_aux")):
            other = ALL_ATTENTION_FUNCTIONS[fallback]
            return other(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return decode_attention(query, key, value, attention_mask, scaling=scaling), None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None
) -> Tensor:
    """Attention of one-token queries (R, H, 1, D) over keys (R, h, L, D); answers (R, 1, H, D).

    The query heads that share a key head are laid out as that head's queries: no key is repeated.
    """
    rows, num_heads, _, size = query.shape
    grouped = query.view(rows, key.shape[1], num_heads // key.shape[1], size)
    if mask is not None:
        mask = mask.expand(-1, -1, grouped.shape[2], -1) if mask.shape[2] == 1 else mask
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, 1, num_heads, value.shape[-1])
