"""Next-token losses.

Shapes: N target tokens of a micro-batch end to end; which tokens are targets was decided before.
"""

from __future__ import annotations

from torch import Tensor


def sft_loss(
    logprobs_N: Tensor, *, num_tokens_global: int | float | Tensor, weights_N: Tensor | None = None
) -> Tensor:
    """-sum(weight * logp) / tokens, (): this micro-batch's part of the token mean of the step.

    `num_tokens_global` counts the targets (or sums their weights) of its micro-batches and ranks.
    """
    losses_N = -logprobs_N.float()
    if weights_N is not None:
        assert weights_N.shape == losses_N.shape, "one weight per target is needed"
        losses_N = losses_N * weights_N
    return losses_N.sum() / num_tokens_global
