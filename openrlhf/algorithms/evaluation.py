"""Estimates from evaluation samples: pass@k and the uncertainty of a mean.

Suffixes: P prompts, N samples of each.
"""

import math

import torch
from torch import Tensor

NORMAL_95 = 1.96  # standard errors on each side of a 95 % interval
ROUNDING = 1e-9  # a standard error below it is that of equal values


def pass_at_k(scores_PN: Tensor, k: int) -> Tensor:
    """Return the expected best score of k of a prompt's N samples, drawn without repetition, (P,).

    Of scores that are 0 or 1, c of them 1, this is 1 - C(N - c, k) / C(N, k), the unbiased
    estimate of pass@k of Chen et al. 2021 (arXiv 2107.03374). In general the i-th smallest score,
    counted from 1, is the best of C(i - 1, k - 1) of the C(N, k) draws.
    """
    assert scores_PN.dim() == 2, "(P, N)"
    num_samples = scores_PN.size(1)
    assert 1 <= k <= num_samples, f"{k} of {num_samples} samples"
    draws = math.comb(num_samples, k)
    shares_N = [math.comb(i, k - 1) / draws for i in range(num_samples)]
    return scores_PN.double().sort(dim=1).values @ torch.tensor(shares_N, dtype=torch.float64)


def standard_error(values_P: Tensor) -> float | None:
    """Return the standard error of the mean of values, one a prompt; None of a single one.

    Samples of a prompt are alike: a value is the mean of its prompt's, so that errors are clustered
    by prompt (Miller 2024, arXiv 2411.00640).
    """
    assert values_P.dim() == 1, "(P,)"
    if len(values_P) < 2:
        return None
    return values_P.double().std().item() / math.sqrt(len(values_P))


def normal_interval(mean: float, error: float) -> tuple[float, float]:
    """Return the 95 % interval of a mean with this standard error."""
    return mean - NORMAL_95 * error, mean + NORMAL_95 * error


def wilson_interval(rate: float, error: float, num_prompts: int) -> tuple[float, float]:
    """Return the 95 % interval of a rate, which lies within 0 and 1 (Wilson 1927).

    The clustered standard error gives the number of independent trials: as many would have that
    error. Rates of prompts that are all equal have none, and each prompt counts as one trial.
    """
    variance = error**2 * (num_prompts - 1) / num_prompts
    n = rate * (1 - rate) / variance if error > ROUNDING else num_prompts
    share = NORMAL_95**2 / n
    center = (rate + share / 2) / (1 + share)
    reach = math.sqrt(share * (rate * (1 - rate) + share / 4)) / (1 + share)
    return max(center - reach, 0.0), min(center + reach, 1.0)  # rounding may leave a bit over
