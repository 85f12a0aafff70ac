"""The supervised token loss and the loss of a process reward model."""

import math

import pytest
import torch

from openrlhf.algorithms.language_loss import prm_losses, sft_loss

# Two markers over a vocabulary of four; the softmaxes are 1/10 2/10 3/10 4/10 and 4/8 1/8 1/8 2/8.
LOGITS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 1.0, 1.0, 2.0]]).log()
GOOD, BAD = 3, 1
REWARD_TOKENS = torch.tensor([GOOD, BAD])


def test_loss_is_the_negative_mean_over_the_tokens_of_the_step():
    first = sft_loss(torch.tensor([-1.0, -2.0]), num_tokens_global=5)
    second = sft_loss(torch.tensor([-3.0, -1.0, -0.5]), num_tokens_global=5)
    assert (first + second).item() == pytest.approx(7.5 / 5)


def test_reward_tokens_restrict_the_softmax():
    losses, is_correct = prm_losses(LOGITS[:, REWARD_TOKENS], torch.tensor([0, 1]))
    # 4 against 2, and 1 against 2
    assert losses.tolist() == pytest.approx([math.log(6 / 4), math.log(3)])
    assert is_correct.tolist() == [True, False]


def test_soft_labels_are_probabilities_of_the_first_reward_token():
    losses, is_correct = prm_losses(LOGITS[:, REWARD_TOKENS], torch.tensor([0.9, 0.2]))
    first = 0.9 * math.log(6 / 4) + 0.1 * math.log(6 / 2)
    second = 0.2 * math.log(3 / 2) + 0.8 * math.log(3 / 1)
    assert losses.tolist() == pytest.approx([first, second])
    assert is_correct.tolist() == [True, False]
