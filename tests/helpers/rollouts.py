"""Samples of a rollout, as small as they can be."""

from itertools import count

import torch

from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.images import Picture
from openrlhf.utils.rollout import Rollout, sequence_tensors

_numbers = count()


def rollout(
    prompt: list[int],
    response: list[int],
    *,
    reward: float = 1.0,
    group: int = 0,
    images: tuple[Picture, ...] = (),
) -> Rollout:
    token_ids, action_mask = sequence_tensors(prompt, response)
    return Rollout(
        sample_id=f"test/{group + 1}/{next(_numbers)}",
        group_id=group,
        row_id=group,
        token_ids=token_ids,
        action_mask=action_mask,
        logprobs=torch.full((len(response),), -1.0),
        weight_versions=torch.zeros(len(response), dtype=torch.int32),
        finish_reason="stop",
        prompt_text="p",
        response_text="r",
        reward=reward,
        images=images,
    )


def largest_gap(model_dir, rollouts, temperature, processor=None) -> float:
    """The most that engine and trainer differ in the log-prob of a sampled token."""
    experience = Experience.from_rollouts(rollouts).laid_out()
    actor = Actor(load_causal_lm(model_dir))
    with torch.no_grad():
        logprobs = actor(experience.packed(processor), temperature=temperature).logprobs
    return float((logprobs - experience.rollout_logprobs).abs().max())
