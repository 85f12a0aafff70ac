"""How far the trainer's log-probs are from those the engine sampled under, and what to do about it.

The cause may be numerics, staleness or a bug. Shapes: N action tokens of B samples end to end. A
missing engine log-prob must have been refused before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf.algorithms.kl import kl_per_token
from openrlhf.algorithms.tokens import repeat_per_action, segment_mean, segment_sum

MAX_ABS_LOG_RATIO = 20.0
LEVELS = ("token", "sequence", "geometric")
TREATMENTS = ("truncate", "clip", "mask")


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


@dataclass(frozen=True)
class Correction:
    """Importance weights for tokens that another policy sampled: ratio of the trainer's old
    probability to the engine's.

    `level`: of a token, of a whole sequence (product over its tokens), or geometric (the same, to
    the power 1 / length). `treatment` outside the band [low, high]: truncate at high, clip to both
    ends, or mask (weight 0). `over_tokens`: what the level lets pass is weighted by token ratios
    truncated at high. Truncated importance sampling: Ionides, J. Comput. Graph.
    Stat. 2008; masking: arXiv 2510.18855 (IcePop).
    """

    level: str = "token"
    treatment: str = "truncate"
    low: float = 0.0
    high: float = 2.0
    over_tokens: bool = False

    def __post_init__(self) -> None:
        assert self.level in LEVELS and self.treatment in TREATMENTS, self
        assert 0 <= self.low < self.high, self


PRESETS = {  # the names of the reference
    "tis": Correction("token", "clip"),
    "icepop": Correction("token", "mask"),
    "seq-mask-tis": Correction("geometric", "mask", over_tokens=True),
}


def make_correction(
    preset: str, band: tuple[float, float], level: str | None = None, treatment: str | None = None
) -> Correction:
    """A preset with the band, its level and treatment replaced where they are given."""
    low, high = band
    made = replace(PRESETS[preset], low=low, high=high)
    if level is None and treatment is None:
        return made
    level, treatment = level or made.level, treatment or made.treatment
    return Correction(level, treatment, low, high)


class ImportanceWeights(NamedTuple):
    """Weights of the policy loss, without gradient."""

    weights_N: Tensor
    ratio_N: Tensor  # at the level of the correction, before the treatment
    is_cut_N: Tensor  # bool, outside what the treatment lets pass


def importance_weights(
    correction: Correction,
    trainer_logprobs_N: Tensor,
    engine_logprobs_N: Tensor,
    num_actions_B: Tensor,
) -> ImportanceWeights:
    """Weights (N,) by which the losses of tokens are multiplied; denominators stay as they are."""
    log_ratio_N = (trainer_logprobs_N.float() - engine_logprobs_N.float()).detach()
    level_N = _at_level(log_ratio_N, num_actions_B, correction.level)
    ratio_N = _exp(level_N)
    low = 0.0 if correction.treatment == "truncate" else correction.low
    is_cut_N = (ratio_N < low) | (ratio_N > correction.high)
    if correction.treatment == "mask":
        weights_N = ratio_N.masked_fill(is_cut_N, 0.0)
    else:
        weights_N = ratio_N.clamp(low, correction.high)
    if correction.over_tokens:
        weights_N = _exp(log_ratio_N).clamp(max=correction.high).masked_fill(is_cut_N, 0.0)
    return ImportanceWeights(weights_N, ratio_N, is_cut_N)


def token_ratio(trainer_logprobs_N: Tensor, engine_logprobs_N: Tensor) -> Tensor:
    """How many times as likely each token is for the trainer as it was for the engine, (N,)."""
    return _exp((trainer_logprobs_N.float() - engine_logprobs_N.float()).detach())


def _at_level(log_ratio_N: Tensor, num_actions_B: Tensor, level: str) -> Tensor:
    if level == "token":
        return log_ratio_N
    reduce = segment_sum if level == "sequence" else segment_mean
    return repeat_per_action(reduce(log_ratio_N, num_actions_B), num_actions_B)


def _exp(log_ratio_N: Tensor) -> Tensor:
    return torch.exp(log_ratio_N.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO))
