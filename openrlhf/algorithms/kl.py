"""KL estimators per token and the controller of the KL coefficient.

With d = logp - logref of a token sampled from the policy, the mean of each estimator estimates
KL(policy || reference); Schulman, "Approximating KL divergence" (2020). Shapes: N tokens. Knows
nothing of where the term goes: into the reward (detached) or into the loss.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MAX_ABS_KL = 10.0
MAX_KL_WEIGHT = 10.0
# Beyond it every estimator is at its bound; without it the backward would hold 0 * inf.
MAX_ABS_DIFFERENCE = 20.0


def k1(difference_N: Tensor) -> Tensor:
    """Return d: unbiased, of either sign, (N,)."""
    return difference_N


def k2(difference_N: Tensor) -> Tensor:
    """Return d^2 / 2: biased, low variance; its gradient is that of the KL, (N,)."""
    return difference_N.square() / 2


def k3(difference_N: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d: unbiased and never negative, (N,)."""
    return torch.expm1(-difference_N) + difference_N


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_per_token(logprobs_N: Tensor, ref_logprobs_N: Tensor, *, estimator: str = "k1") -> Tensor:
    """Return the named estimator of KL(policy || reference) in fp32, clamped to +-10, (N,)."""
    assert logprobs_N.shape == ref_logprobs_N.shape, "log-probs of the same tokens are needed"
    difference_N = logprobs_N.float() - ref_logprobs_N.float()
    difference_N = difference_N.clamp(-MAX_ABS_DIFFERENCE, MAX_ABS_DIFFERENCE)
    return KL_ESTIMATORS[estimator](difference_N).clamp(-MAX_ABS_KL, MAX_ABS_KL)


def with_reverse_kl_gradient(
    kl_N: Tensor, logprobs_N: Tensor, old_logprobs_N: Tensor, ref_logprobs_N: Tensor
) -> Tensor:
    """Return the values of `kl_N` with the gradient of KL(policy || reference) in expectation,
    (N,).

    The gradient is that of w * k2 with w = exp(logp - logp_old), detached and at most 10: tokens
    were sampled from the old policy, so w d grad(logp) averages to the gradient of the KL. The
    gradients of k1 and k3 do not (arXiv 2510.01555).
    """
    assert logprobs_N.shape == old_logprobs_N.shape, "log-probs of the same tokens are needed"
    now_N = logprobs_N.detach().float()
    weight_N = (now_N - old_logprobs_N.float()).exp().clamp(max=MAX_KL_WEIGHT)
    difference_N = now_N - ref_logprobs_N.float()
    difference_N = difference_N.clamp(-MAX_ABS_DIFFERENCE, MAX_ABS_DIFFERENCE)
    zero_N = logprobs_N.float() - now_N
    return kl_N.detach() + weight_N * difference_N * zero_N


def adaptive_kl_coef(
    coef: float, kl: float, *, target: float, horizon: float, num_samples: int
) -> float:
    """Return coef * (1 + clip(kl / target - 1, +-0.2) * num_samples / horizon) (arXiv
    1909.08593).
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)
