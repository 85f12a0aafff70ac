"""Importance weights of tokens that the engine sampled."""

import math

import pytest
import torch

from openrlhf.algorithms.off_policy import (
    Correction,
    ImportanceWeights,
    importance_weights,
)

# Two samples with the ratios 1, 4 and 0.25, 1; their geometric means are 2 and 0.5.
RATIOS = torch.tensor([1.0, 4.0, 0.25, 1.0])
NUM_ACTIONS = torch.tensor([2, 2])


def corrected(level: str, treatment: str, low: float, high: float) -> ImportanceWeights:
    correction = Correction(level, treatment, low, high)
    return importance_weights(correction, RATIOS.log(), torch.zeros(4), NUM_ACTIONS)


@pytest.mark.parametrize(
    ("level", "treatment", "expected", "cut"),
    [
        ("token", "truncate", [1.0, 1.9, 0.25, 1.0], [1]),
        ("token", "clip", [1.0, 1.9, 0.6, 1.0], [1, 2]),
        ("token", "mask", [1.0, 0.0, 0.0, 1.0], [1, 2]),
        ("sequence", "truncate", [1.9, 1.9, 0.25, 0.25], [0, 1]),
        ("sequence", "clip", [1.9, 1.9, 0.6, 0.6], [0, 1, 2, 3]),
        ("sequence", "mask", [0.0, 0.0, 0.0, 0.0], [0, 1, 2, 3]),
        ("geometric", "truncate", [1.9, 1.9, 0.5, 0.5], [0, 1]),
        ("geometric", "clip", [1.9, 1.9, 0.6, 0.6], [0, 1, 2, 3]),
        ("geometric", "mask", [0.0, 0.0, 0.0, 0.0], [0, 1, 2, 3]),
    ],
)
def test_importance_weights_by_hand(level, treatment, expected, cut):
    found = corrected(level, treatment, 0.6, 1.9)
    assert found.weights_N.tolist() == pytest.approx(expected)
    assert found.is_cut_N.nonzero().flatten().tolist() == cut  # those that the weight changes


@pytest.mark.parametrize(
    ("clamps", "expected"),
    [(False, [1.0, 4.0, 0.0, 0.0]), (True, [1.0, 3.0, 0.0, 0.0])],
)
def test_a_sequence_mask_leaves_survivors_their_token_ratios_or_clamps_them(clamps, expected):
    correction = Correction("seq", "mask", 0.6, 3.0, clamp_survivors=clamps)
    found = importance_weights(correction, RATIOS.log(), torch.zeros(4), NUM_ACTIONS)
    assert found.weights_N.tolist() == pytest.approx(expected)
    assert found.is_cut_N.tolist() == [False, False, True, True]
    assert found.ratio_N.tolist() == pytest.approx([2.0, 2.0, 0.5, 0.5])


# Engine 0.5 and trainer 0.25, then 0.5 and 0.5. KL(0.5 || 0.25) = 0.5 log 2 + 0.5 log(2 / 3).
KL_OF_HALF_AND_QUARTER = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)


@pytest.mark.parametrize(
    ("gating", "distance"), [("tv", 0.25), ("binary_kl", KL_OF_HALF_AND_QUARTER)]
)
@pytest.mark.parametrize("level", ["token", "seq"])
def test_a_divergence_masks_above_its_bound_alone(gating, distance, level):
    trainer, engine = torch.tensor([0.25, 0.5]).log(), torch.tensor([0.5, 0.5]).log()
    num_actions = torch.tensor([2])
    read = distance if level == "token" else distance / 2  # the mean over both tokens
    lenient = Correction(level, "mask", 0.0, read * 1.01, gating)
    strict = Correction(level, "mask", 0.0, read * 0.99, gating)
    found = importance_weights(lenient, trainer, engine, num_actions)
    assert found.weights_N.tolist() == pytest.approx([0.5, 1.0])
    found = importance_weights(strict, trainer, engine, num_actions)
    assert found.weights_N.tolist() == [0.0, 1.0 if level == "token" else 0.0]


def test_a_token_that_a_divergence_lets_pass_weighs_at_most_five():
    # An unlikely token: KL(1e-5 || 0.01) is 0.0099, and the trainer holds it 1000 times likelier.
    trainer, engine = torch.tensor([0.01]).log(), torch.tensor([1e-5]).log()
    found = importance_weights(
        Correction("token", "mask", 0.0, 0.05, "binary_kl"), trainer, engine, torch.tensor([1])
    )
    assert found.weights_N.tolist() == [5.0] and not found.is_cut_N.any()
