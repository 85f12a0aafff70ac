"""Policy and value losses per token, and the one way in which per-token losses become a number.

Shapes: N action tokens of a micro-batch end to end, B its samples. A loss here never divides by
what it sees: the denominators of the whole optimizer step come in, so that the losses (policy,
value, KL, entropy alike) of micro-batches and ranks may simply be summed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf.algorithms.tokens import check_sum, exp_of_log_ratio, segment_mean


@dataclass(frozen=True)
class ClipRange:
    """Limits of a policy update: the ratio is clipped to [1 - low, 1 + high], and where A < 0 the
    loss is at most dual * |A|. `gates`: how steep SAPO's soft gate is for A > 0 and for A <= 0.

    Example: `ClipRange(low=0.2, high=0.28)` clips the ratio to [0.8, 1.28].
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    gates: tuple[float, float] = (1.0, 1.05)


class PolicyLossTerms(NamedTuple):
    """Loss and what to log of it; only loss_N carries a gradient.

    Example: logp - old [0, 0.5], A = 1 and a clip of 0.2 on both sides: `loss_N` [-1.0, -1.2],
    `ratio_N` [1.0, 1.65], `is_clipped_N` [F, T], `log_ratio_N` [0.0, 0.5].
    """

    loss_N: Tensor
    ratio_N: Tensor  # policy now over policy then
    is_clipped_N: Tensor  # bool, the clipped surrogate is the one in force
    log_ratio_N: Tensor  # logp - old per token, not clipped; minus its mean is the metric ppo_kl


def ppo_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    *,
    advantages_N: Tensor,
    num_actions_B: Tensor,
    clip: ClipRange,
) -> PolicyLossTerms:
    """Return -min(ratio A, clip(ratio, 1 - low, 1 + high) A) with ratio = exp(clip(logp - old,
    +-20)).

    PPO, arXiv 1707.06347.
    """
    log_ratio_N = _log_ratio(logprobs_N, old_logprobs_N, num_actions_B)
    return _clipped_surrogate(log_ratio_N, log_ratio_N.detach(), advantages_N, clip)


def gspo_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    *,
    advantages_N: Tensor,
    num_actions_B: Tensor,
    clip: ClipRange,
) -> PolicyLossTerms:
    """Return PPO's loss with one ratio per sequence, exp(mean of logp - old over its tokens).

    GSPO, arXiv 2507.18071; defined with the aggregation seq_mean.
    """
    log_ratio_N = _log_ratio(logprobs_N, old_logprobs_N, num_actions_B)
    sequence_B = segment_mean(log_ratio_N, num_actions_B)
    sequence_N = sequence_B.repeat_interleave(num_actions_B)
    return _clipped_surrogate(sequence_N, log_ratio_N.detach(), advantages_N, clip)


def cispo_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    *,
    advantages_N: Tensor,
    num_actions_B: Tensor,
    clip: ClipRange,
) -> PolicyLossTerms:
    """Return -stopgrad(min(ratio, 1 + high)) A logp: every token keeps a gradient, its weight is
    capped.

    CISPO, arXiv 2506.13585.
    """
    log_ratio_N = _log_ratio(logprobs_N, old_logprobs_N, num_actions_B).detach()
    assert advantages_N.shape == log_ratio_N.shape, "one advantage per token is needed"
    ratio_N = exp_of_log_ratio(log_ratio_N)
    weights_N = ratio_N.clamp(max=1 + clip.high)
    loss_N = -weights_N * advantages_N * logprobs_N.float()
    return PolicyLossTerms(loss_N, ratio_N, weights_N < ratio_N, log_ratio_N)


