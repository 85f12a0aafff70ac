"""pass@k against counting all draws by hand, and the standard error of a mean over prompts."""

from itertools import combinations
from statistics import fmean

import pytest
import torch

from openrlhf.algorithms.evaluation import pass_at_k, standard_error, wilson_interval


def test_pass_at_k_is_the_estimate_of_chen_et_al():
    # 5 samples, 2 of them right: 1 - C(3, k) / C(5, k) is 2/5, 1 - 3/10, 1 - 1/10, 1, 1.
    scores = torch.tensor([[0.0, 1, 0, 0, 1]])
    found = [pass_at_k(scores, k).item() for k in (1, 2, 3, 4, 5)]
    assert found == pytest.approx([0.4, 0.7, 0.9, 1, 1])


def test_pass_at_k_of_other_scores_is_the_mean_best_of_all_draws():
    scores = [[0.5, 0.25, 1.0, 0.75], [2.0, 0.0, 0.0, -1.0]]
    expected = [fmean(map(max, combinations(row, 2))) for row in scores]
    assert expected == [pytest.approx((3 * 1 + 2 * 0.75 + 0.5) / 6), 1.0]
    assert pass_at_k(torch.tensor(scores), 2).tolist() == pytest.approx(expected)


def test_pass_at_1_is_the_mean_and_pass_at_n_the_best_also_for_many_samples():
    scores = torch.rand(3, 1000, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(pass_at_k(scores, 1), scores.double().mean(1))
    assert torch.equal(pass_at_k(scores, 1000), scores.double().amax(1))
    assert 0.9 < pass_at_k(scores, 500).min() < 1


def test_the_standard_error_counts_prompts():
    # Squares of 0, 1, 1, 0 around 1/2 add up to 1: the variance is 1/3, of the mean of four 1/12.
    assert standard_error(torch.tensor([0.0, 1, 1, 0])) == pytest.approx((1 / 12) ** 0.5)
    assert standard_error(torch.tensor([0.3])) is None


def test_the_interval_of_a_rate_is_wilsons_and_stays_within_0_and_1():
    # One of ten prompts: (p + z^2 / 2n -+ z sqrt(p q / n + z^2 / 4 n^2)) / (1 + z^2 / n).
    rates = torch.tensor([1.0] + [0.0] * 9)
    error = standard_error(rates)
    assert wilson_interval(0.1, error, 10) == pytest.approx((0.0179, 0.4042), abs=1e-4)
    assert wilson_interval(0.0, 0.0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert wilson_interval(1.0, 0.0, 10) == pytest.approx((0.7225, 1), abs=1e-4)
    # pass@4 of prompts whose samples are all right is 1, but for its last bit.
    rates = pass_at_k(torch.ones(10, 8), 4)
    low, high = wilson_interval(rates.mean().item(), standard_error(rates) or 0.0, 10)
    assert (low, high) == pytest.approx((0.7225, 1), abs=1e-4)
