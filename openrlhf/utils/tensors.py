"""Raw bits of tensors: a fingerprint that shows copies are equal, and tensors laid out in a buffer.

Works on any device and dtype; the same bits give the same fingerprint everywhere. Knows nothing of
where a buffer lives or who reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 512  # words that become one; their multipliers stay in the first-level cache
ALIGNMENT = 64  # bytes between the beginnings of tensors in a buffer


class Checksum(NamedTuple):
    """Two sums of the raw bits of a tensor, read as 64-bit words, modulo 2^64."""

    fingerprint: int
    bit_sum: int  # those of parts of whole words add up to that of the tensor


def checksum(tensor: Tensor) -> Checksum:
    """Return both sums after one pass over the tensor; about as fast as a copy.

    The fingerprint is the sum of b_i * m_i over blocks: b_i is the sum of a block's words (one word
    in a tensor of at most BLOCK words), m_i an odd multiplier of its own. A single changed word
    always changes it, and so do blocks that change places.
    """
    blocks = _blocks(_words(tensor), lambda words: words.sum(-1))
    total = _fold(blocks, 0) + tensor.nbytes * 0x9E3779B97F4A7C15
    return Checksum(total % 2**64, int(blocks.sum()) % 2**64)


def fingerprint(tensor: Tensor) -> int:
    """Return a 64-bit checksum of the raw bits that depends on their order."""
    return checksum(tensor).fingerprint


def bit_sum(tensor: Tensor) -> int:
    """Return the sum of the raw bits as 64-bit words, modulo 2^64."""
    return int(_words(tensor).sum()) % 2**64


def align(num_bytes: int) -> int:
    """Return the next place in a buffer where a tensor may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes, (nbytes,) uint8; a copy only if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensors_in(
    buffer: Tensor,
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    offsets: Sequence[int],
) -> Iterator[Tensor]:
    """Yield views of the tensors in a byte buffer, (num_bytes,) uint8, at these offsets."""
    for name, shape, offset in zip(dtypes, shapes, offsets, strict=True):
        dtype = getattr(torch, name)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        yield buffer[offset : offset + num_bytes].view(dtype).view(tuple(shape))


def _words(tensor: Tensor) -> Tensor:
    """Return the bits as (W,) int64; the last word is filled up with zeros."""
    data = as_bytes(tensor)
    if data.numel() % 8 == 0 and data.storage_offset() % 8 == 0:
        return data.view(torch.int64)
    padded = data.new_zeros(-(-data.numel() // 8) * 8)
    padded[: data.numel()] = data
    return padded.view(torch.int64)


def _blocks(words: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Return (W,) words as they are, or reduced in blocks of BLOCK; the last one may be shorter."""
    if len(words) <= BLOCK:
        return words
    num_whole = len(words) // BLOCK * BLOCK
    blocks, rest = reduce(words[:num_whole].view(-1, BLOCK)), words[num_whole:]
    return torch.cat([blocks, reduce(rest).view(1)]) if len(rest) else blocks


def _fold(words: Tensor, level: int) -> int:
    """Return the weighted sum of (W,) words: BLOCK of them become one word of the next level."""
    multipliers = _multipliers(level, words.device)
    if len(words) <= BLOCK:
        return int(_weighted(words, multipliers))
    return _fold(_blocks(words, lambda part: _weighted(part, multipliers)), level + 1)


def _weighted(words: Tensor, multipliers: Tensor) -> Tensor:
    """Return weighted sums over the last dimension of (W,) or (R, W)."""
    multipliers = multipliers[: words.shape[-1]]
    # Integer products of vectors exist on the CPU only; there they are the fastest way.
    if words.device.type == "cpu":
        return torch.matmul(words, multipliers)
    return (words * multipliers).sum(-1)


@lru_cache(maxsize=64)
def _multipliers(level: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random numbers, (BLOCK,) int64, another set for every level."""
    generator = torch.Generator().manual_seed(0x5EED + level)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    numbers = torch.randint(low, high, (BLOCK,), generator=generator, dtype=torch.int64) | 1
    return numbers.to(device)
