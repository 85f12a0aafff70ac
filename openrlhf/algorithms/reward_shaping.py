"""Corrections of a sample's reward for how it ended. Shapes: B samples.

Knows lengths and finish reasons only; runs before rewards are compared within their group.
"""

from __future__ import annotations

import torch
from torch import Tensor


def penalise_overlong(
    rewards_B: Tensor,
    response_lengths_B: Tensor,
    *,
    max_new_tokens: int,
    buffer_len: float,
    penalty_factor: float = 1.0,
) -> Tensor:
    """Take off up to `penalty_factor`, linearly over the last `buffer_len` tokens allowed, (B,).

    e = min(length - (max_new_tokens - buffer_len), buffer_len); where e > 0,
    r - e / buffer_len * penalty_factor (DAPO, arXiv 2503.14476).
    """
    assert rewards_B.shape == response_lengths_B.shape, "one length per reward is needed"
    assert 0 < buffer_len <= max_new_tokens, f"buffer of {buffer_len} in {max_new_tokens} tokens"
    excess_B = response_lengths_B - (max_new_tokens - buffer_len)
    return rewards_B - excess_B.clamp(0, buffer_len) / buffer_len * penalty_factor


def penalise_truncated(rewards_B: Tensor, is_truncated_B: Tensor, *, coef: float) -> Tensor:
    """Return rewards of truncated samples times `coef` in [0, 1], or set to it where negative,
    (B,).
    """
    assert rewards_B.shape == is_truncated_B.shape, "one flag per reward is needed"
    assert coef <= 1, f"a coefficient of {coef} would reward truncation"
    penalised_B = rewards_B * coef if coef >= 0 else torch.full_like(rewards_B, coef)
    return torch.where(is_truncated_B.bool(), penalised_B, rewards_B)
