"""Losses on tokens of text: next tokens, and verdicts of a process reward model at step markers.

Shapes: N target tokens (or markers) of a micro-batch end to end, V vocabulary, R reward tokens;
which tokens are targets was decided before.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def sft_loss(logprobs_N: Tensor, *, num_tokens_global: int | float | Tensor) -> Tensor:
    """Return -sum(logp) / tokens, (): this micro-batch's part of the token mean of the step.

    `num_tokens_global` counts the targets of all its micro-batches and ranks.
    """
    return -logprobs_N.float().sum() / num_tokens_global


def prm_losses(logits_NR: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropy of each marker's label under the logits at the marker itself, unshifted,
    (N,) fp32; and True where the likeliest of the allowed tokens is the labelled one, (N,).

    Integer labels are places among the R allowed tokens. Labels that are floats are the probability
    p of the first of exactly two: -(p log q_first + (1 - p) log q_second). Math-Shepherd, arXiv
    2312.08935.
    """
    assert labels_N.shape == logits_NR.shape[:1], "one label per marker is needed"
    logits_NR = logits_NR.float()
    if not labels_N.is_floating_point():
        losses_N = F.cross_entropy(logits_NR, labels_N, reduction="none")
        return losses_N, logits_NR.argmax(-1) == labels_N
    assert logits_NR.size(-1) == 2, "soft labels are defined for two reward tokens"
    targets_NR = torch.stack([labels_N, 1 - labels_N], -1).float()
    says_first_N = logits_NR[:, 0] >= logits_NR[:, 1]
    losses_N = F.cross_entropy(logits_NR, targets_NR, reduction="none")
    return losses_N, says_first_N == (labels_N >= 0.5)
