"""Context parallelism: the ranks of a group share every packed row, each holds a slice of it.

A row is padded to 2c chunks of one size; rank r of c holds chunks r and 2c - 1 - r, so that causal
attention costs every rank the same (arXiv 2407.21783, section 3.3.2). Every rank computes the same
loss of the whole row, and its gradient reaches the slice of the rank: summed over the ranks it is
the gradient of one rank that holds all. Suffixes: S tokens of a slice, P = c * S tokens of the
padded row, N places that are read, n of them in the slice of this rank.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share rows, and how their attention meets.

    Example: `ContextGroup(group, "ring", head_stride=2)`
    """

    group: dist.ProcessGroup
    mode: Literal["ring", "ulysses"] = "ring"
    head_stride: int = 1  # key heads that are gathered at a time

    @cached_property
    def size(self) -> int:
        """Return the number of ranks."""
        return dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        """Return the place of this rank in the group."""
        return dist.get_rank(self.group)


@dataclass(frozen=True, eq=False)
class RowSlice:
    """The part of a row of `num_tokens` tokens that this rank holds: two chunks.

    Example: `RowSlice(context, num_tokens=10)` on rank 0 of 2: the positions 0 to 2 and 9 to 11, of
    which the last two are padding.
    """

    context: ContextGroup
    num_tokens: int

    @property
    def chunk_size(self) -> int:
        """Return the tokens of a chunk."""
        return -(-self.num_tokens // (2 * self.context.size))

    @property
    def padded_length(self) -> int:
        """Return the tokens of the padded row, P."""
        return 2 * self.context.size * self.chunk_size

    @property
    def chunks(self) -> tuple[range, range]:
        """Return the row positions of the two chunks."""
        size, last = self.chunk_size, 2 * self.context.size - 1
        first, second = (k * size for k in (self.context.rank, last - self.context.rank))
        return range(first, first + size), range(second, second + size)

    @cached_property
    def positions_S(self) -> Tensor:
        """Return the row position of every token of the slice, (S,) int64."""
        return torch.cat([torch.arange(part.start, part.stop) for part in self.chunks])

    def find(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of those row positions that are in the slice, (n,), and their places
        in it, (n,).
        """
        chunks_N, offsets_N = positions_N // self.chunk_size, positions_N % self.chunk_size
        first, second = (part.start // self.chunk_size for part in self.chunks)
        here_n = ((chunks_N == first) | (chunks_N == second)).nonzero().squeeze(-1)
        return here_n, (offsets_N + (chunks_N == second) * self.chunk_size)[here_n]

    def gather(self, x_S: Tensor) -> Tensor:
        """Lay the slices of all ranks, (S, ...) each, in row order -> (P, ...); the gradient of a
        slice is the sum of what all ranks' losses say of it.
        """
        x_cS = x_S.expand(self.context.size, *x_S.shape)
        return self.row_order(_exchange(x_cS, self.context.group))

    def to_heads(self, x_ShD: Tensor) -> Tensor:
        """Turn all heads of the slice into this rank's share of the heads of the row: (P, h/c, D)
        (arXiv 2309.14509).
        """
        x_cShD = x_ShD.unflatten(1, (self.context.size, -1)).transpose(0, 1)
        return self.row_order(_exchange(x_cShD, self.context.group))

    def to_tokens(self, x_PhD: Tensor) -> Tensor:
        """Undo `to_heads`: from (P, h/c, D) to (S, h, D)."""
        x_cShD = _exchange(self.rank_order(x_PhD), self.context.group)
        return x_cShD.transpose(0, 1).flatten(1, 2)

    def spread(self, x_n: Tensor, index_n: Tensor, size: int) -> Tensor:
        """Put what every rank has at its places together -> (size, ...), the same on all ranks."""
        if x_n.dtype == torch.bool:
            return self.spread(x_n.int(), index_n, size).bool()
        return self.total(x_n.new_zeros(size, *x_n.shape[1:]).index_copy(0, index_n, x_n))

    def total(self, x: Tensor) -> Tensor:
        """Sum of a number over the ranks, each with the gradient of its own part."""
        return _Total.apply(x, self.context.group)

    def row_order(self, x_cS: Tensor) -> Tensor:
        """Turn the slices of all ranks, (c, S, ...), into the row, (P, ...)."""
        first, second = x_cS.unflatten(1, (2, self.chunk_size)).unbind(1)
        return torch.cat([first, second.flip(0)]).flatten(0, 1)

    def rank_order(self, x_P: Tensor) -> Tensor:
        """Turn the row, (P, ...), into the slices of all ranks, (c, S, ...)."""
        first, second = x_P.unflatten(0, (2, self.context.size, self.chunk_size)).unbind(0)
        return torch.stack([first, second.flip(0)], dim=1).flatten(1, 2)


def _exchange(x_c: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part k to rank k; return the parts that came, (c, ...). The gradient goes back alike."""
    x_c = x_c.contiguous()
    return all_to_all_single(torch.empty_like(x_c), x_c, group=group)


class _Total(torch.autograd.Function):
    """A sum over ranks whose gradient stays with each part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
