"""Attention over packed rows: sequences laid end to end attend causally, each only to itself.

Registered with transformers as `PACKED_ATTENTION`; boundaries travel as the keyword `packed_row`.
On CUDA in half precision torch's variable-length kernel does it. Elsewhere sequences of near-equal
length form a batch and each batch is one causal SDPA call: padding stands behind a sequence, so no
mask is built. Suffixes: R rows of a batch, T tokens of a row, M padded slots, B sequences, L tokens
of each, h query heads, k key heads, D head size, Q queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from openrlhf.errors import ConfigError

PACKED_ATTENTION = "openrlhf_packed"
# A sequence joins a batch of longer ones when it fills at least this share of its slot.
# At 0.92 some 2.5 % of the slots are padding on log-normal lengths (0.8: 8 %), for more calls.
MIN_FILL = 0.92
# Queries per call where a band or a soft cap needs a mask: bounds the memory of long sequences.
QUERY_BLOCK = 1024
MAX_MASK_ELEMENTS = 1 << 24  # of a call that sees all keys: fewer queries beside very long ones
UNSUPPORTED_KWARGS = ("s_aux", "position_bias", "head_mask", "cache")


@dataclass(frozen=True)
class PaddedLayout:
    """How T row positions lie in padded batches of near-equal sequences."""

    batches: tuple[tuple[int, int], ...]  # (number of sequences, padded length) of each batch
    # Row position that a slot copies, (M,); None when row order already is slot order.
    slot_to_row_M: Tensor | None = None
    row_to_slot_T: Tensor | None = None  # the slot that holds each row position
    is_filled_M: Tensor | None = None  # False in padding slots


@dataclass(frozen=True, eq=False)
class PackedRow:
    """Where the sequences of one row begin and end, on the host and on the device."""

    seq_lengths: tuple[int, ...]
    cu_seqlens: Tensor  # (B + 1,) int32
    # Of a part of a row that begins inside a sequence: keys of it that stand before the part.
    num_earlier: int = 0
    layers_seen: list[int] = field(default_factory=list)  # those that asked for this row

    @classmethod
    def of_lengths(
        cls, seq_lengths: Sequence[int], device: torch.device, *, num_earlier: int = 0
    ) -> PackedRow:
        """Return the boundaries of sequences of these lengths."""
        ends = torch.tensor((0, *seq_lengths)).cumsum(0, dtype=torch.int32)
        return cls(tuple(seq_lengths), ends.to(device), num_earlier)

    @cached_property
    def max_length(self) -> int:
        """Return the length of the longest sequence."""
        return max(self.seq_lengths)

    @cached_property
    def key_boundaries(self) -> tuple[Tensor, int]:
        """Return where the keys of the sequences begin, (B + 1,) int32, and the most of one."""
        if not self.num_earlier:
            return self.cu_seqlens, self.max_length
        cu_keys = self.cu_seqlens + self.num_earlier
        cu_keys[0] = 0
        return cu_keys, max(self.max_length, self.seq_lengths[0] + self.num_earlier)

    @cached_property
    def whole(self) -> PackedRow:
        """Return the row with all tokens of its first sequence."""
        lengths = (self.seq_lengths[0] + self.num_earlier, *self.seq_lengths[1:])
        return PackedRow.of_lengths(lengths, self.cu_seqlens.device)

    def attention(
        self, q_ThD: Tensor, k_TkD: Tensor, v_TkD: Tensor, options: ScoreOptions
    ) -> Tensor:
        """Return the attention over this row -> (T, h, D)."""
        return row_attention(q_ThD, k_TkD, v_TkD, self, options)

    def kwargs(self, attention: str) -> dict[str, Any]:
        """Return keywords that carry the row through a model to `PACKED_ATTENTION`, or to
        transformers' own flash attention.
        """
        if attention == PACKED_ATTENTION:
            return {"packed_row": self}
        ends, most = self.cu_seqlens, self.max_length
        return {
            **{"cu_seq_lens_q": ends, "cu_seq_lens_k": ends},
            **{"max_length_q": most, "max_length_k": most},
        }

    @cached_property
    def layout(self) -> PaddedLayout:
        """Return the padded layout, computed once for all layers."""
        return padded_layout(self.seq_lengths, self.cu_seqlens.device)


def padded_layout(seq_lengths: Sequence[int], device: torch.device | str) -> PaddedLayout:
    """Sort sequences by length; cut them into batches where each fills MIN_FILL of its slot."""
    lengths_B = torch.tensor(seq_lengths)
    starts_B = lengths_B.cumsum(0) - lengths_B
    order = sorted(range(len(seq_lengths)), key=lambda i: -seq_lengths[i])
    members: list[list[int]] = []
    for i in order:
        if not members or seq_lengths[i] < MIN_FILL * seq_lengths[members[-1][0]]:
            members.append([])
        members[-1].append(i)

    batches, rows, fills = [], [], []
    for ids in members:
        padded_length = seq_lengths[ids[0]]
        offsets = torch.arange(padded_length)
        starts, lengths = starts_B[ids, None], lengths_B[ids, None]
        # A padding slot repeats its own sequence's last token: nothing crosses between sequences.
        rows.append((starts + offsets.minimum(lengths - 1)).flatten())
        fills.append((offsets < lengths).flatten())
        batches.append((len(ids), padded_length))

    slot_to_row_M, is_filled_M = torch.cat(rows), torch.cat(fills)
    if torch.equal(slot_to_row_M, torch.arange(sum(seq_lengths))):
        return PaddedLayout(tuple(batches))
    row_to_slot_T = torch.empty(sum(seq_lengths), dtype=torch.int64)
    row_to_slot_T[slot_to_row_M[is_filled_M]] = is_filled_M.nonzero().squeeze(-1)
    indices = (slot_to_row_M, row_to_slot_T, is_filled_M)
    return PaddedLayout(tuple(batches), *(index.to(device) for index in indices))


class _Reorder(torch.autograd.Function):
    """Copy rows to other places; the gradient of a row is that of the one place `back` names."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, back: Tensor, is_filled: Tensor | None
    ) -> Tensor:
        ctx.back, ctx.is_filled = back, is_filled
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.index_select(0, ctx.back)
        if ctx.is_filled is not None:  # nobody reads a padding slot
            grad.masked_fill_(~ctx.is_filled[:, None, None], 0.0)
        return grad, None, None, None


