"""Attention over packed rows: sequences laid end to end attend causally, each only to itself.

Registered with transformers as `PACKED_ATTENTION`; boundaries travel as the keyword `packed_row`.
On CUDA in half precision torch's variable-length kernel computes it; elsewhere SDPA does, in one
call for adjacent sequences of equal length. Where ranks share a row, the queries of each are its
two chunks: `ring` gathers keys and values of a few heads at a time, in a checkpoint, so that those
of one group are all that is ever held; `ulysses` exchanges tokens for heads (arXiv 2309.14509).
Suffixes: R rows, T tokens of a row, B sequences, h query heads, k key heads, D head size,
Q queries, S keys or a slice, P padded.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from openrlhf.errors import ConfigError
from openrlhf.utils.context_parallel import ContextGroup, RowSlice
from openrlhf.utils.packing import PackedBatch

PACKED_ATTENTION = "openrlhf_packed"
# Queries per call where a band or a soft cap needs a mask: bounds the memory of long sequences.
QUERY_BLOCK = 1024
MAX_FP32_LENGTH = 256  # of sequences whose attention is faster in fp32 than in 16 bits on a CPU
UNSUPPORTED_KWARGS = ("s_aux", "position_bias", "head_mask", "cache")


# Earlier kernels than torch 2.13's take grouped queries without being told.
ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True, eq=False)
class PackedRow:
    """The boundaries of the sequences of one row, on the host and on the device.

    Example: sequences of 3 and 2 tokens: `seq_lengths` (3, 2), `cu_seqlens` [0, 3, 5].
    """

    seq_lengths: tuple[int, ...]
    cu_seqlens: Tensor  # (B + 1,) int32
    # Of a part of a row that begins inside a sequence: keys of it that stand before the part.
    num_earlier: int = 0

    @classmethod
    def of_lengths(
        cls, seq_lengths: Sequence[int], device: torch.device, *, num_earlier: int = 0
    ) -> "PackedRow":
        """Return the boundaries of sequences of these lengths."""
        ends = torch.tensor((0, *seq_lengths)).cumsum(0, dtype=torch.int32)
        return cls(tuple(seq_lengths), ends.to(device), num_earlier)

    @cached_property
    def max_length(self) -> int:
        """Return the length of the longest sequence."""
        return max(self.seq_lengths)

    @cached_property
    def key_boundaries(self) -> tuple[Tensor, int]:
        """Return the offsets of the sequences' keys, (B + 1,) int32, and the largest number
        of one.
        """
        if not self.num_earlier:
            return self.cu_seqlens, self.max_length
        cu_keys = self.cu_seqlens + self.num_earlier
        cu_keys[0] = 0
        return cu_keys, max(self.max_length, self.seq_lengths[0] + self.num_earlier)

    def attention(
        self, q_ThD: Tensor, k_TkD: Tensor, v_TkD: Tensor, options: "ScoreOptions"
    ) -> Tensor:
        """Return the attention over this row by the fastest exact kernel at hand -> (T, h, D).

        Keys and values begin `num_earlier` tokens before the queries.
        """
        if not can_use_varlen(q_ThD, v_TkD, options):
            return sdpa_row_attention(q_ThD, k_TkD, v_TkD, self, options)
        window = -1 if options.sliding_window is None else options.sliding_window - 1
        cu_keys, max_keys = self.key_boundaries
        return varlen_attn(
            q_ThD.contiguous(),
            k_TkD.contiguous(),
            v_TkD.contiguous(),
            self.cu_seqlens,
            cu_keys,
            self.max_length,
            max_keys,
            scale=options.scale,
            window_size=(window, 0),
            **({"enable_gqa": q_ThD.size(1) != k_TkD.size(1)} if ASKS_FOR_GROUPS else {}),
        )

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


@dataclass(frozen=True)
class ScoreOptions:
    """Attention settings of a model.

    Example: `ScoreOptions(scale=0.125, sliding_window=4096)`: 4096 tokens are seen.
    """

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
    window = options.sliding_window or length
    if options.softcap is None and window >= length == num_queries:
        return masked_attention(q_BhQD, k_BkSD, v_BkSD, None, options)
    outputs = []
    for start in range(length - num_queries, length, QUERY_BLOCK):
        first, end = max(0, start - window + 1), min(start + QUERY_BLOCK, length)
        q_pos = torch.arange(start, end, device=q_BhQD.device)[:, None]
        k_pos = torch.arange(first, end, device=q_BhQD.device)
        is_seen_QS = (k_pos <= q_pos) & (k_pos > q_pos - window)
        q = q_BhQD[:, :, start - length : end - length or None]
        k, v = (x[:, :, first:end] for x in (k_BkSD, v_BkSD))
        outputs.append(masked_attention(q, k, v, is_seen_QS, options))
    return torch.cat(outputs, dim=2)


def masked_attention(
    q_BhQD: Tensor, k_BkSD: Tensor, v_BkSD: Tensor, is_seen: Tensor | None, options: ScoreOptions
) -> Tensor:
    """Return the attention under a boolean mask broadcast to (B, h, Q, S), or under a causal one
    where there is none -> (B, h, Q, D).
    """
    if q_BhQD.size(2) == 1 and is_seen is not None and not (options.softcap or options.dropout):
        return one_query_attention(q_BhQD, k_BkSD, v_BkSD, is_seen, options.scale)
    num_groups = q_BhQD.size(1) // k_BkSD.size(1)
    if num_groups > 1 and (q_BhQD.is_cuda or options.softcap is not None):
        # SDPA has grouped queries on CUDA for few types; for the others it forms all scores.
        k_BkSD, v_BkSD = (x.repeat_interleave(num_groups, dim=1) for x in (k_BkSD, v_BkSD))
    if options.softcap is None or is_seen is None:
        return F.scaled_dot_product_attention(
            q_BhQD,
            k_BkSD,
            v_BkSD,
            attn_mask=is_seen,
            is_causal=is_seen is None,
            dropout_p=options.dropout,
            scale=options.scale,
            enable_gqa=q_BhQD.size(1) != k_BkSD.size(1),
        )
    scale = options.scale if options.scale is not None else q_BhQD.size(-1) ** -0.5
    scores = q_BhQD @ k_BkSD.transpose(-1, -2) * (scale / options.softcap)
    # The lowest finite value, not -inf: a query that sees nothing (padding) must not become NaN.
    unseen, upcast = torch.finfo(scores.dtype).min, torch.promote_types(scores.dtype, torch.float32)
    scores = (options.softcap * torch.tanh(scores)).masked_fill(~is_seen, unseen)
    weights = F.dropout(scores.softmax(-1, dtype=upcast).to(v_BkSD.dtype), options.dropout)
    return weights @ v_BkSD


def one_query_attention(
    q_Bh1D: Tensor, k_BkSD: Tensor, v_BkSD: Tensor, is_seen: Tensor, scale: float | None
) -> Tensor:
    """Return the attention of the next token of each row under a mask that holds for all heads ->
    (B, h, 1, D). Grouped queries are rows of one product, in fp32: on a CPU SDPA takes four to
    seven times as long in 16 bits (torch 2.13, 48 to 300 keys), and elsewhere it copies keys for
    each query of a group.
    """
    upcast = torch.promote_types(q_Bh1D.dtype, torch.float32)
    q_BkGD = q_Bh1D.unflatten(1, (k_BkSD.size(1), -1)).squeeze(3).to(upcast)
    scores_BkGS = q_BkGD * (scale or q_Bh1D.size(-1) ** -0.5) @ k_BkSD.to(upcast).transpose(-1, -2)
    # The lowest finite value, not -inf: a query that sees nothing (padding) must not become NaN.
    weights = scores_BkGS.masked_fill(~is_seen, torch.finfo(upcast).min).softmax(-1)
    return (weights @ v_BkSD.to(upcast)).flatten(1, 2).unsqueeze(2).to(v_BkSD.dtype)


def can_use_varlen(q_ThD: Tensor, v_TkD: Tensor, options: ScoreOptions) -> bool:
    """Return True if the flash kernel computes exactly what is asked."""
    return (
        q_ThD.is_cuda
        and q_ThD.dtype in (torch.float16, torch.bfloat16)
        and q_ThD.size(-1) == v_TkD.size(-1) <= 256
        and options.softcap is None
        and options.dropout == 0.0
    )


def is_faster_in_fp32(q_ThD: Tensor, row: PackedRow) -> bool:
    """Return True for short sequences in 16 bits on a CPU: SDPA's backward takes twice as long as
    in fp32 there, and its error is twice as large (torch 2.13, 40 to 66 tokens).
    """
    return not q_ThD.is_cuda and q_ThD.dtype.itemsize == 2 and row.max_length <= MAX_FP32_LENGTH


def sdpa_row_attention(
    q_ThD: Tensor, k_TkD: Tensor, v_TkD: Tensor, row: PackedRow, options: ScoreOptions
) -> Tensor:
    """Return the attention over a row by SDPA, in one call for adjacent sequences of equal
    length.
    """
    if is_faster_in_fp32(q_ThD, row):
        states = (x.float() for x in (q_ThD, k_TkD, v_TkD))
        return sdpa_row_attention(*states, row, options).to(q_ThD.dtype)
    key_lengths = (row.seq_lengths[0] + row.num_earlier, *row.seq_lengths[1:])
    pairs = list(zip(row.seq_lengths, key_lengths, strict=True))
    runs = [(lengths, len(list(run))) for lengths, run in groupby(pairs)]
    parts = zip(
        runs,
        q_ThD.split([num_queries * n for (num_queries, _), n in runs]),
        k_TkD.split([num_keys * n for (_, num_keys), n in runs]),
        v_TkD.split([num_keys * n for (_, num_keys), n in runs]),
        strict=True,
    )
    outputs = []
    for (_, n), *states in parts:
        q, k, v = (x.unflatten(0, (n, -1)).transpose(1, 2) for x in states)
        outputs.append(causal_attention(q, k, v, options).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


@dataclass(frozen=True, eq=False)
class SharedRow(PackedRow):
    """A padded row of which this rank holds a slice; the padding is a sequence of its own.

    Example: sequences of 3 and 2 tokens on two ranks: `seq_lengths` (3, 2, 3), of which rank 0
    holds the positions 0, 1, 6 and 7.
    """

    own: RowSlice = field(kw_only=True)

    @classmethod
    def share(cls, batch: PackedBatch, context: ContextGroup) -> "SharedRow":
        """Pad a batch for the ranks of a group."""
        own = RowSlice(context, len(batch.token_ids))
        num_padding = own.padded_length - own.num_tokens
        lengths = (*batch.seq_lengths, *([num_padding] if num_padding else []))
        row = PackedRow.of_lengths(lengths, batch.token_ids.device)
        return cls(row.seq_lengths, row.cu_seqlens, own=own)

    def slice_of(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return token ids and positions of the slice, (S,) each."""
        num_padding = self.own.padded_length - self.own.num_tokens
        index_S = self.own.positions_S.to(batch.token_ids.device)
        padding = torch.arange(num_padding, device=index_S.device)
        ids_P = torch.cat([batch.token_ids, torch.zeros_like(padding)])
        return ids_P[index_S], torch.cat([batch.position_ids, padding])[index_S]

    @cached_property
    def pieces(self) -> list[tuple[slice, PackedRow]]:
        """Return for each chunk the keys that its queries see, and its own boundaries."""
        device = self.cu_seqlens.device
        return [chunk_of_row(self.seq_lengths, chunk, device) for chunk in self.own.chunks]

    def attention(
        self, q_ThD: Tensor, k_TkD: Tensor, v_TkD: Tensor, options: ScoreOptions
    ) -> Tensor:
        """Return the attention of the slice's tokens to all those before them -> (S, h, D)."""
        if self.own.context.mode == "ulysses":
            heads = [self.own.to_heads(x) for x in (q_ThD, k_TkD, v_TkD)]
            return self.own.to_tokens(super().attention(*heads, options))
        stride = min(self.own.context.head_stride, k_TkD.size(1))
        num_queries = q_ThD.size(1) // k_TkD.size(1) * stride
        groups = zip(
            q_ThD.split(num_queries, dim=1),
            torch.cat([k_TkD, v_TkD], dim=-1).split(stride, dim=1),
            strict=True,
        )
        sizes = (k_TkD.size(-1), v_TkD.size(-1))
        outputs = [
            checkpoint(self._ring_attention, q, kv, sizes, options, use_reentrant=False)
            for q, kv in groups
        ]
        return torch.cat(outputs, dim=1)

    def _ring_attention(
        self, q_ShD: Tensor, kv_SkD: Tensor, sizes: Sequence[int], options: ScoreOptions
    ) -> Tensor:
        k_PkD, v_PkD = self.own.gather(kv_SkD).split(sizes, dim=-1)
        outputs = [
            row.attention(q, k_PkD[seen], v_PkD[seen], options)
            for q, (seen, row) in zip(q_ShD.chunk(2), self.pieces, strict=True)
        ]
        return torch.cat(outputs)


