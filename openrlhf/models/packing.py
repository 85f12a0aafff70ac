"""Attention over packed rows: sequences laid end to end attend causally, each only to itself.

Registered with transformers as `PACKED_ATTENTION`; boundaries travel as the keyword `packed_row`.
On CUDA in half precision torch's variable-length kernel does it. Elsewhere sequences of near-equal
length form a batch and each batch is one causal SDPA call: padding stands behind a sequence, so no
mask is built. Suffixes: R rows of a batch, T tokens of a row, M padded slots, B sequences, L tokens
of each, h query heads, k key heads, D head size, Q queries, S keys.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from openrlhf.errors import ConfigError
from openrlhf.utils.packing import PackedBatch

logger = logging.getLogger(__name__)

PACKED_ATTENTION = "openrlhf_packed"
# A sequence joins a batch of longer ones when it fills at least this share of its slot.
# At 0.92 some 2.5 % of the slots are padding on log-normal lengths (0.8: 8 %), for more calls.
MIN_FILL = 0.92
# Queries per call where a band or a soft cap needs a mask: bounds the memory of long sequences.
QUERY_BLOCK = 1024
UNSUPPORTED_KWARGS = ("s_aux", "position_bias", "head_mask", "cache")


@dataclass(frozen=True)
class PaddedLayout:
    """How T row positions lie in padded batches of near-equal sequences."""

    batches: tuple[tuple[int, int], ...]  # (number of sequences, padded length) of each batch
    slot_to_row_M: (
        Tensor | None
    )  # (M,) row position a slot copies; None when row order already is slot order
    row_to_slot_T: Tensor | None  # (T,) the slot that holds each row position


@dataclass(frozen=True, eq=False)
class PackedRow:
    """Where the sequences of one row begin and end, on the host and on the device."""

    seq_lengths: tuple[int, ...]
    cu_seqlens: Tensor  # (B + 1,) int32
    # Of a part of a row that begins inside a sequence: keys of it that stand before the part.
    num_earlier: int = 0
    layers_seen: list[int] = field(
        default_factory=list
    )  # index of every layer that asked for this row

    @classmethod
    def of(cls, batch: PackedBatch) -> PackedRow:
        """The boundaries of a batch."""
        return cls(batch.seq_lengths, batch.cu_seqlens)

    @classmethod
    def of_lengths(
        cls, seq_lengths: Sequence[int], device: torch.device, *, num_earlier: int = 0
    ) -> PackedRow:
        """The boundaries of sequences of these lengths."""
        ends = torch.tensor((0, *seq_lengths)).cumsum(0, dtype=torch.int32)
        return cls(tuple(seq_lengths), ends.to(device), num_earlier)

    @cached_property
    def max_length(self) -> int:
        """Length of the longest sequence."""
        return max(self.seq_lengths)

    @cached_property
    def key_boundaries(self) -> tuple[Tensor, int]:
        """Where the keys of the sequences begin, (B + 1,) int32, and the largest number of them."""
        if not self.num_earlier:
            return self.cu_seqlens, self.max_length
        cu_keys = self.cu_seqlens + self.num_earlier
        cu_keys[0] = 0
        return cu_keys, max(self.max_length, self.seq_lengths[0] + self.num_earlier)

    @cached_property
    def rest(self) -> PackedRow | None:
        """The row without its first sequence; None where it has only one."""
        lengths = self.seq_lengths[1:]
        return PackedRow.of_lengths(lengths, self.cu_seqlens.device) if lengths else None

    def attention(
        self, q_ThD: Tensor, k_TkD: Tensor, v_TkD: Tensor, options: ScoreOptions
    ) -> Tensor:
        """Attention over this row -> (T, h, D)."""
        return row_attention(q_ThD, k_TkD, v_TkD, self, options)

    def kwargs(self) -> dict[str, PackedRow]:
        """Keywords that carry the row through a model to `PACKED_ATTENTION`."""
        return {"packed_row": self}

    def flash_kwargs(self) -> dict[str, Tensor | int]:
        """Keywords that carry the row through a model to transformers' own flash attention."""
        return {
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        }

    @cached_property
    def layout(self) -> PaddedLayout:
        """The padded layout, computed once for all layers."""
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
        return PaddedLayout(tuple(batches), None, None)
    row_to_slot_T = torch.empty(sum(seq_lengths), dtype=torch.int64)
    row_to_slot_T[slot_to_row_M[is_filled_M]] = is_filled_M.nonzero().squeeze(-1)
    return PaddedLayout(tuple(batches), slot_to_row_M.to(device), row_to_slot_T.to(device))


