"""Flat vectors, padded blocks and reductions over ragged samples."""

import torch

from openrlhf.algorithms import tokens

COUNTS = torch.tensor([2, 0, 3])
FLAT = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def test_padding_puts_each_sample_in_a_row_with_zeros_at_the_right():
    expected = [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 4.0, 5.0]]
    assert tokens.pad_flat(FLAT, COUNTS).tolist() == expected


def test_segment_sums_and_means_of_an_empty_sample_are_zero():
    assert tokens.segment_sum(FLAT, COUNTS).tolist() == [3.0, 0.0, 12.0]
    assert tokens.segment_mean(FLAT, COUNTS).tolist() == [1.5, 0.0, 4.0]


def test_last_actions_skip_samples_without_actions():
    assert tokens.last_action_index(torch.tensor([0, 2, 0, 3, 0])).tolist() == [1, 4]
