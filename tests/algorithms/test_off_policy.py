"""The report on disagreement between trainer and engine."""

from __future__ import annotations

import math

import pytest
import torch

from openrlhf.algorithms.off_policy import (
    PRESETS,
    Correction,
    ImportanceWeights,
    Mismatch,
    importance_weights,
    make_correction,
    mismatch_report,
)


def test_report_by_hand():
    trainer = torch.tensor([0.5, 0.25]).log()
    engine = torch.tensor([0.25, 0.25]).log()
    report = mismatch_report(trainer, engine)
    # the engine drew the first token half as often as the trainer thinks: 2 - 1 - log 2
    assert report.num_tokens == 2
    assert report.kl == pytest.approx((1 - math.log(2)) / 2, rel=1e-6)
    assert report.mean_abs == pytest.approx(math.log(2) / 2)
    assert report.max_abs == pytest.approx(math.log(2))


def test_equal_log_probs_and_no_log_probs_report_zero():
    same = torch.tensor([-1.0, -2.0])
    assert mismatch_report(same, same) == Mismatch(2, 0.0, 0.0, 0.0)
    assert mismatch_report(torch.zeros(0), torch.zeros(0)) == Mismatch(0, 0.0, 0.0, 0.0)


def test_nan_is_not_hidden():
    report = mismatch_report(torch.tensor([-1.0, math.nan]), torch.tensor([-1.0, -1.0]))
    assert math.isnan(report.kl) and math.isnan(report.max_abs)


def test_a_temperature_forgotten_on_one_side_is_seen():
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    engine = (logits / 0.6).log_softmax(-1)[:, 0]
    assert mismatch_report(logits.log_softmax(-1)[:, 0], engine).kl > 1e-3
    assert mismatch_report((logits / 0.6).log_softmax(-1)[:, 0], engine).kl == 0.0


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


def test_a_geometric_mask_takes_whole_sequences():
    found = corrected("geometric", "mask", 0.6, 3.0)
    assert found.weights_N.tolist() == pytest.approx([2.0, 2.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("preset", "expected", "cut"),
    [
        ("tis", [1.0, 3.0, 0.6, 1.0], [False, True, True, False]),
        ("icepop", [1.0, 0.0, 0.0, 1.0], [False, True, True, False]),
        ("seq-mask-tis", [1.0, 3.0, 0.0, 0.0], [False, False, True, True]),
    ],
)
def test_the_presets_by_hand(preset, expected, cut):
    correction = make_correction(preset, (0.6, 3.0))
    found = importance_weights(correction, RATIOS.log(), torch.zeros(4), NUM_ACTIONS)
    assert found.weights_N.tolist() == pytest.approx(expected)
    assert found.is_cut_N.tolist() == cut


def test_a_level_or_treatment_of_ones_own_replaces_that_of_the_preset():
    made = make_correction("tis", (0.0, 2.0), level="sequence")
    assert made == Correction("sequence", "clip", 0.0, 2.0)
    made = make_correction("seq-mask-tis", (0.5, 2.0), treatment="truncate")
    assert made == Correction("geometric", "truncate", 0.5, 2.0)
    assert set(PRESETS) == {"tis", "icepop", "seq-mask-tis"}


def test_weights_carry_no_gradient_and_equal_policies_have_weight_one():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    for preset in PRESETS:
        correction = make_correction(preset, (0.5, 5.0))
        found = importance_weights(correction, logprobs, logprobs.detach(), torch.tensor([2]))
        assert found.weights_N.tolist() == [1.0, 1.0] and not found.weights_N.requires_grad
        assert not found.is_cut_N.any()
