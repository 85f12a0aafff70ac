"""Drawing the next tokens: temperature, top-p, and the log-prob of what was drawn.

Suffixes: R rows that are being decoded, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample_tokens(
    logits_RV: Tensor, temperature_R: Tensor, top_p_R: Tensor, uniform_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the distribution at `uniform_R` (float64 in [0, 1)).

    Returns token ids (R,) int64 and their log-probs (R,) float32 under softmax(logits /
    temperature), before top-p.
    Temperature 0 takes the most likely token and reports its log-prob at temperature 1.
    """
    is_greedy_R = temperature_R == 0
    divisor_R = temperature_R.masked_fill(is_greedy_R, 1.0)
    logprobs_RV = (logits_RV.float() / divisor_R[:, None]).log_softmax(-1)
    probs_RV = logprobs_RV.exp()
    if bool((top_p_R < 1).any()):
        probs_RV = keep_top_p(probs_RV, top_p_R)
    cumulative_RV = probs_RV.cumsum(-1, dtype=torch.float64)
    threshold_R = uniform_R * cumulative_RV[:, -1]
    tokens_R = torch.searchsorted(cumulative_RV, threshold_R[:, None], right=True).squeeze(-1)
    tokens_R = tokens_R.clamp_max(logits_RV.size(-1) - 1)
    if bool(is_greedy_R.any()):
        tokens_R = torch.where(is_greedy_R, logits_RV.argmax(-1), tokens_R)
    return tokens_R, logprobs_RV.gather(-1, tokens_R[:, None]).squeeze(-1)


def penalize_repeats(logits_RV: Tensor, seen_RV: Tensor, penalty_R: Tensor) -> Tensor:
    """Divide positive logits of tokens that were there, multiply negative ones (arXiv 1909.05858).

    `seen_RV` is bool; a penalty of 1 changes nothing.
    """
    penalty_R1 = penalty_R[:, None]
    lowered_RV = torch.where(logits_RV > 0, logits_RV / penalty_R1, logits_RV * penalty_R1)
    return torch.where(seen_RV, lowered_RV, logits_RV)


def keep_top_p(probs_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Zero all but the fewest likeliest tokens whose mass reaches top_p (arXiv 1904.09751)."""
    sorted_RV, order_RV = probs_RV.sort(-1, descending=True)
    mass_before_RV = sorted_RV.cumsum(-1) - sorted_RV
    kept_RV = sorted_RV * (mass_before_RV < top_p_R[:, None])
    return torch.zeros_like(probs_RV).scatter_(-1, order_RV, kept_RV)
