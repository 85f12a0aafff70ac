"""The supervised token loss."""

from __future__ import annotations

import pytest
import torch

from openrlhf.algorithms.language_loss import sft_loss


def test_loss_is_the_negative_mean_over_the_tokens_of_the_step():
    first = sft_loss(torch.tensor([-1.0, -2.0]), num_tokens_global=5)
    second = sft_loss(torch.tensor([-3.0, -1.0, -0.5]), num_tokens_global=5)
    assert (first + second).item() == pytest.approx(7.5 / 5)


def test_weights_scale_tokens():
    loss = sft_loss(
        torch.tensor([-1.0, -2.0]), num_tokens_global=2.0, weights_N=torch.tensor([0.0, 0.5])
    )
    assert loss.item() == 0.5


def test_a_micro_batch_without_targets_has_no_part_in_the_loss():
    logprobs = torch.zeros(0, requires_grad=True)
    loss = sft_loss(logprobs, num_tokens_global=5)
    loss.backward()
    assert loss.item() == 0.0 and logprobs.grad.shape == (0,)
