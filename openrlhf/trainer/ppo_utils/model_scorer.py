"""Rewards from local reward models, as a Scorer."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from openrlhf.errors import RewardError
from openrlhf.rollout.scoring import Group, Outcome, Scorer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.worker_group import Forward, run_forwards
from openrlhf.utils.threads import LoopThread


class ModelScorer(Scorer):
    """Rewards from local reward models: the weighted sum of what each returns.

    One forward at a time: ranks meet in it, and must come to the same one.
    """

    def __init__(
        self,
        models: Mapping[str, Forward],
        weights: Sequence[float] | None = None,
        *,
        in_turn: bool = False,
        is_streaming: bool = False,
        device_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """`in_turn`: the models share devices. `is_streaming`: they may score during generation.
        `device_lock` is held while they score, where others compute on their devices too.
        """
        self.models = models
        self.weights = list(weights or [1.0] * len(models))
        self.in_turn = in_turn
        self.is_streaming = is_streaming
        self.device_lock = device_lock or nullcontext()
        self._thread = LoopThread("reward-models")

    async def score(self, groups: Sequence[Group]) -> list[Outcome]:
        """Return one outcome a group, after a forward in a thread."""
        return await self._thread.call(self._score, groups)

    def _score(self, groups: Sequence[Group]) -> list[Outcome]:
        unscored = [replace(rollout, reward=0.0) for group in groups for rollout in group]
        experience = Experience.from_rollouts(unscored)
        with self.device_lock:
            columns = run_forwards(self.models, experience, in_turn=self.in_turn)
        numbers = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [self._outcome(group, [next(numbers) for _ in group]) for group in groups]

    def _outcome(self, group: Group, numbers: Sequence[Sequence[float]]) -> Outcome:
        scored = []
        for rollout, values in zip(group, numbers, strict=True):
            parts = dict(zip(self.models, values, strict=True))
            bad = [f"{name} answered {v}" for name, v in parts.items() if not math.isfinite(v)]
            if bad:
                return RewardError(f"sample {rollout.sample_id}: the reward model {bad[0]}")
            reward = sum(w * v for w, v in zip(self.weights, values, strict=True))
            logged = parts if len(parts) > 1 else {}
            scored.append(replace(rollout, reward=reward, reward_parts=logged))
        return scored
