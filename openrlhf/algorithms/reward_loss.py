"""Losses of a reward model on pairs: the chosen response is to score above the rejected one.

Shapes: B pairs of a micro-batch. A loss is one number per pair; whoever calls divides the sum by
the pairs of the whole optimizer step.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def log_sigmoid_loss(gap_B: Tensor) -> Tensor:
    """Return -log sigmoid(gap), the Bradley-Terry loss (InstructGPT, arXiv 2203.02155)."""
    return -F.logsigmoid(gap_B)


def log_exp_loss(gap_B: Tensor) -> Tensor:
    """Return log(1 + exp(-gap)): the same function, kept because users know it by this name."""
    return F.softplus(-gap_B)


PAIRWISE_LOSSES = {"sigmoid": log_sigmoid_loss, "logexp": log_exp_loss}


def pairwise_losses(
    chosen_B: Tensor, rejected_B: Tensor, *, kind: str = "sigmoid", margin_B: Tensor | None = None
) -> Tensor:
    """Return the loss of r_chosen - r_rejected - margin, (B,) fp32.

    `margin_B` says by how much the chosen response is better (Llama 2, arXiv 2307.09288).
    """
    assert chosen_B.shape == rejected_B.shape, "each chosen reward needs its rejected one"
    gap_B = chosen_B.float() - rejected_B.float()
    if margin_B is not None:
        assert margin_B.shape == gap_B.shape, "one margin per pair is needed"
        gap_B = gap_B - margin_B.float()
    return PAIRWISE_LOSSES[kind](gap_B)
