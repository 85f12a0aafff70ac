"""A fingerprint changes with any bit and any order, and with nothing else."""

import pytest
import torch

from openrlhf.utils.tensors import bit_sum, checksum, fingerprint, tensors_in

SIZES = [0, 1, 2, 1024, 2047, 2048, 70_000]


def signed(number: int) -> int:
    """The 64-bit word of a number, which wraps around."""
    return (number + 2**63) % 2**64 - 2**63


def multiplier(place: int) -> int:
    mixed = signed((place + 1) * 0x9E3779B97F4A7C15)
    mixed = signed((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9)
    return (mixed ^ mixed >> 27) | 1


def slow_fingerprint(tensor: torch.Tensor) -> int:
    """The same sum in Python integers: blocks of 512 words, and 512 to 1,023 single words."""
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    sums = []
    while len(words) >= 1024:
        sums.append(sum(words[:512]))
        words = words[512:]
    total = sum(number * multiplier(i) for i, number in enumerate(sums + words))
    return (total + len(data) * 0x9E3779B97F4A7C15) % 2**64


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_weighted_sum_of_its_blocks(size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert checksum(tensor) == (slow_fingerprint(tensor), bit_sum(tensor))


@pytest.mark.parametrize("size", SIZES[3:])
def test_a_single_bit_changes_it(size):
    tensor = torch.randn(size)
    before = fingerprint(tensor)
    for index in (0, size // 2, size - 1):
        changed = tensor.clone()
        changed.view(torch.int32)[index] ^= 1
        assert fingerprint(changed) != before


def test_it_depends_on_the_order():
    tensor = torch.randn(5000)
    swapped = tensor.clone()
    swapped[[10, 4000]] = tensor[[4000, 10]]
    assert fingerprint(swapped) != fingerprint(tensor)
    assert fingerprint(tensor.flip(0)) != fingerprint(tensor)
    assert fingerprint(torch.zeros(4)) != fingerprint(torch.zeros(8))


def test_it_does_not_depend_on_where_the_bits_lie():
    tensor = torch.randn(33, 70)
    assert fingerprint(tensor.T.contiguous().T) == fingerprint(tensor)
    shifted = torch.cat([torch.zeros(1), tensor.flatten()])[1:]
    assert fingerprint(shifted) == fingerprint(tensor)


def test_tensors_are_found_in_a_buffer():
    buffer = torch.zeros(128, dtype=torch.uint8)
    buffer[:8] = torch.tensor([1.0, 2.0]).view(torch.uint8)
    buffer[64:68] = torch.tensor([[3.0], [4.0]], dtype=torch.bfloat16).flatten().view(torch.uint8)
    first, second = tensors_in(buffer, ["float32", "bfloat16"], [(2,), (2, 1)], [0, 64])
    assert first.tolist() == [1.0, 2.0]
    assert second.tolist() == [[3.0], [4.0]]
