"""Scorers: the ways a rollout gets its reward during RL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from openrlhf.errors import RewardError
from openrlhf.rewards.base import RewardBatch, RewardSource
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.worker_group import ForwardPass
from openrlhf.utils.rollout import Rollout


class FunctionScorer:
    """Rewards from user code on texts."""

    def __init__(self, source: RewardSource) -> None:
        self.source = source

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Set reward, score and extra logs of every rollout."""
        result = self.source.score(_texts(rollouts))
        rewards = result.rewards.tolist()
        scores = [None] * len(rewards) if result.scores is None else result.scores.tolist()
        logs = {name: column.tolist() for name, column in result.extra_logs.items()}
        return [
            replace(
                rollout,
                reward=rewards[i],
                score=scores[i],
                extra_logs={name: column[i] for name, column in logs.items()},
            )
            for i, rollout in enumerate(rollouts)
        ]


class ModelScorer:
    """Rewards from a local reward model's group."""

    def __init__(self, rewards: ForwardPass) -> None:
        self.rewards = rewards

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Set the reward of every rollout; raises RewardError for a non-finite one."""
        unscored = [replace(rollout, reward=0.0) for rollout in rollouts]
        values = self.rewards(Experience.from_rollouts(unscored)).tolist()
        for rollout, value in zip(rollouts, values, strict=True):
            if not math.isfinite(value):
                raise RewardError(f"sample {rollout.sample_id}: the reward model answered {value}")
        return [
            replace(rollout, reward=value) for rollout, value in zip(rollouts, values, strict=True)
        ]


def _texts(rollouts: Sequence[Rollout]) -> RewardBatch:
    return RewardBatch(
        queries=[r.prompt_text + r.response_text for r in rollouts],
        prompts=[r.prompt_text for r in rollouts],
        responses=[r.response_text for r in rollouts],
        labels=[r.label for r in rollouts],
        columns={name: [r.columns.get(name) for r in rollouts] for name in rollouts[0].columns}
        if rollouts
        else {},
        sample_ids=[r.sample_id for r in rollouts],
    )
