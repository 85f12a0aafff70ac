"""Raw bits of tensors: a fingerprint that shows copies are equal, and tensors laid out in a buffer.

Works on any device and dtype; the same bits give the same fingerprint everywhere. Knows nothing of
where a buffer lives or who reads it.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

NamedTensors = Iterable[tuple[str, Tensor]]
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}  # of `--param_dtype`
BLOCK = 512  # words that become one
# Odd constants of splitmix64, as signed words.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX = 0xBF58476D1CE4E5B9 - 2**64
ALIGNMENT = 64  # bytes between the beginnings of tensors in a buffer


class Checksum(NamedTuple):
    """Two sums of the raw bits of a tensor, read as 64-bit words, modulo 2^64.

    Example: of [3, 4] and of [4, 3], int64, `bit_sum` is 7; the `fingerprint` differs.
    """

    fingerprint: int
    bit_sum: int  # those of parts of whole words add up to that of the tensor


def checksum(tensor: Tensor) -> Checksum:
    """Return both sums after one pass over the tensor; about as fast as a copy.

    The fingerprint is the sum of b_i * m_i: b_i is the sum of a block of BLOCK words, or a single
    word among the last ones, m_i an odd multiplier of its own. A single changed word always changes
    it, and so do blocks that change places.
    """
    [found] = read_sums([both_sums(tensor)])
    return found


def both_sums(tensor: Tensor) -> Tensor:
    """Return the sums of `checksum`, (2,) int64, on the tensor's device: no one waits for them."""
    words = _words(tensor)
    num_blocks = max(len(words) - BLOCK, 0) // BLOCK
    blocks, rest = words[: num_blocks * BLOCK].view(-1, BLOCK), words[num_blocks * BLOCK :]
    sums = torch.cat([blocks.sum(-1), rest])
    mixed = (sums * _multipliers(len(sums), words.device)).sum()
    return torch.stack([mixed + _signed(tensor.nbytes * GOLDEN), sums.sum()])


def read_sums(sums: Sequence[Tensor]) -> list[Checksum]:
    """Return the numbers of `both_sums` for tensors of one device, in one copy to the host."""
    if not sums:
        return []
    return [Checksum(mixed % 2**64, bits % 2**64) for mixed, bits in torch.stack([*sums]).tolist()]


def fingerprint(tensor: Tensor) -> int:
    """Return a 64-bit checksum of the raw bits that depends on their order."""
    return checksum(tensor).fingerprint


def bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of the raw bits as 64-bit words, () int64 on the tensor's device, which wraps
    at 2^64.
    """
    return _words(tensor).sum()


def align(num_bytes: int) -> int:
    """Return the next place in a buffer where a tensor may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for `torch.bfloat16`."""
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


def _signed(number: int) -> int:
    """Return the number modulo 2^64, as a signed word."""
    return (number + 2**63) % 2**64 - 2**63


def _multipliers(count: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random numbers, (count,) int64."""
    return _splitmix(1 << max(count - 1, 0).bit_length(), device)[:count]


@lru_cache(maxsize=64)  # each power of two once for each device
def _splitmix(count: int, device: torch.device) -> Tensor:
    """Return the mixing of splitmix64 for 1 to `count`, (count,) int64."""
    numbers = torch.arange(1, count + 1, device=device) * GOLDEN
    numbers = (numbers ^ (numbers >> 30)) * MIX
    return (numbers ^ (numbers >> 27)) | 1
