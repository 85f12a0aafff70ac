"""From one step's experience to optimizer steps: which samples, in which order, on which rank.

The plan is made once by the controller and knows the global denominators, so that the gradient does
not depend on the number of ranks, on the micro-batches or on samples left out because they cannot
contribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from openrlhf.algorithms.balancing import (
    balanced_partitions,
    fixed_batches,
    token_budget_batches,
)
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.pretrain_text import TextShare


@dataclass(frozen=True)
class UpdateStep:
    """One optimizer step as one rank sees it: its samples and the denominators of all ranks."""

    experience: Experience
    num_tokens: int  # sampled tokens of the whole optimizer step, all ranks
    num_samples: int  # samples of the whole optimizer step, all ranks
    num_steps: int = 1  # optimizer steps of this rollout batch
    texts: TextShare | None = None  # pre-training text that is learned beside the samples


@dataclass(frozen=True)
class MicroBatchPlan:
    """How a rank cuts its samples: by a token budget when one is set, else by a fixed count."""

    micro_batch_size: int
    max_tokens: int | None = None

    def cut(self, seq_lengths: Sequence[int]) -> list[list[int]]:
        """Return the indices of the samples of each micro-batch; none of no samples."""
        if not seq_lengths:
            return []
        if self.max_tokens is None:
            return fixed_batches(len(seq_lengths), self.micro_batch_size)
        return token_budget_batches(seq_lengths, self.max_tokens)


def plan_updates(
    experience: Experience,
    num_ranks: int,
    *,
    train_batch_size: int,
    max_epochs: int,
    seed: int,
) -> list[list[UpdateStep]]:
    """Optimizer steps of every rank: [rank][step].

    Each epoch visits every sample once in a seeded order; the last batch may be smaller. The parts
    of an episode stay together and count as one. Samples whose advantages are all zero stay in the
    denominators.
    """
    generator = torch.Generator().manual_seed(seed)
    steps: list[list[UpdateStep]] = [[] for _ in range(num_ranks)]
    episodes = experience.episodes
    num_steps = num_updates_per_rollout(len(episodes), train_batch_size, max_epochs)
    for _ in range(max_epochs):
        order = torch.randperm(len(episodes), generator=generator).tolist()
        for batch in fixed_batches(len(order), train_batch_size):
            members = [index for i in batch for index in episodes[order[i]]]
            shares = balanced_partitions(experience.seq_lengths[members].tolist(), num_ranks)
            num_tokens = int(experience.num_actions[members].sum())
            for rank, share in enumerate(shares):
                own = experience.select([members[i] for i in share])
                steps[rank].append(UpdateStep(own, num_tokens, len(members), num_steps))
    return steps


def num_updates_per_rollout(num_samples: int, train_batch_size: int, max_epochs: int) -> int:
    """Optimizer steps that `plan_updates` makes of `num_samples` samples."""
    return -(-num_samples // train_batch_size) * max_epochs


def without_idle_samples(step: UpdateStep) -> UpdateStep:
    """Leave out samples that cannot move the policy: every advantage exactly zero."""
    experience = step.experience
    busy = experience.busy_samples()
    if len(busy) == len(experience):
        return step
    return replace(step, experience=experience.select(busy))
