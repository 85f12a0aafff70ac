"""PPO, GSPO and value losses per token, and their aggregation."""

import math

import pytest
import torch

from openrlhf.algorithms.policy_loss import (
    ClipRange,
    aggregate,
    cispo_loss,
    gspo_loss,
    ppo_loss,
    sapo_loss,
    value_loss,
)


def loss_terms(function, ratios, advantages, **clip):
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().float().requires_grad_()
    return logprobs, function(
        logprobs,
        torch.zeros(len(ratios)),
        advantages_N=torch.tensor(advantages),
        num_actions_B=torch.tensor([len(ratios)]),
        clip=ClipRange(**clip),
    )


def ppo(ratios, advantages, **clip):
    return loss_terms(ppo_loss, ratios, advantages, **clip)


def test_ppo_by_hand():
    logprobs, terms = ppo([1.0, 1.5, 0.5, 1.5, 0.5], [2.0, 2.0, 2.0, -2.0, -2.0])
    # up-moves of good tokens and down-moves of bad ones are clipped; the pessimistic side is not
    assert terms.loss_N.tolist() == pytest.approx([-2.0, -2.4, -1.0, 3.0, 1.6])
    assert terms.is_clipped_N.tolist() == [False, True, False, False, True]
    assert terms.ratio_N.tolist() == pytest.approx([1.0, 1.5, 0.5, 1.5, 0.5])
    assert terms.log_ratio_N.exp().tolist() == pytest.approx([1.0, 1.5, 0.5, 1.5, 0.5])
    terms.loss_N.sum().backward()
    # clipped tokens have no gradient, and others that of the ratio
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 0.0, -1.0, 3.0, 0.0])


def test_clipping_can_be_asymmetric():
    _, terms = ppo([1.5, 0.5], [1.0, -1.0], low=0.1, high=0.3)
    assert terms.loss_N.tolist() == pytest.approx([-1.3, 0.9])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    _, terms = ppo([10.0, 1.1, 0.5, 10.0], [-1.0, -1.0, -1.0, 1.0], dual=3.0)
    assert terms.loss_N.tolist() == pytest.approx([3.0, 1.1, 0.8, -1.2])
    assert terms.is_clipped_N.tolist() == [True, False, True, True]  # those without a gradient


def test_gspo_has_one_ratio_per_sequence():
    logprobs = torch.tensor([0.2, 0.0, -0.3, 0.9], requires_grad=True)
    terms = gspo_loss(
        logprobs,
        torch.zeros(4),
        advantages_N=torch.tensor([2.0, 2.0, 2.0, -1.0]),
        num_actions_B=torch.tensor([2, 0, 2]),
        clip=ClipRange(low=0.2, high=0.2),
    )
    first, second = math.exp(0.1), math.exp(0.3)
    assert terms.ratio_N.tolist() == pytest.approx([first, first, second, second])
    assert terms.loss_N.tolist() == pytest.approx([-2 * first, -2 * first, -2.4, second])


def test_value_loss_by_hand():
    loss = value_loss(
        torch.tensor([1.0, 2.0, 0.0]),
        torch.tensor([1.0, 1.0, 1.0]),
        returns_N=torch.tensor([2.0, 2.0, -1.0]),
        clip=0.5,
    )
    # second: clipped to 1.5, error 0.25 against 0; third: clipped to 0.5, 2.25 against 1
    assert loss.tolist() == [0.5, 0.125, 1.125]


@pytest.mark.parametrize(
    ("mode", "expected"),
    # 5 samples, 12 tokens in the whole step, of which these are 3 samples and 5 tokens
    [("token_mean", 15 / 12), ("seq_mean", (1.5 + 0 + 4) / 5), ("seq_sum_norm", 15 / (5 * 8))],
)
def test_aggregation_by_hand(mode, expected):
    found = aggregate(
        torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        torch.tensor([2, 0, 3]),
        mode=mode,
        num_tokens_global=12,
        num_seqs_global=5,
        max_new_tokens=8,
    )
    assert found.item() == pytest.approx(expected)


def test_cispo_by_hand():
    logprobs, terms = loss_terms(cispo_loss, [1.0, 3.0, 0.5], [2.0, 2.0, -1.0], high=1.0)
    # -min(ratio, 2) A logp
    assert terms.loss_N.tolist() == pytest.approx([0.0, -4 * math.log(3), 0.5 * math.log(0.5)])
    assert terms.is_clipped_N.tolist() == [False, True, False]
    terms.loss_N.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-2.0, -4.0, 0.5])  # none is lost by clipping


def test_sapo_by_hand():
    logprobs, terms = loss_terms(sapo_loss, [1.0, 3.0, 3.0], [1.0, 2.0, -2.0], gates=(1.0, 2.0))
    gate = [0.5, 1 / (1 + math.exp(-2.0)), 1 / (1 + math.exp(-4.0))]
    assert terms.loss_N.tolist() == pytest.approx([-2.0, -8 * gate[1], 4 * gate[2]])
    terms.loss_N.sum().backward()
    # d/dlogp = -4 p (1 - p) ratio A: the full gradient at ratio 1, less and less away from it
    fades = [4 * p * (1 - p) for p in gate]
    expected = [-1.0, -fades[1] * 3 * 2, fades[2] * 3 * 2]
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-5)
    assert terms.is_clipped_N.tolist() == [False, True, True]  # weights 1, 0.42 and 0.07