class _Pad(torch.autograd.Function):
    """Copy row positions into slots; a padding slot's gradient is zero, so a gather undoes it."""

    @staticmethod
    def forward(ctx: object, row: Tensor, slot_to_row_M: Tensor, row_to_slot_T: Tensor) -> Tensor:
        ctx.row_to_slot_T = row_to_slot_T
        return row.index_select(0, slot_to_row_M)

    @staticmethod
    def backward(ctx: object, grad_slots: Tensor) -> tuple[Tensor, None, None]:
        return grad_slots.index_select(0, ctx.row_to_slot_T), None, None


class _Unpad(torch.autograd.Function):
    """Copy filled slots back to their row positions."""

    @staticmethod
    def forward(ctx: object, slots: Tensor, row_to_slot_T: Tensor) -> Tensor:
        ctx.row_to_slot_T, ctx.num_slots = row_to_slot_T, slots.size(0)
        return slots.index_select(0, row_to_slot_T)

    @staticmethod
    def backward(ctx: object, grad_row: Tensor) -> tuple[Tensor, None]:
        grad_slots = grad_row.new_zeros(ctx.num_slots, *grad_row.shape[1:])
        return grad_slots.index_copy_(0, ctx.row_to_slot_T, grad_row), None


@dataclass(frozen=True)
class ScoreOptions:
    """What a model asks of its attention scores."""

    scale: float | None = None
    dropout: float = 0.0
    sliding_window: int | None = None  # tokens seen: a token itself and those just before it
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Return True if scores are the scaled products and nothing else."""
        return self.dropout == 0.0 and self.softcap is None


def causal_attention(
    q_BhQD: Tensor, k_BkSD: Tensor, v_BkSD: Tensor, options: ScoreOptions
) -> Tensor:
    """Causal attention of the last Q tokens of B sequences of S tokens each -> (B, h, Q, D)."""
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
    is_square = q_BhQD.size(-1) == v_BkSD.size(-1)  # unlike multi-head latent attention
    if q_BhQD.device.type == "cpu" and options.is_plain and is_square and window >= length:
        keys, values = repeat_heads(q_BhQD, k_BkSD), repeat_heads(q_BhQD, v_BkSD)
        return _TailAttention.apply(q_BhQD, keys, values, options.scale)
    block_size = max(QUERY_BLOCK, window) if window < length else QUERY_BLOCK
    attend = band_attention
    if num_earlier and torch.is_grad_enabled():  # masks of long keys are not kept, but made anew
        attend = partial(checkpoint, band_attention, use_reentrant=False)
    outputs = []
    for start in range(0, num_queries, block_size):
        end = min(start + block_size, num_queries)
        queries = range(num_earlier + start, num_earlier + end)
        keys = range(max(0, queries.start - window + 1), queries.stop)
        k, v = (x[:, :, keys.start : keys.stop] for x in (k_BkSD, v_BkSD))
        outputs.append(attend(q_BhQD[:, :, start:end], k, v, queries, keys, options))
    return torch.cat(outputs, dim=2)


class _TailAttention(torch.autograd.Function):
    """Causal attention of the last Q of S tokens on a CPU, without a mask.

    All see the keys before them in one call, and one another in a causal one; log-sum-exps merge
    the two. With the merged results the kernel's own backward gives the gradient of each part
    (arXiv 2310.01889).
    """

    @staticmethod
    def forward(
        ctx: Any, q_BhQD: Tensor, k_BhSD: Tensor, v_BhSD: Tensor, scale: float | None
    ) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        num_earlier = k_BhSD.size(2) - q_BhQD.size(2)
        (out, lse), (own_out, own_lse) = (
            attend(q_BhQD, k, v, 0.0, is_causal, scale=scale)
            for k, v, is_causal in _two_parts(k_BhSD, v_BhSD, num_earlier)
        )
        total_BhQ = torch.logaddexp(lse, own_lse)  # fp32 at least, whatever the queries are
        weight, own_weight = ((x - total_BhQ).exp()[..., None] for x in (lse, own_lse))
        merged = (out * weight + own_out * own_weight).to(q_BhQD.dtype)
        ctx.save_for_backward(q_BhQD, k_BhSD, v_BhSD, merged, total_BhQ)
        ctx.scale = scale
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        q, k, v, merged, total = ctx.saved_tensors
        parts = [
            backward(grad, q, k_part, v_part, merged, total, 0.0, is_causal, scale=ctx.scale)
            for k_part, v_part, is_causal in _two_parts(k, v, k.size(2) - q.size(2))
        ]
        (dq, *earlier), (own_dq, *own) = parts
        dk, dv = (torch.cat(pair, dim=2) for pair in zip(earlier, own, strict=True))
        return dq + own_dq, dk, dv, None


def _two_parts(k: Tensor, v: Tensor, num_earlier: int) -> list[tuple[Tensor, Tensor, bool]]:
    """Keys and values that all queries see, and those of the queries themselves, causal."""
    return [
        (k[:, :, :num_earlier], v[:, :, :num_earlier], False),
        (k[:, :, num_earlier:], v[:, :, num_earlier:], True),
    ]


def band_attention(
    q_BhQD: Tensor,
    k_BkSD: Tensor,
    v_BkSD: Tensor,
    queries: range,
    keys: range,
    options: ScoreOptions,
) -> Tensor:
    """Causal attention, in the sliding window, of queries and keys at these positions."""
    window = options.sliding_window or keys.stop
    is_seen = band_mask(queries, keys, window, q_BhQD.device)
    return masked_attention(q_BhQD, k_BkSD, v_BkSD, is_seen, options)


def masked_attention(
    q_BhQD: Tensor, k_BkSD: Tensor, v_BkSD: Tensor, is_seen: Tensor, options: ScoreOptions
) -> Tensor:
    """Attention under a boolean mask broadcast to (B, h, Q, S) -> (B, h, Q, D)."""
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
    """Keys or values with as many heads as the queries -> (B, h, S, D)."""
    num_repeats = q_BhQD.size(1) // x_BkSD.size(1)
    return x_BkSD if num_repeats == 1 else x_BkSD.repeat_interleave(num_repeats, dim=1)


def band_mask(query_range: range, key_range: range, window: int, device: torch.device) -> Tensor:
    """True where a query sees a key: its own position and the `window - 1` before it -> (Q, S)."""
    q_pos = torch.arange(query_range.start, query_range.stop, device=device)[:, None]
    k_pos = torch.arange(key_range.start, key_range.stop, device=device)[None]
    return (k_pos <= q_pos) & (k_pos > q_pos - window)


def unpacked_attention(
    q_RhQD: Tensor, k_RkSD: Tensor, v_RkSD: Tensor, mask: Tensor | None, options: ScoreOptions
) -> Tensor:
    """Attention of a plain batch whose queries are the last Q of S positions -> (R, h, Q, D)."""
    if mask is None:
        return causal_attention(q_RhQD, k_RkSD, v_RkSD, options)
    return masked_attention(q_RhQD, k_RkSD, v_RkSD, mask, options)


def grouped_attention(
    q_ThD: Tensor, k_TkD: Tensor, v_TkD: Tensor, layout: PaddedLayout, options: ScoreOptions
) -> Tensor:
    """Attention over a row as one call per batch of near-equal sequences -> (T, h, D)."""
    tensors = [q_ThD, k_TkD, v_TkD]
    if layout.slot_to_row_M is not None:
        tensors = [_Pad.apply(x, layout.slot_to_row_M, layout.row_to_slot_T) for x in tensors]
    sizes = [num_seqs * length for num_seqs, length in layout.batches]
    outputs = []
    for (num_seqs, length), *parts in zip(
        layout.batches, *(x.split(sizes) for x in tensors), strict=True
    ):
        q, k, v = (x.unflatten(0, (num_seqs, length)).transpose(1, 2) for x in parts)
        outputs.append(causal_attention(q, k, v, options).transpose(1, 2).flatten(0, 1))
    slots = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return slots if layout.row_to_slot_T is None else _Unpad.apply(slots, layout.row_to_slot_T)


@cache
def varlen_kernel() -> object | None:
    """torch's variable-length flash attention, or None where this torch has none that fits."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - not in every torch
    except ImportError:
        return None
    has_options = {"scale", "window_size", "enable_gqa"} <= set(
        inspect.signature(varlen_attn).parameters
    )
    logger.info(
        "packed attention on CUDA: %s", "torch varlen flash" if has_options else "grouped SDPA"
    )
    return varlen_attn if has_options else None


