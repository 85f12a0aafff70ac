"""The parameters of a CPU model while they are filled, and the memory they are filled in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Scratch:
    """Memory for plain weights that live only until they are packed.

    The same pages serve one layer after the other: new ones would cost as much as the copy.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # (n,) uint8 each

    def take(self, like: Tensor) -> Tensor:
        """Unset memory with the shape and type of `like`: the smallest free piece that is enough,
        or new.
        """
        fitting = [piece for piece in self._free if len(piece) >= like.nbytes]
        piece = min(fitting, key=len, default=None)
        if piece is None:
            piece = torch.empty(like.nbytes, dtype=torch.uint8)
        else:
            self._free = [free for free in self._free if free is not piece]
        return piece[: like.nbytes].view(like.dtype).view(like.shape)

    def give(self, tensor: Tensor) -> None:
        """Take back what `take` gave."""
        base = tensor.untyped_storage()
        self._free.append(torch.empty(0, dtype=torch.uint8).set_(base))

    def clear(self) -> None:
        """Free what is not in use."""
        self._free = []


class Part(NamedTuple):
    """A tensor for a parameter, with what its loader is told."""

    tensor: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def place(self) -> tuple[object, ...]:
        """Which part of the parameter it is."""
        return (*self.args, *sorted(self.kwargs.items()))


@dataclass
class Slot:
    """One parameter of the vLLM model while it is filled."""

    layer: nn.Module
    name: str
    title: str
    num_expected: int
    num_loaded: int = 0
    is_temporary: bool = False  # filled in scratch memory, then packed
    is_borrowed: bool = False  # its memory is that of the tensors that were received
    is_scratch: bool = False
    is_split: bool = False  # its tensors came in several buckets, or in another order than known
    parts: list[Part] = field(default_factory=list)  # received in this bucket
    bits: int | None = 0  # bit_sum of what was received; None where parts are no whole words

    def __str__(self) -> str:
        return f"{self.title} ({self.num_loaded} of {self.num_expected} values)"


def end_to_end(tensors: Sequence[Tensor], like: Tensor) -> Tensor | None:
    """Tensors that lie one behind the other in memory, as one of the shape of `like`; else None."""
    first, place = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != place or tensor.dtype != like.dtype or not tensor.is_contiguous():
            return None
        place += tensor.nbytes
    memory = torch.empty(0, dtype=like.dtype)
    return memory.set_(first.untyped_storage(), first.storage_offset(), like.shape)
