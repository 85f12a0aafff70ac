"""From one step's experience to optimizer steps: which samples, in which order, on which rank.

The plan is made once by the controller and knows the global denominators, so that the gradient does
not depend on the number of ranks, on the micro-batches or on samples left out because they cannot
contribute. It is made of indices; the samples of a rank are cut out once, when its share is sent,
and the rank cuts its optimizer steps out of them.

Pre-training text may be mixed in, so that the policy does not forget how to write it:
PPO-ptx of InstructGPT (arXiv 2203.02155, section 3.5).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.balancing import balanced_partitions
from openrlhf.datasets.sampler import epoch_order
from openrlhf.trainer.ppo_utils.experience import Experience, SampleShare, opened
from openrlhf.trainer.ppo_utils.samples import Samples, scatter_back
from openrlhf.utils.metrics import Metrics

if TYPE_CHECKING:  # it imports datasets and pandas, which workers do not need
    from openrlhf.datasets.sft_dataset import SFTDataset


@dataclass(frozen=True)
class UpdateStep:
    """One optimizer step as one rank sees it: its samples and the denominators of all ranks.

    Example: samples 0 and 3 of 8, with `num_tokens` 812 and `num_samples` 8 of all ranks.
    """

    samples: Samples
    num_tokens: int  # sampled tokens of the whole optimizer step, all ranks
    num_samples: int  # samples of the whole optimizer step, all ranks
    num_steps: int = 1  # optimizer steps of this rollout batch
    kl_coef: float = 0.0  # of the KL in the policy's loss
    texts: tuple[Tensor, ...] = ()  # (T_i,) int64 each: pre-training text that is mixed in
    num_text_tokens: int = 0  # targets of the text of the whole optimizer step, all ranks


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step of all ranks: whose samples, and the denominators.

    Example: `PlannedStep([[0, 2], [1]], num_tokens=6, num_samples=3)`: rank 0 has samples 0 and 2.
    """

    members: Sequence[Sequence[int]]  # [rank]: samples of the experience
    num_tokens: int
    num_samples: int
    num_steps: int = 1
    kl_coef: float = 0.0
    texts: Sequence[tuple[Tensor, ...]] = ()  # [rank]; empty: no text
    num_text_tokens: int = 0


OF_ALL_RANKS = ("num_tokens", "num_samples", "num_steps", "kl_coef", "num_text_tokens")


@dataclass(frozen=True)
class UpdateShare(Sequence[UpdateStep]):
    """The optimizer steps of one rank, cut out of its samples when they are asked for.

    Example: `UpdateShare(share, [([0, 2], same, ()), ([1], same, ())])`: two steps of three
    samples, with `same` {"num_tokens": 6, "num_samples": 3, ...}.
    """

    share: SampleShare | Samples
    # Of each step: the samples, what all ranks have in common, and the text
    steps: Sequence[tuple[Sequence[int], dict[str, Any], tuple[Tensor, ...]]]

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def samples(self) -> Samples:
        """Return the samples of all steps."""
        return opened(self.share)

    def __getitem__(self, index: int) -> UpdateStep:  # type: ignore[override]
        indices, same, texts = self.steps[index]
        return UpdateStep(self.samples.select(indices), texts=texts, **same)


@dataclass(frozen=True)
class Skip:
    """An optimizer step of a rollout batch that was skipped, as all ranks agree.

    Example: `Skip(done=3, left=4, why="the gradient norm is nan")`: the fourth of eight.
    """

    done: int  # optimizer steps of the batch before it
    left: int  # after it, which wait until `fit` is called for them
    why: str


@dataclass(frozen=True)
class UpdateResult:
    """The metrics and columns that one rank returns for its optimizer steps.

    Example: samples 0 and 3 with three sampled tokens: `sample_indices` (0, 3), `columns`
    {"new_logprobs": array([-0.1, -2.3, -0.4])}.
    """

    metrics: Metrics
    # Of samples in the rollout batch, in the order of the columns.
    sample_indices: Sequence[int] = ()
    # By name: numbers (N,) of their sampled tokens, when the loss first saw them.
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    skip: Skip | None = None  # at which the updates ended