def can_use_varlen(q_ThD: Tensor, v_TkD: Tensor, options: ScoreOptions) -> bool:
    """Whether the flash kernel computes exactly what is asked."""
    return (
        q_ThD.is_cuda
        and q_ThD.dtype in (torch.float16, torch.bfloat16)
        and q_ThD.size(-1) == v_TkD.size(-1) <= 256
        and options.softcap is None
        and options.dropout == 0.0
        and varlen_kernel() is not None
    )


def row_attention(
    q_ThD: Tensor, k_TkD: Tensor, v_TkD: Tensor, row: PackedRow, options: ScoreOptions
) -> Tensor:
    """Attention over one packed row by the fastest exact kernel at hand -> (T, h, D).

    Keys and values begin `row.num_earlier` tokens before the queries.
    """
    if not can_use_varlen(q_ThD, v_TkD, options):
        return sdpa_row_attention(q_ThD, k_TkD, v_TkD, row, options)
    window = -1 if options.sliding_window is None else options.sliding_window - 1
    cu_keys, max_keys = row.key_boundaries
    return varlen_kernel()(
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
    """Compute `row_attention` by SDPA; a sequence that began earlier is a call of its own."""
    if not row.num_earlier:
        return grouped_attention(q_ThD, k_TkD, v_TkD, row.layout, options)
    first, key_end = row.seq_lengths[0], row.seq_lengths[0] + row.num_earlier
    parts = (q_ThD[:first], k_TkD[:key_end], v_TkD[:key_end])
    q, k, v = (x.transpose(0, 1)[None] for x in parts)
    output_ThD = causal_attention(q, k, v, options)[0].transpose(0, 1)
    if row.rest is None:
        return output_ThD
    parts = (q_ThD[first:], k_TkD[key_end:], v_TkD[key_end:])
    return torch.cat([output_ThD, grouped_attention(*parts, row.rest.layout, options)])


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
    """The attention function models call; answers (R, T, h, D) and no weights."""
    if used := [name for name in UNSUPPORTED_KWARGS if kwargs.get(name) is not None]:
        raise ConfigError(
            f"{type(module).__name__} needs {', '.join(used)}, unknown to packed attention: "
            "install flash-attn if the model supports it, or use another model."
        )
    options = ScoreOptions(scaling, dropout, sliding_window, softcap)
    if packed_row is None:
        return unpacked_attention(query, key, value, attention_mask, options).transpose(1, 2), None
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
    """No mask for packed rows, which come without one; the ordinary mask for padded batches."""
    if attention_mask is not None:
        return sdpa_mask(*args, attention_mask=attention_mask, use_vmap=use_vmap, **kwargs)
    if use_vmap:
        raise ConfigError(
            "This model's attention mask is not causal or a band; packed rows do not support it."
        )
    return None


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
AttentionMaskInterface.register(PACKED_ATTENTION, packed_attention_mask)
