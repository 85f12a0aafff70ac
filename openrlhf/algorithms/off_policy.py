"""Correct for the gap between the trainer's log-probs and those the engine sampled under.

The cause may be numerics, staleness or a bug. Shapes: N action tokens of B samples end to end. A
missing engine log-prob must have been refused before.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from openrlhf.algorithms.tokens import exp_of_log_ratio, segment_mean, segment_sum

MIN_PROBABILITY = 1e-6
MAX_WEIGHT = 5.0  # of tokens that a divergence lets pass: it says little of their ratio


@dataclass(frozen=True)
class Correction:
    """Importance weights for tokens that another policy sampled: ratio of the trainer's old
    probability to the engine's.

    A gate is read at a `level`: of every token, or of a whole sequence. Levels "token" and "seq"
    weigh tokens by their own ratios, and "seq" reads the mean of the gate over the sequence
    (geometric for the ratio); "sequence" and "geometric" weigh all tokens by the ratio of the
    sequence (product over its tokens, or that to the power 1 / length).

    `gating`: the ratio itself; binary_kl, p log(p / q) + (1 - p) log((1 - p) / (1 - q)); or tv,
    |p - q|, with p the engine's and q the trainer's probability of the sampled token. A divergence
    has the upper bound alone, and what it lets pass is weighted by at most 5. `mode` outside the
    band [low, high]: truncate the weight at high, clip it to both ends, or mask (weight 0).
    `clamp_survivors`: what a mask lets pass is weighted by at most high.

    Truncated importance sampling: Ionides, J. Comput. Graph. Stat. 2008; masking: arXiv 2510.18855
    (IcePop).

    Example: `Correction("token", "mask", 0.5, 2.0)` gives a token of ratio 3 the weight 0.
    """

    level: str = "token"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0
    gating: str = "ratio"
    clamp_survivors: bool = False


class ImportanceWeights(NamedTuple):
    """Weights of the policy loss, without gradient.

    Example: ratios 0.5 and 3, truncated at 2: `weights_N` [0.5, 2.0], `ratio_N` [0.5, 3.0],
    `is_cut_N` [F, T].
    """

    weights_N: Tensor
    ratio_N: Tensor  # at the level of the correction, before the mode
    is_cut_N: Tensor  # bool, outside what the mode lets pass


def importance_weights(
    correction: Correction,
    trainer_logprobs_N: Tensor,
    engine_logprobs_N: Tensor,
    num_actions_B: Tensor,
) -> ImportanceWeights:
    """Return weights (N,) by which the losses of tokens are multiplied; denominators stay as they
    are.
    """
    trainer_N = trainer_logprobs_N.detach().float()
    engine_N = engine_logprobs_N.detach().float()
    log_ratio_N = trainer_N - engine_N
    ratio_N = exp_of_log_ratio(_at_level(log_ratio_N, num_actions_B, correction.level))
    weighs_tokens = correction.level in ("token", "seq")
    weights_N = exp_of_log_ratio(log_ratio_N) if weighs_tokens else ratio_N
    gate_N = ratio_N
    if correction.gating != "ratio":
        divergence_N = token_divergence(engine_N, trainer_N, correction.gating)
        gate_N = _at_level(divergence_N, num_actions_B, correction.level)
    has_floor = correction.mode != "truncate" and correction.gating == "ratio"
    low = correction.low if has_floor else 0.0
    is_cut_N = (gate_N < low) | (gate_N > correction.high)
    if correction.mode == "mask":
        if correction.gating != "ratio":
            weights_N = weights_N.clamp(max=MAX_WEIGHT)
        elif correction.clamp_survivors:
            weights_N = weights_N.clamp(max=correction.high)
        weights_N = weights_N.masked_fill(is_cut_N, 0.0)
    else:
        weights_N = weights_N.clamp(low, correction.high)
    return ImportanceWeights(weights_N, ratio_N, is_cut_N)


def token_divergence(engine_logprobs_N: Tensor, trainer_logprobs_N: Tensor, kind: str) -> Tensor:
    """Return the divergence of engine and trainer at each sampled token, (N,).

    Its probability is p for the engine and q for the trainer, clamped to [1e-6, 1 - 1e-6].
    binary_kl: KL(Bernoulli(p) || Bernoulli(q)); tv: |p - q|.
    """
    p_N = engine_logprobs_N.exp().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    q_N = trainer_logprobs_N.exp().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    if kind == "tv":
        return (p_N - q_N).abs()
    return p_N * (p_N / q_N).log() + (1 - p_N) * ((1 - p_N) / (1 - q_N)).log()


def _at_level(values_N: Tensor, num_actions_B: Tensor, level: str) -> Tensor:
    if level == "token":
        return values_N
    reduce = segment_sum if level == "sequence" else segment_mean
    return reduce(values_N, num_actions_B).repeat_interleave(num_actions_B)