@dataclass(frozen=True)
class ScoreOptions:
    """What a model asks of its attention scores."""

    scale: float | None = None
    dropout: float = 0.0
    sliding_window: int | None = None  # tokens seen: a token itself and those just before it
    softcap: float | None = None


def causal_attention(
    q_BhQD: Tensor, k_BkSD: Tensor, v_BkSD: Tensor, options: ScoreOptions
) -> Tensor:
    """Return causal attention of the last Q tokens of B sequences of S tokens each -> (B, h, Q,
    D).
    """
    num_queries, length = q_BhQD.size(2), k_BkSD.size(2)
    num_earlier = length - num_queries
    window = options.sliding_window or length
    if options.softcap is None and window >= length and not num_earlier:
        if q_BhQD.is_cuda and q_BhQD.dtype == torch.float32:
            # The kernel for fp32 on CUDA has no grouped queries; without it SDPA forms all scores.
            k_BkSD, v_BkSD = repeat_heads(q_BhQD, k_BkSD), repeat_heads(q_BhQD, v_BkSD)
        return F.scaled_dot_product_attention(
            q_BhQD,
            k_BkSD,
            v_BkSD,
            is_causal=True,
            dropout_p=options.dropout,
            scale=options.scale,
            enable_gqa=q_BhQD.size(1) != k_BkSD.size(1),
        )
    block_size = max(QUERY_BLOCK, window)
    if window >= length:
        block_size = max(1, min(QUERY_BLOCK, MAX_MASK_ELEMENTS // length))
    outputs = []
    for start in range(0, num_queries, block_size):
        end = min(start + block_size, num_queries)
        queries = range(num_earlier + start, num_earlier + end)
        keys = range(max(0, queries.start - window + 1), queries.stop)
        k, v = (x[:, :, keys.start : keys.stop] for x in (k_BkSD, v_BkSD))
        outputs.append(band_attention(q_BhQD[:, :, start:end], k, v, queries, keys, options))
    return torch.cat(outputs, dim=2)


def band_attention(
    q_BhQD: Tensor,
    k_BkSD: Tensor,
    v_BkSD: Tensor,
    queries: range,
    keys: range,
    options: ScoreOptions,
) -> Tensor:
    """Return causal attention, in the sliding window, of queries and keys at these positions."""
    q_pos = torch.arange(queries.start, queries.stop, device=q_BhQD.device)[:, None]
    k_pos = torch.arange(keys.start, keys.stop, device=q_BhQD.device)[None]
    first_pos = q_pos - (options.sliding_window or keys.stop)
    is_seen_QS = (k_pos <= q_pos) & (k_pos > first_pos)
    return masked_attention(q_BhQD, k_BkSD, v_BkSD, is_seen_QS, options)


def masked_attention(
    q_BhQD: Tensor, k_BkSD: Tensor, v_BkSD: Tensor, is_seen: Tensor, options: ScoreOptions
) -> Tensor:
    """Return the attention under a boolean mask broadcast to (B, h, Q, S) -> (B, h, Q, D)."""
    keys, values = repeat_heads(q_BhQD, k_BkSD), repeat_heads(q_BhQD, v_BkSD)
    if options.softcap is None:
        return F.scaled_dot_product_attention(
            q_BhQD, keys, values, attn_mask=is_seen, dropout_p=options.dropout, scale=options.scale
        )
    scale = options.scale if options.scale is not None else q_BhQD.size(-1) ** -0.5
    scores = q_BhQD @ keys.transpose(-1, -2) * (scale / options.softcap)
    # The lowest finite value, not -inf: a query that sees nothing (padding) must not become NaN.
    unseen, upcast = torch.finfo(scores.dtype).min, torch.promote_types(scores.dtype, torch.float32)
    scores = (options.softcap * torch.tanh(scores)).masked_fill(~is_seen, unseen)
    weights = F.dropout(scores.softmax(-1, dtype=upcast).to(values.dtype), options.dropout)
    return weights @ values


def repeat_heads(q_BhQD: Tensor, x_BkSD: Tensor) -> Tensor:
    """Return keys or values with as many heads as the queries -> (B, h, S, D)."""
    num_repeats = q_BhQD.size(1) // x_BkSD.size(1)
    return x_BkSD if num_repeats == 1 else x_BkSD.repeat_interleave(num_repeats, dim=1)


def grouped_attention(
    q_ThD: Tensor, k_TkD: Tensor, v_TkD: Tensor, layout: PaddedLayout, options: ScoreOptions
) -> Tensor:
    """Return attention over a row, one call per batch of near-equal sequences -> (T, h, D)."""
    tensors = [q_ThD, k_TkD, v_TkD]
    to_slots, to_row = layout.slot_to_row_M, layout.row_to_slot_T
    if to_slots is not None:
        tensors = [_Reorder.apply(x, to_slots, to_row, None) for x in tensors]
    sizes = [num_seqs * length for num_seqs, length in layout.batches]
    outputs = []
    for (num_seqs, length), *parts in zip(
        layout.batches, *(x.split(sizes) for x in tensors), strict=True
    ):
        q, k, v = (x.unflatten(0, (num_seqs, length)).transpose(1, 2) for x in parts)
        outputs.append(causal_attention(q, k, v, options).transpose(1, 2).flatten(0, 1))
    slots = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if to_slots is None:
        return slots
    return _Reorder.apply(slots, to_row, to_slots, layout.is_filled_M)


def can_use_varlen(q_ThD: Tensor, v_TkD: Tensor, options: ScoreOptions) -> bool:
    """Return True if the flash kernel computes exactly what is asked."""
    return (
        q_ThD.is_cuda
        and q_ThD.dtype in (torch.float16, torch.bfloat16)
        and q_ThD.size(-1) == v_TkD.size(-1) <= 256
        and options.softcap is None
        and options.dropout == 0.0
    )


def row_attention(
    q_ThD: Tensor, k_TkD: Tensor, v_TkD: Tensor, row: PackedRow, options: ScoreOptions
) -> Tensor:
    """Return the attention over one packed row by the fastest exact kernel at hand -> (T, h, D).

    Keys and values begin `row.num_earlier` tokens before the queries.
    """
    if not can_use_varlen(q_ThD, v_TkD, options):
        return sdpa_row_attention(q_ThD, k_TkD, v_TkD, row, options)
    window = -1 if options.sliding_window is None else options.sliding_window - 1
    cu_keys, max_keys = row.key_boundaries
    return varlen_attn(
        q_ThD.contiguous(),
        k_TkD.contiguous(),
        v_TkD.contiguous(),
        row.cu_seqlens,
        cu_keys,
        row.max_length,
        max_keys,
        scale=options.scale,
        window_size=(window, 0),
        enable_gqa=q_ThD.size(1) != k_TkD.size(1),
    )


def sdpa_row_attention(
    q_ThD: Tensor, k_TkD: Tensor, v_TkD: Tensor, row: PackedRow, options: ScoreOptions
) -> Tensor:
    """Compute `row_attention` by SDPA; earlier tokens get queries too, which count for nothing."""
    if not row.num_earlier:
        return grouped_attention(q_ThD, k_TkD, v_TkD, row.layout, options)
    q_ShD = F.pad(q_ThD, (0, 0, 0, 0, row.num_earlier, 0))
    output_ShD = grouped_attention(q_ShD, k_TkD, v_TkD, row.whole.layout, options)
    return output_ShD[row.num_earlier :]


def packed_attention_forward(  # noqa: PLR0913 - the signature transformers calls
    module: nn.Module,
    query: Tensor,  # (R, h, T, D)
    key: Tensor,  # (R, k, S, D)
    value: Tensor,  # (R, k, S, D)
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    packed_row: PackedRow | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Return the attention, (R, T, h, D), and no weights; models call this."""
    if used := [name for name in UNSUPPORTED_KWARGS if kwargs.get(name) is not None]:
        raise ConfigError(
            f"{type(module).__name__} needs {', '.join(used)}, unknown to packed attention: "
            "install flash-attn if the model supports it, or use another model."
        )
    options = ScoreOptions(scaling, dropout, sliding_window, softcap)
    if packed_row is None:
        # A plain batch, as in generation: the queries are the last of the positions.
        states = (query, key, value)
        if attention_mask is None:
            return causal_attention(*states, options).transpose(1, 2), None
        return masked_attention(*states, attention_mask, options).transpose(1, 2), None
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ConfigError(
            f"{type(module).__name__} is not causal: packed rows need causal attention."
        )
    packed_row.layers_seen.append(getattr(module, "layer_idx", 0))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_row.attention(q, k, v, options)[None], None


def packed_attention_mask(
    *args: object,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: object,
) -> Tensor | None:
    """Return no mask for packed rows, which come without one; the ordinary mask for padded
    batches.
    """
    if attention_mask is not None:
        return sdpa_mask(*args, attention_mask=attention_mask, use_vmap=use_vmap, **kwargs)
    if use_vmap:
        raise ConfigError(
            "This model's attention mask is not causal or a band; packed rows do not support it."
        )
    return None


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
AttentionMaskInterface.register(PACKED_ATTENTION, packed_attention_mask)
