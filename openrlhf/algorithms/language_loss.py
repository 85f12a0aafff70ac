"""Losses on tokens of text: next tokens, and verdicts of a process reward model at step markers.

Shapes: N target tokens (or markers) of a micro-batch end to end, V vocabulary, R reward tokens;
which tokens are targets was decided before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def sft_loss(logprobs_N: Tensor, *, num_tokens_global: int | float | Tensor) -> Tensor:
    """Return -sum(logp) / tokens, (): this micro-batch's part of the token mean of the step.

    `num_tokens_global` counts the targets of all its micro-batches and ranks.
    """
    return -logprobs_N.float().sum() / num_tokens_global


class PRMTerms(NamedTuple):
    """Loss and verdict at every marker; only losses_N carries a gradient."""

    losses_N: Tensor  # fp32
    is_correct_N: Tensor  # bool, the likeliest of the allowed tokens is the labelled one


def prm_losses(
    logits_NV: Tensor, labels_N: Tensor, *, reward_tokens_R: Tensor | None = None
) -> PRMTerms:
    """Return cross-entropy of each marker's label under the logits at the marker itself, unshifted.

    Integer labels are token ids. With `reward_tokens_R` the softmax runs over those tokens alone,
    and each label must be one of them. Labels that are floats are the probability p of the first
    of exactly two reward tokens: -(p log q_first + (1 - p) log q_second). Math-Shepherd, arXiv
    2312.08935.
    """
    assert labels_N.shape == logits_NV.shape[:1], "one label per marker is needed"
    allowed_NR = logits_NV if reward_tokens_R is None else logits_NV[:, reward_tokens_R]
    if labels_N.is_floating_point():
        has_two = reward_tokens_R is not None and len(reward_tokens_R) == 2
        assert has_two, "soft labels are defined for two reward tokens"
        return _soft_terms(allowed_NR.float(), labels_N.float())
    index_N = labels_N if reward_tokens_R is None else _find(labels_N, reward_tokens_R)
    losses_N = F.cross_entropy(allowed_NR.float(), index_N, reduction="none")
    return PRMTerms(losses_N, allowed_NR.detach().argmax(-1) == index_N)


def _soft_terms(logits_N2: Tensor, positive_N: Tensor) -> PRMTerms:
    """Return the loss of the first column's probability; a verdict is which side of one half it
    is on.
    """
    targets_N2 = torch.stack([positive_N, 1 - positive_N], -1)
    losses_N = -(targets_N2 * logits_N2.log_softmax(-1)).sum(-1)
    says_positive_N = logits_N2.detach()[:, 0] >= logits_N2.detach()[:, 1]
    return PRMTerms(losses_N, says_positive_N == (positive_N >= 0.5))


def _find(labels_N: Tensor, reward_tokens_R: Tensor) -> Tensor:
    """Return the place of each label among the reward tokens, (N,) int64."""
    is_equal_NR = labels_N.unsqueeze(-1) == reward_tokens_R
    assert bool(is_equal_NR.any(-1).all()), "a label is none of the reward tokens"
    return is_equal_NR.int().argmax(-1)
