"""The reward model's loss on pairs."""

from __future__ import annotations

import math

import pytest
import torch

from openrlhf.algorithms.reward_loss import pairwise_losses

CHOSEN = torch.tensor([math.log(3), 0.0, 1.0])
REJECTED = torch.tensor([0.0, math.log(3), 1.0])
# sigmoid(log 3) = 3/4, sigmoid(-log 3) = 1/4, sigmoid(0) = 1/2
EXPECTED = [math.log(4 / 3), math.log(4), math.log(2)]


@pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
def test_losses_by_hand(kind):
    assert pairwise_losses(CHOSEN, REJECTED, kind=kind).tolist() == pytest.approx(EXPECTED)


@pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
def test_a_margin_is_subtracted_from_the_gap(kind):
    margins = torch.tensor([2 * math.log(3), -2 * math.log(3), 0.0])
    losses = pairwise_losses(CHOSEN, REJECTED, kind=kind, margin_B=margins)
    assert losses.tolist() == pytest.approx([EXPECTED[1], EXPECTED[0], EXPECTED[2]])


@pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
def test_huge_gaps_neither_overflow_nor_lose_their_gradient(kind):
    chosen = torch.tensor([-1e4, 1e4], requires_grad=True)
    losses = pairwise_losses(chosen, torch.zeros(2), kind=kind)
    losses.sum().backward()
    assert losses.tolist() == [1e4, 0.0] and chosen.grad.tolist() == [-1.0, 0.0]


def test_the_gradient_is_the_probability_of_being_wrong():
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    pairwise_losses(chosen, rejected).sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-0.25, -0.75, -0.5])
    assert rejected.grad.tolist() == pytest.approx([0.25, 0.75, 0.5])
