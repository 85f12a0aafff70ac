"""The report on disagreement between trainer and engine."""

from __future__ import annotations

import math

import pytest
import torch

from openrlhf.algorithms.off_policy import Mismatch, mismatch_report


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
