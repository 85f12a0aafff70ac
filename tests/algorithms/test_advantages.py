"""Group baselines, GAE, returns, normalisation, and the order of the steps."""

import statistics
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms import advantages
from openrlhf.algorithms.advantages import (
    ESTIMATORS,
    estimator,
    penalise_overlong,
    penalise_truncated,
)
from openrlhf.config.ppo import GROUP_ESTIMATORS, Estimator

WIDE = (-1e9, 1e9)


STD = statistics.stdev([1, 2, 6])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (advantages.rloo, [1 - 4, -10, 2 - 3.5, 10, 6 - 1.5, 0]),
        (advantages.group_centred, [-2, -5, -1, 5, 3, 0]),
        (
            advantages.group_standardised,
            [-2 / STD, -(0.5**0.5), -1 / STD, 0.5**0.5, 3 / STD, 0],
        ),
    ],
)
def test_groups_of_any_order_and_size_are_shaped_by_hand(shape, expected):
    rewards = torch.tensor([1.0, 10.0, 2.0, 20.0, 6.0, 7.0])
    shaped = shape(rewards, torch.tensor([9, 2, 9, 2, 9, 5]))
    assert shaped.tolist() == pytest.approx(expected, rel=1e-6)


@given(st.floats(-5, 5, width=32), st.integers(2, 9))
def test_equal_rewards_have_no_advantage_however_they_round(reward, size):
    rewards, group_ids = torch.full((size,), reward), torch.zeros(size).long()
    for shape in (advantages.rloo, advantages.group_centred, advantages.group_standardised):
        assert not shape(rewards, group_ids).any()


def gae_loop(rewards, values, gamma, lambd):
    """A_t = sum_l (gamma lambd)^l delta_{t+l}, spelled out."""
    length = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(length)]
    return [
        sum((gamma * lambd) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)
    ]


def test_returns_discount_later_rewards():
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    assert advantages.discounted_sums(rewards, 1.0).tolist() == [[7.0, 6.0, 4.0]]
    assert advantages.discounted_sums(rewards, 0.5).tolist() == [[3.0, 4.0, 4.0]]


# Two prompts with two and three samples; the fourth sample has no action.
REWARDS = torch.tensor([1.0, 0.0, 2.0, 100.0, 5.0])
GROUP_IDS = torch.tensor([0, 0, 1, 1, 1])
COUNTS = torch.tensor([2, 1, 1, 0, 2])
KL = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
VALUES = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def compute(name, kl_coef=0.1, clip_range=WIDE, kl=KL, **options):
    values = VALUES if ESTIMATORS[name].needs_critic else None
    return estimator(name, **options).compute(
        REWARDS, GROUP_IDS, kl, values, COUNTS, kl_coef=kl_coef, clip_range=clip_range
    )[:2]


ROOT_HALF = 0.5**0.5
SHAPED = {
    "reinforce": [1.0, 0.0, 2.0, 5.0],
    "rloo": [1.0, -1.0, -3.0, 3.0],
    "reinforce_baseline": [0.5, -0.5, -1.5, 1.5],
    "dr_grpo": [0.5, -0.5, -1.5, 1.5],
    "group_norm": [ROOT_HALF, -ROOT_HALF, -ROOT_HALF, ROOT_HALF],
}


@pytest.mark.parametrize("name", SHAPED)
def test_returns_are_the_shaped_reward_less_the_kl_to_come(name):
    _, returns = compute(name)
    a, b, c, d = SHAPED[name]
    expected = [a - 0.03, a - 0.02, b - 0.03, c - 0.04, d - 0.11, d - 0.06]
    assert returns.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", SHAPED)
def test_advantages_are_the_returns_normalised_where_the_estimator_says_so(name):
    found, returns = compute(name)
    centred, _ = compute(name, no_std_norm=True)
    numbers = returns.tolist()
    if name not in ("reinforce", "reinforce_baseline"):
        assert torch.equal(found, returns)
        return
    mean, std = statistics.fmean(numbers), statistics.pstdev(numbers)
    assert found.tolist() == pytest.approx([(x - mean) / std for x in numbers], abs=1e-5)
    assert centred.tolist() == pytest.approx([x - mean for x in numbers], abs=1e-6)