def sapo_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    *,
    advantages_N: Tensor,
    num_actions_B: Tensor,
    clip: ClipRange,
) -> PolicyLossTerms:
    """Return -sigmoid(tau (ratio - 1)) 4 / tau A, tau by the sign of A: the gradient fades with the
    distance from ratio 1 instead of ending at a bound. `is_clipped_N`: less than half is left.

    SAPO, arXiv 2511.20347.
    """
    log_ratio_N = _log_ratio(logprobs_N, old_logprobs_N, num_actions_B)
    assert advantages_N.shape == log_ratio_N.shape, "one advantage per token is needed"
    ratio_N = exp_of_log_ratio(log_ratio_N)
    above, below = clip.gates
    tau_N = torch.where(advantages_N > 0, above, below)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1))
    weight_N = (4 * gate_N * (1 - gate_N)).detach()  # of the gradient, 1 at ratio 1
    loss_N = -gate_N * (4 / tau_N) * advantages_N
    return PolicyLossTerms(loss_N, ratio_N.detach(), weight_N < 0.5, log_ratio_N.detach())


def _log_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor, num_actions_B: Tensor) -> Tensor:
    assert logprobs_N.shape == old_logprobs_N.shape, "log-probs of the same tokens are needed"
    check_sum(logprobs_N, num_actions_B)
    return logprobs_N.float() - old_logprobs_N.float()


def _clipped_surrogate(
    log_ratio_N: Tensor, token_log_ratio_N: Tensor, advantages_N: Tensor, clip: ClipRange
) -> PolicyLossTerms:
    """Return the pessimistic surrogate; with dual clip -max(min(...), dual A) where A < 0
    (1912.09729).
    """
    assert advantages_N.shape == log_ratio_N.shape, "one advantage per token is needed"
    ratio_N = exp_of_log_ratio(log_ratio_N)
    free_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high) * advantages_N
    surrogate_N = torch.minimum(free_N, clipped_N)
    is_clipped_N = clipped_N.detach() < free_N.detach()
    if clip.dual is not None:
        floor_N = clip.dual * advantages_N
        is_below_N = (advantages_N < 0) & (surrogate_N.detach() < floor_N)
        surrogate_N = torch.where(is_below_N, floor_N, surrogate_N)
        is_clipped_N = is_clipped_N | is_below_N
    return PolicyLossTerms(-surrogate_N, ratio_N.detach(), is_clipped_N, token_log_ratio_N)


def value_loss(
    values_N: Tensor, old_values_N: Tensor, *, returns_N: Tensor, clip: float | None
) -> Tensor:
    """Return max((clip(V, V_old +- clip) - R)^2, (V - R)^2) / 2, (N,); with clip None (V - R)^2 /
    2.
    """
    assert values_N.shape == old_values_N.shape == returns_N.shape, "one value per token is needed"
    free_N = (values_N - returns_N).square()
    if clip is None:
        return free_N / 2
    near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    return torch.maximum(free_N, (near_N - returns_N).square()) / 2


POLICY_LOSSES: dict[str, Callable[..., PolicyLossTerms]] = {
    "ppo": ppo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
}
OWN_AGGREGATIONS = {"gspo": "seq_mean"}  # of losses that are defined for one only


def aggregate(
    loss_N: Tensor,
    num_actions_B: Tensor,
    *,
    mode: str,
    num_tokens_global: int | float | Tensor,
    num_seqs_global: int | float | Tensor,
    max_new_tokens: int,
) -> Tensor:
    """Return this micro-batch's part of the loss of the whole optimizer step, (); the parts add up.

    token_mean: sum / tokens; seq_mean: sum of the samples' token means / samples; seq_sum_norm:
    sum / (samples * max_new_tokens) (Dr. GRPO, arXiv 2503.20783). Tokens and samples (those with an
    action) are counted over all micro-batches and ranks of the step. No tokens: 0, gradient 0.
    """
    check_sum(loss_N, num_actions_B)
    if mode == "token_mean":
        return loss_N.sum() / num_tokens_global
    if mode == "seq_mean":
        return segment_mean(loss_N, num_actions_B).sum() / num_seqs_global
    return loss_N.sum() / (num_seqs_global * max_new_tokens)
