"""Raw bits of tensors: a fingerprint that shows copies are equal, and tensors laid out in a buffer.

Works on any device and dtype; the same bits give the same fingerprint everywhere. Knows nothing of
where a buffer lives or who reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

FOLD_WIDTH = 512  # words folded into one; their multipliers stay in the first-level cache
ALIGNMENT = 64  # bytes between the beginnings of tensors in a buffer


def fingerprint(tensor: Tensor) -> int:
    """Return a 64-bit checksum of the raw bits, sensitive to their order; about as fast as a copy.

    The bits are read as 64-bit words w; the answer is sum(w_i * m_i) mod 2^64 with an odd
    multiplier m_i of its own for every position: a single changed word always changes it.
    """
    total = _fold(_words(tensor), 0) + tensor.nbytes * 0x9E3779B97F4A7C15
    return total % 2**64


def bit_sum(tensor: Tensor) -> int:
    """Return the sum of the raw bits as 64-bit words, mod 2^64: that of parts of whole words adds
    up to that of the tensor.
    """
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


def _fold(words: Tensor, level: int) -> int:
    """Return the weighted sum of (W,) words: each FOLD_WIDTH become one word of the next level."""
    multipliers = _multipliers(level, words.device)
    if len(words) <= FOLD_WIDTH:
        return int(_weighted(words, multipliers[: len(words)]))
    num_whole = len(words) // FOLD_WIDTH * FOLD_WIDTH
    sums = _weighted(words[:num_whole].view(-1, FOLD_WIDTH), multipliers)
    rest = words[num_whole:]
    if len(rest):
        sums = torch.cat([sums, _weighted(rest, multipliers[: len(rest)]).view(1)])
    return _fold(sums, level + 1)


def _weighted(words: Tensor, multipliers: Tensor) -> Tensor:
    """Return weighted sums over the last dimension of (W,) or (R, W)."""
    # Integer products of vectors exist on the CPU only; there they are the fastest way.
    if words.device.type == "cpu":
        return torch.matmul(words, multipliers)
    return (words * multipliers).sum(-1)


@lru_cache(maxsize=64)
def _multipliers(level: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random numbers, (FOLD_WIDTH,) int64, another set for every level."""
    generator = torch.Generator().manual_seed(0x5EED + level)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    numbers = torch.randint(low, high, (FOLD_WIDTH,), generator=generator, dtype=torch.int64) | 1
    return numbers.to(device)
