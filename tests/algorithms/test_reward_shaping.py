"""Penalties for responses that ran too long or were cut."""

from __future__ import annotations

import pytest
import torch

from openrlhf.algorithms.reward_shaping import penalise_overlong, penalise_truncated


def test_overlong_penalty_grows_linearly_over_the_buffer():
    lengths = torch.tensor([10, 80, 81, 90, 100, 130])
    found = penalise_overlong(
        torch.ones(6), lengths, max_new_tokens=100, buffer_len=20, penalty_factor=2.0
    )
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.9, 0.0, -1.0, -1.0])


@pytest.mark.parametrize(
    ("coef", "expected"),
    [(1.0, [3.0, 2.0]), (0.25, [3.0, 0.5]), (0.0, [3.0, 0.0]), (-0.5, [3.0, -0.5])],
)
def test_truncated_samples_are_scaled_or_set(coef, expected):
    rewards, is_truncated = torch.tensor([3.0, 2.0]), torch.tensor([False, True])
    assert penalise_truncated(rewards, is_truncated, coef=coef).tolist() == expected
