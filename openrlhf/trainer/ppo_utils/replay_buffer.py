"""From one step's experience to optimizer steps: which samples, in which order, on which rank.

The plan is made once by the controller and knows the global denominators, so that the gradient does
not depend on the number of ranks, on the micro-batches or on samples left out because they cannot
contribute.

Pre-training text may stand beside the samples, so that the policy does not forget how to write it:
PPO-ptx of InstructGPT (arXiv 2203.02155, section 3.5).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openrlhf.algorithms.balancing import balanced_partitions, fixed_batches
from openrlhf.datasets.sampler import epoch_order
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.metrics import Metrics

if TYPE_CHECKING:  # it imports datasets and pandas, which workers do not need
    from openrlhf.datasets.sft_dataset import SFTDataset


@dataclass(frozen=True)
class UpdateStep:
    """One optimizer step as one rank sees it: its samples and the denominators of all ranks."""

    experience: Experience
    num_tokens: int  # sampled tokens of the whole optimizer step, all ranks
    num_samples: int  # samples of the whole optimizer step, all ranks
    num_steps: int = 1  # optimizer steps of this rollout batch
    kl_coef: float = 0.0  # of the KL in the policy's loss
    texts: tuple[Tensor, ...] = ()  # (T_i,) int64 each: pre-training text beside the samples
    num_text_tokens: int = 0  # targets of the text of the whole optimizer step, all ranks


@dataclass(frozen=True)
class UpdateResult:
    """The metrics and columns that one rank returns for its optimizer steps."""

    metrics: Metrics
    places: Sequence[int] = ()  # samples of the rollout batch, in the order of the columns
    # By name: numbers (N,) of their sampled tokens, when the loss first saw them.
    columns: Mapping[str, Tensor] = field(default_factory=dict)


def seen_column(results: Sequence[UpdateResult], name: str, num_actions: Tensor) -> Tensor:
    """Return a column of all ranks in sample order, (N,); NaN for samples that no loss saw."""
    sizes, parts = num_actions.tolist(), {}
    for result in results:
        if result.places:
            own = result.columns[name].split([sizes[place] for place in result.places])
            parts |= zip(result.places, own, strict=True)
    return torch.cat([parts.get(k, torch.full((n,), math.nan)) for k, n in enumerate(sizes)])


def plan_updates(
    experience: Experience,
    num_ranks: int,
    *,
    train_batch_size: int,
    max_epochs: int,
    seed: int,
    kl_coef: float = 0.0,
) -> list[list[UpdateStep]]:
    """Return the optimizer steps of every rank: [rank][step].

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
                steps[rank].append(UpdateStep(own, num_tokens, len(members), num_steps, kl_coef))
    return steps


def num_updates_per_rollout(num_samples: int, train_batch_size: int, max_epochs: int) -> int:
    """Return the number of optimizer steps that `plan_updates` makes of `num_samples` samples."""
    return -(-num_samples // train_batch_size) * max_epochs


def without_zero_advantages(step: UpdateStep) -> UpdateStep:
    """Leave out samples that cannot move the policy: every advantage exactly zero."""
    experience = step.experience
    assert experience.advantages is not None, "advantages are not known yet"
    parts = experience.advantages.split(experience.num_actions.tolist())
    busy = [index for index, part in enumerate(parts) if bool((part != 0).any())]
    return replace(step, experience=experience.select(busy))


def mix_texts(
    shares: Sequence[Sequence[UpdateStep]], texts: "SFTDataset", *, num_seen: int, seed: int
) -> list[list[UpdateStep]]:
    """Return the same optimizer steps, [rank][step], each with text beside its samples: as many
    rows as the step has samples, divided among the ranks. Passes over the text go on behind the
    `num_seen` rows of earlier calls, each in an order of its own.
    """
    end = num_seen + sum(step.num_samples for step in shares[0])
    size, first = len(texts), num_seen // len(texts)
    passes = range(first, end // size + 1)
    orders = torch.cat([epoch_order(size, seed, epoch) for epoch in passes])
    rows = iter(orders[num_seen - first * size :].tolist())
    mixed: list[list[UpdateStep]] = [[] for _ in shares]
    for steps in zip(*shares, strict=True):
        drawn = [texts[next(rows)].token_ids for _ in range(steps[0].num_samples)]
        num_tokens = sum(len(text) - 1 for text in drawn)
        parts = balanced_partitions([len(text) for text in drawn], len(steps))
        for rank, (step, part) in enumerate(zip(steps, parts, strict=True)):
            own = tuple(drawn[index] for index in part)
            mixed[rank].append(replace(step, texts=own, num_text_tokens=num_tokens))
    return mixed
