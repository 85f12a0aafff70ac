"""Forwards are made for the samples that need them, and come back in their places."""

from __future__ import annotations

import pytest
import torch

from openrlhf.config.ppo import PPOConfig
from openrlhf.trainer.ppo_utils.experience_maker import (
    Forwards,
    RemoteExperienceMaker,
)
from tests.trainer.test_experience import rollout

ROLLOUTS = [
    rollout([1], [2, 3], reward=0.0, group=0),
    rollout([1], [4], reward=1.0, group=0),
    rollout([5], [6, 7, 8], reward=1.0, group=1),  # its group teaches nothing
    rollout([5], [9], reward=1.0, group=1),
    rollout([1], [7, 7], reward=2.0, group=2),
    rollout([1], [3], reward=0.0, group=2),
]


class TokensAsLogprobs:
    """A forward whose answer is minus a tenth of each sampled token; notes what it was asked."""

    def __init__(self):
        self.num_samples = []

    def __call__(self, experience):
        self.num_samples.append(len(experience))
        return -experience.token_ids[experience.action_mask].float() / 10

    def start(self, experience):
        answer = self(experience)
        return lambda: answer


def maker(forward, **options):
    algo = {"advantage": {"estimator": "group_norm"}}
    config = PPOConfig.model_validate({"algo": algo})
    return RemoteExperienceMaker(config, Forwards(old_logprobs=forward, **options))


def test_groups_without_an_advantage_take_no_forward():
    forward = TokensAsLogprobs()
    experience, _ = maker(forward, only_busy=True).make_experience_batch(ROLLOUTS, 0.0)
    assert forward.num_samples == [4]
    # -1 is what the engine reported for the two samples that are left out
    expected = [-0.2, -0.3, -0.4, -1.0, -1.0, -1.0, -1.0, -0.7, -0.7, -0.3]
    assert experience.old_logprobs.tolist() == pytest.approx(expected)


def test_what_is_trained_on_is_the_same_with_all_forwards():
    few, _ = maker(TokensAsLogprobs(), only_busy=True).make_experience_batch(ROLLOUTS, 0.0)
    every = TokensAsLogprobs()
    full, _ = maker(every).make_experience_batch(ROLLOUTS, 0.0)
    assert every.num_samples == [6]
    assert torch.equal(few.advantages, full.advantages)
    busy = full.busy_samples()
    assert busy == [0, 1, 4, 5]
    assert torch.equal(few.select(busy).old_logprobs, full.select(busy).old_logprobs)


def test_a_step_that_teaches_nothing_takes_no_forward_at_all():
    forward = TokensAsLogprobs()
    experience, _ = maker(forward, only_busy=True).make_experience_batch(ROLLOUTS[2:4], 0.0)
    assert forward.num_samples == [] and experience.old_logprobs is None