def chunk_of_row(
    seq_lengths: Sequence[int], chunk: range, device: torch.device
) -> tuple[slice, PackedRow]:
    """Return the keys that a chunk of a row sees, and the sequences of the chunk.

    Of lengths 4, 6 and the chunk 2:7: keys 0:7, sequences of 2 and 3 tokens, the first with 2
    earlier keys.
    """
    lengths, first_key, start = [], chunk.start, 0
    for length in seq_lengths:
        own = range(max(start, chunk.start), min(start + length, chunk.stop))
        if own:
            lengths.append(len(own))
            first_key = min(first_key, start)
        start += length
    num_earlier = chunk.start - first_key
    row = PackedRow.of_lengths(lengths, device, num_earlier=num_earlier)
    return slice(first_key, chunk.stop), row


@dataclass(frozen=True, eq=False)
class ReadStates:
    """Hidden states at N places of a row; of a shared row those n that this rank holds.

    A rank that holds none has one state all the same, which counts for nothing: modules are called
    on every rank, as ZeRO-3 needs it.

    Example: of three places this rank holds the first and the last: `hidden_nH` (2, H), `here_n`
    [0, 2], `num_places` 3.
    """

    hidden_nH: Tensor
    aux_loss: Tensor | None = None  # (B,) router loss of each sequence
    own: RowSlice | None = None  # None: the row is not shared
    here_n: Tensor | None = None  # which of the N places are here
    num_places: int = 0

    def select(self, x_N: Tensor) -> Tensor:
        """Return the part of (N, ...) that belongs to the states on this rank."""
        if self.here_n is None:
            return x_N
        return x_N[self.here_n] if len(self.here_n) else x_N.new_zeros(1, *x_N.shape[1:])

    def spread(self, x_n: Tensor) -> Tensor:
        """Return the results of all places, (N, ...), on every rank; each keeps its gradient."""
        if self.own is None or self.here_n is None:
            return x_n
        return self.own.spread(x_n[: len(self.here_n)], self.here_n, self.num_places)

    def total(self, x: Tensor) -> Tensor:
        """Sum over the ranks of a sum over the states."""
        if self.own is None or self.here_n is None:
            return x
        return self.own.total(x if len(self.here_n) else x * 0.0)


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
            "name a kernel that knows them with --attn_implementation, or use another model."
        )
    options = ScoreOptions(scaling, dropout, sliding_window, softcap)
    if packed_row is None:
        # A plain batch, as in generation: the queries are the last of the positions.
        states = (query, key, value)
        if attention_mask is None:
            output = causal_attention(*states, options)
        else:
            output = masked_attention(*states, attention_mask, options)
        return output.transpose(1, 2).contiguous(), None  # some models take views of it
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ConfigError(
            f"{type(module).__name__} is not causal: packed rows need causal attention."
        )
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
