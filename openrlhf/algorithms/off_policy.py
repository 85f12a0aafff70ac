"""How far the trainer's log-probs are from those the engine sampled under.

The cause may be numerics, staleness or a bug; this reports only. Shapes: N action tokens end to
end. A missing engine log-prob must have been refused before.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from openrlhf.algorithms.kl import kl_per_token


@dataclass(frozen=True)
class Mismatch:
    """Disagreement over num_tokens tokens; NaN where a log-prob is NaN."""

    num_tokens: int
    kl: float  # mean k3 estimate of KL(engine || trainer)
    mean_abs: float  # mean |difference of log-probs|
    max_abs: float


def mismatch_report(trainer_logprobs_N: Tensor, engine_logprobs_N: Tensor) -> Mismatch:
    """Compare log-probs of the same sampled tokens; all zero when there are none."""
    num_tokens = len(trainer_logprobs_N)
    if num_tokens == 0:
        return Mismatch(0, 0.0, 0.0, 0.0)
    kl_N = kl_per_token(engine_logprobs_N, trainer_logprobs_N, estimator="k3")
    gap_N = (trainer_logprobs_N.float() - engine_logprobs_N.float()).abs()
    return Mismatch(num_tokens, kl_N.mean().item(), gap_N.mean().item(), gap_N.max().item())
