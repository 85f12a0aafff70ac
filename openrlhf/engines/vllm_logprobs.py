"""Log-probs of the whole distribution out of vLLM, whatever top-p cuts off.

vLLM has two modes: before the temperature, or after top-p. The trainer computes what lies between
them, so the samplers of a worker are told to answer that. Drop this when vLLM has such a mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class FullLogprobs(nn.Module):
    """Stands before the top-p step of vLLM's first model runner and takes log-probs there."""

    def __init__(self, top_p_step: Any) -> None:
        super().__init__()
        self.top_p_step = top_p_step
        top_p_step.logprobs_mode = "raw_logprobs"  # it need not compute any itself

    def forward(self, logits_RV: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        """Sampled tokens (R,) and log-probs (R, V) of the logits that came in."""
        logprobs_RV = logits_RV.log_softmax(dim=-1, dtype=torch.float32)
        sampled_R, _ = self.top_p_step(logits_RV, *args)  # may change the logits in place
        return sampled_R, logprobs_RV


def report_full_logprobs(sampler: Any) -> None:
    """Make a sampler report log-probs as they are before top-p; those of both model runners of vLLM
    0.32 are known.
    """
    if hasattr(sampler, "topk_topp_sampler"):
        sampler.topk_topp_sampler = FullLogprobs(sampler.topk_topp_sampler)
        return
    sample = sampler._sample_random

    def sample_and_keep_logits(logits_RV: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        whole_RV = logits_RV.clone()
        sampled_R, _ = sample(logits_RV, *args)
        return sampled_R, whole_RV

    sampler._sample_random = sample_and_keep_logits