def test_gae_of_an_estimator_is_per_sample_and_normalised_over_all_tokens():
    found, returns = compute("gae", kl_coef=0.0, gamma=0.9, lambd=0.8)
    raw = [
        *gae_loop([0, 1], [0.1, 0.2], 0.9, 0.8),
        *gae_loop([0], [0.3], 0.9, 0.8),
        *gae_loop([2], [0.4], 0.9, 0.8),
        *gae_loop([0, 5], [0.5, 0.6], 0.9, 0.8),
    ]
    expected = [a + v for a, v in zip(raw, VALUES.tolist(), strict=True)]
    assert returns.tolist() == pytest.approx(expected, abs=1e-6)
    mean, std = statistics.fmean(raw), statistics.pstdev(raw)
    assert found.tolist() == pytest.approx([(a - mean) / std for a in raw], abs=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_without_a_kl_term_the_numbers_are_those_of_a_kl_of_zero(name, gamma):
    left_out = compute(name, kl=None, gamma=gamma)
    zero = compute(name, kl=torch.zeros(6), gamma=gamma)
    assert all(map(torch.equal, left_out, zero))


def test_clipping_comes_after_shaping_and_before_the_kl():
    _, returns = compute("rloo", clip_range=(-2.0, 2.0))
    assert returns.tolist() == pytest.approx([0.97, 0.98, -1.03, -2.04, 1.89, 1.94])
    _, returns = compute("reinforce", clip_range=(0.5, 3.0))
    assert returns.tolist() == pytest.approx([0.97, 0.98, 0.47, 1.96, 2.89, 2.94])


def test_flash_reinforce_subtracts_the_mean_of_the_batch_and_nothing_else():
    """Rewards 1, 0, 2 of three prompts with one sample each; the mean is 1."""
    found, returns, _ = estimator("flash_reinforce").compute(
        torch.tensor([1.0, 0.0, 2.0]),
        torch.tensor([0, 1, 2]),
        torch.zeros(4),
        None,
        torch.tensor([1, 2, 1]),
        kl_coef=0.0,
        clip_range=WIDE,
    )
    assert found.tolist() == [0.0, -1.0, -1.0, 1.0]
    assert returns.tolist() == found.tolist()


def test_the_flag_has_every_estimator():
    assert set(get_args(Estimator)) == set(ESTIMATORS)


def test_the_flag_knows_which_estimators_learn_nothing_from_one_sample_a_prompt():
    rewards, group_ids = torch.tensor([2.0, 5.0]), torch.tensor([0, 1])
    shaped = {name: entry.shape(rewards, group_ids) for name, entry in ESTIMATORS.items()}
    assert {name for name, found in shaped.items() if not found.any()} == set(GROUP_ESTIMATORS)


def test_overlong_penalty_grows_linearly_over_the_buffer():
    lengths = torch.tensor([10, 80, 81, 90, 100, 130])
    found = penalise_overlong(
        torch.ones(6), lengths, max_tokens=100, buffer_len=20, penalty_factor=2.0
    )
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.9, 0.0, -1.0, -1.0])


@pytest.mark.parametrize(
    ("coef", "expected"),
    [(1.0, [3.0, 2.0]), (0.25, [3.0, 0.5]), (0.0, [3.0, 0.0]), (-0.5, [3.0, -0.5])],
)
def test_truncated_samples_are_scaled_or_set(coef, expected):
    rewards, is_truncated = torch.tensor([3.0, 2.0]), torch.tensor([False, True])
    assert penalise_truncated(rewards, is_truncated, coef=coef).tolist() == expected


def test_who_is_cut_by_the_range_is_known():
    rewards, group_ids = torch.tensor([0.0, 100.0, 60.0, 40.0]), torch.zeros(4).long()
    found = estimator("dr_grpo").compute(
        rewards, group_ids, None, None, torch.ones(4).long(), kl_coef=0.0, clip_range=(-45, 45)
    )
    assert found.advantages_N.tolist() == [-45.0, 45.0, 10.0, -10.0]
    assert found.is_clipped_B.tolist() == [True, True, False, False]