def seen_column(results: Sequence[UpdateResult], name: str, num_actions: Tensor) -> Tensor:
    """Return a column of all ranks in sample order, (N,); NaN for samples that no loss saw."""
    seen = [result for result in results if result.sample_indices]
    indices = [result.sample_indices for result in seen]
    is_unseen = np.ones(len(num_actions), bool)
    is_unseen[list(chain.from_iterable(indices))] = False
    unseen = is_unseen.nonzero()[0].tolist()
    nans = np.full(int(num_actions[unseen].sum()), math.nan, np.float32)
    columns = [*(result.columns[name] for result in seen), nans]
    return scatter_back(columns, [*indices, unseen], num_actions)


def plan_updates(
    experience: Experience,
    num_ranks: int,
    *,
    train_batch_size: int,
    max_epochs: int,
    seed: int,
    kl_coef: float = 0.0,
) -> list[PlannedStep]:
    """Return the optimizer steps of a rollout batch.

    Each epoch visits every sample once in a seeded order; the last batch may be smaller. The parts
    of an episode stay together and count as one. Samples whose advantages are all zero stay in the
    denominators.
    """
    generator = torch.Generator().manual_seed(seed)
    num_episodes = experience.num_episodes
    costs, sizes = experience.costs.numpy(), experience.num_actions.numpy()
    num_steps = num_updates_per_rollout(num_episodes, train_batch_size, max_epochs)
    plan = []
    for _ in range(max_epochs):
        order = torch.randperm(num_episodes, generator=generator).numpy()
        for start in range(0, num_episodes, train_batch_size):
            where = experience.samples_of(order[start : start + train_batch_size])
            members = where.tolist()
            parts = balanced_partitions(costs[where].tolist(), num_ranks)
            shares = [[members[i] for i in part] for part in parts]
            num_tokens = int(sizes[where].sum())
            plan.append(PlannedStep(shares, num_tokens, len(members), num_steps, kl_coef))
    return plan


def update_shares(experience: Experience, plan: Sequence[PlannedStep]) -> Iterator[UpdateShare]:
    """Yield the share of every rank. A sample that a rank sees in several epochs is sent once."""
    members = list(zip(*(step.members for step in plan), strict=True))  # [rank][step]
    texts = zip(*(step.texts or [()] * len(members) for step in plan), strict=True)
    same = [{name: vars(step)[name] for name in OF_ALL_RANKS} for step in plan]
    parts = [sorted(set(chain.from_iterable(own_members))) for own_members in members]
    shares = zip(experience.cut(parts), parts, members, texts, strict=True)
    for share, part, own_members, own_texts in shares:
        position = dict(zip(part, range(len(part)), strict=True))
        own = [[position[index] for index in one] for one in own_members]
        yield UpdateShare(share, list(zip(own, same, own_texts, strict=True)))


def num_updates_per_rollout(num_samples: int, train_batch_size: int, max_epochs: int) -> int:
    """Return the number of optimizer steps that `plan_updates` makes of `num_samples` samples."""
    return -(-num_samples // train_batch_size) * max_epochs


def without_zero_advantages(step: UpdateStep) -> UpdateStep:
    """Leave out samples that cannot move the policy: every advantage exactly zero."""
    advantages = step.samples.advantages
    assert advantages is not None, "advantages are not known yet"
    parts = advantages.split(step.samples.num_actions.tolist())
    busy = [index for index, part in enumerate(parts) if bool((part != 0).any())]
    return replace(step, samples=step.samples.select(busy))


def mix_texts(
    plan: Sequence[PlannedStep], texts: "SFTDataset", *, num_seen: int, seed: int
) -> list[PlannedStep]:
    """Return the same optimizer steps with text mixed in: as many rows as the step
    has samples, divided among the ranks. Passes over the text go on after the `num_seen` rows of
    earlier calls, each in an order of its own.
    """
    end = num_seen + sum(step.num_samples for step in plan)
    size, first = len(texts), num_seen // len(texts)
    passes = range(first, end // size + 1)
    orders = torch.cat([epoch_order(size, seed, epoch) for epoch in passes])
    rows = iter(orders[num_seen - first * size :].tolist())
    mixed = []
    for step in plan:
        drawn = [texts[next(rows)].token_ids for _ in range(step.num_samples)]
        parts = balanced_partitions([len(text) for text in drawn], len(step.members))
        own = [tuple(drawn[index] for index in part) for part in parts]
        num_tokens = sum(len(text) - 1 for text in drawn)
        mixed.append(replace(step, texts=own, num_text_tokens=num_tokens))
    return mixed
