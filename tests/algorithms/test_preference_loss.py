"""Preference losses against numbers worked by hand and formulas written out plainly."""

import math
from math import log

import pytest
import torch

from openrlhf.algorithms.preference_loss import (
    PREFERENCE_LOSSES,
    PairLogps,
    PreferenceOptions,
    kto_kl_sum,
    kto_losses,
    kto_reference_point,
    pairwise_losses,
    preference_loss,
)

# With beta 1/2, beta * r is log 3 where r is log 9: sigmoids of 3/4, 1/4 and 1/2.
RATIOS = torch.tensor([[log(9), 0.0, log(9)], [0.0, log(9), log(9)]])
REFERENCE = torch.tensor([[-3.0, -4.0, -5.0], [-6.0, -7.0, -8.0]])
RIGHT, WRONG, EQUAL = log(4 / 3), log(4), log(2)  # -log of these sigmoids


def make_pairs(sums, *, reference=REFERENCE, lengths=(2, 4)):
    lengths_2B = torch.tensor(lengths).unsqueeze(-1).expand(sums.shape)
    return PairLogps(sums, lengths_2B, reference)


def losses_of(name, pairs, **options):
    losses, *_ = preference_loss(PREFERENCE_LOSSES[name], pairs, PreferenceOptions(**options))
    return losses.tolist()


BY_HAND = {
    "sigmoid": ({}, [RIGHT, WRONG, EQUAL]),
    "cdpo": (
        {"name": "sigmoid", "label_smoothing": 0.1},
        [0.9 * RIGHT + 0.1 * WRONG, 0.9 * WRONG + 0.1 * RIGHT, EQUAL],
    ),
    "ipo": ({}, [(log(9) - 1) ** 2, (log(9) + 1) ** 2, 1.0]),
    "ipo per token": (
        {"name": "ipo", "ipo_length_average": True},
        [(log(3) - 1) ** 2, (log(9) / 4 + 1) ** 2, (log(9) / 4 - 1) ** 2],
    ),
    "hinge": ({}, [0.0, 1 + log(3), 1.0]),
    "robust": (
        {"label_smoothing": 0.25},
        [1.5 * RIGHT - 0.5 * WRONG, 1.5 * WRONG - 0.5 * RIGHT, EQUAL],
    ),
    "exo_pair": (
        {"label_smoothing": 0.2},
        [
            0.75 * log(0.75 / 0.8) + 0.25 * log(0.25 / 0.2),
            0.25 * log(0.25 / 0.8) + 0.75 * log(0.75 / 0.2),
            0.5 * log(0.5 / 0.8) + 0.5 * log(0.5 / 0.2),
        ],
    ),
    "apo_zero": ({}, [0.25 + 0.5, 0.5 + 0.75, 0.25 + 0.75]),
    "apo_down": ({}, [0.75 + 0.25, 0.5 + 0.75, 0.75 + 0.5]),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_losses_with_a_reference_by_hand(case):
    options, expected = BY_HAND[case]
    pairs = make_pairs(REFERENCE + RATIOS)
    found = losses_of(**{"name": case, "pairs": pairs, "beta": 0.5, **options})
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", sorted(BY_HAND.keys() - {"cdpo", "ipo per token"}))
def test_rewards_with_a_reference_are_beta_times_the_ratio(name):
    _, chosen, rejected = preference_loss(
        PREFERENCE_LOSSES[name], make_pairs(REFERENCE + RATIOS), PreferenceOptions(beta=0.5)
    )
    assert chosen.tolist() == pytest.approx([log(3), 0, log(3)], abs=1e-6)
    assert rejected.tolist() == pytest.approx([0, log(3), log(3)], abs=1e-6)


def test_simpo_compares_means_per_token_with_a_margin_by_hand():
    # means -1 and -1 - log(3) / 2
    pairs = make_pairs(torch.tensor([[-2.0], [-4 - 2 * log(3)]]), reference=None)
    options = PreferenceOptions(beta=2.0, simpo_gamma=log(9))
    found = [value.item() for value in preference_loss(PREFERENCE_LOSSES["simpo"], pairs, options)]
    assert found == pytest.approx([WRONG, -2.0, -2 - log(3)])


def test_cpo_adds_the_likelihood_of_the_chosen_response_by_hand():
    pairs = make_pairs(torch.tensor([[-2.0], [-2 - log(9)]]), reference=None)
    terms = preference_loss(PREFERENCE_LOSSES["cpo"], pairs, PreferenceOptions(beta=0.5))
    found = [value.item() for value in terms]
    assert found == pytest.approx([RIGHT + 1, -1.0, -1 - log(3)])


def test_orpo_compares_odds_by_hand():
    # probabilities per token 3/4 and 1/2: odds 3 and 1
    pairs = make_pairs(torch.tensor([[2 * log(3 / 4)], [4 * log(1 / 2)]]), reference=None)
    terms = preference_loss(PREFERENCE_LOSSES["orpo"], pairs, PreferenceOptions(beta=0.5))
    found = [value.item() for value in terms]
    assert found == pytest.approx([RIGHT + 0.5 * RIGHT, 0.5 * log(3), 0.0], abs=1e-6)


def test_kto_by_hand():
    # r is z + log 9, then z, then z - log 9; beta (r - z) is log 3, 0, -log 3
    ratio = torch.tensor([1 + log(9), 1.0, 1 - log(9)])
    ratio = torch.cat([ratio, ratio]).requires_grad_()
    losses, rewards = kto_losses(
        ratio - 7,
        torch.full((6,), -7.0),
        is_desirable_B=torch.tensor([1, 1, 1, 0, 0, 0]),
        reference_point=torch.tensor(1.0),
        beta=0.5,
        desirable_weight=2.0,
        undesirable_weight=3.0,
    )
    assert losses.tolist() == pytest.approx([0.5, 1.0, 1.5, 2.25, 1.5, 0.75], abs=1e-6)
    assert rewards.tolist() == pytest.approx([0.5 * x for x in ratio.tolist()], abs=1e-6)
    assert not rewards.requires_grad
    losses.sum().backward()
    # weight * beta * s (1 - s), down for desirable and up for undesirable
    desirable = [-2 * 0.5 * 3 / 16, -2 * 0.5 / 4, -2 * 0.5 * 3 / 16]
    assert ratio.grad.tolist() == pytest.approx(desirable + [-1.5 * x for x in desirable], abs=1e-6)


def test_kto_reference_point_is_the_mean_over_all_micro_batches():
    zeros = torch.zeros(1)
    first = kto_kl_sum(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-2.0, -4.0, -2.0]))
    second = kto_kl_sum(torch.tensor([-1.0]), torch.tensor([-7.0]))
    assert first.item() == 2.0
    assert kto_reference_point(first + second, 4).item() == 2.0
    # clamped once, after the mean: a negative part counts
    assert kto_reference_point(second + kto_kl_sum(zeros - 2, zeros), 2).item() == 2.0
    assert kto_reference_point(kto_kl_sum(zeros - 2, zeros), 1).item() == 0.0


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
