"""A fingerprint changes with any bit and any order, and with nothing else."""

import pytest
import torch

from openrlhf.utils.tensors import fingerprint


@pytest.mark.parametrize("size", [1, 1024, 2047, 2048, 70_000])
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
