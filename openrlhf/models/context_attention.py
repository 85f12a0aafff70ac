"""Attention over a packed row that several ranks share, and where its results are read.

A rank's queries are its two chunks of the row. `ring` gathers the keys and values of a few heads at
a time from all ranks, in a checkpoint, so that the row of one group of heads is all that is ever
held; `ulysses` exchanges tokens for heads (arXiv 2309.14509). The kernels are those of packing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openrlhf.models.packing import PackedRow, ScoreOptions, row_attention
from openrlhf.utils.context_parallel import ContextGroup, RowSlice
from openrlhf.utils.packing import PackedBatch


@dataclass(frozen=True, eq=False)
class SharedRow(PackedRow):
    """A padded row of which this rank holds a slice; the padding is a sequence of its own."""

    own: RowSlice = field(kw_only=True)

    @classmethod
    def share(cls, batch: PackedBatch, context: ContextGroup) -> SharedRow:
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
            return self.own.to_tokens(row_attention(*heads, self, options))
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
            row_attention(q, k_PkD[seen], v_PkD[seen], row, options)
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
    """

    hidden_nH: Tensor
    aux_loss: Tensor | None = None  # (B,) router loss of each sequence
    own: RowSlice | None = None  # None: the row is not shared
    here_n: Tensor | None = None  # which of the N places are here
    num_places: int = 0

    @classmethod
    def of_slice(
        cls, own: RowSlice, hidden_SH: Tensor, positions_N: Tensor, aux_loss: Tensor | None
    ) -> ReadStates:
        """Read the row positions that the slice holds."""
        here_n, index_n = own.find(positions_N)
        if not len(index_n):
            index_n = index_n.new_zeros(1)
        return cls(hidden_SH[index_n], aux_loss, own, here_n, len(positions_N))

    @property
    def is_empty(self) -> bool:
        """Return True if this rank holds none of the places."""
        return self.here_n is not None and not len(self.here_n)

    def select(self, x_N: Tensor) -> Tensor:
        """Return the part of (N, ...) that belongs to the states on this rank."""
        if self.here_n is None:
            return x_N
        return x_N.new_zeros(1, *x_N.shape[1:]) if self.is_empty else x_N[self.here_n]

    def spread(self, x_n: Tensor) -> Tensor:
        """Return the results of all places, (N, ...), on every rank; each keeps its gradient."""
        if self.own is None or self.here_n is None:
            return x_n
        return self.own.spread(x_n[: len(self.here_n)], self.here_n, self.num_places)

    def total(self, x: Tensor) -> Tensor:
        """Sum over the ranks of a sum over the states."""
        if self.own is None:
            return x
        return self.own.total(x * 0.0 if self.is_empty else x)
