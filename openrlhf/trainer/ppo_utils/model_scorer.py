"""Rewards from local reward models, as a Scorer."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import PurePosixPath

from openrlhf.errors import RewardError
from openrlhf.rollout.scoring import Group, Outcome
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.worker_group import ForwardPass
from openrlhf.utils.threads import start_thread

LONG_TEXT = ", as it does for a text of more tokens than it reads"


class ModelScorer:
    """Rewards from local reward models: the weighted sum of what each answers.

    One forward at a time: ranks meet in it, and must come to the same one.
    """

    batch_size: int | None = None

    def __init__(
        self,
        models: Mapping[str, ForwardPass],
        weights: Sequence[float] | None = None,
        *,
        is_sequential: bool = False,
        is_streaming: bool = False,
        turn: AbstractContextManager[object] | None = None,
    ) -> None:
        """`is_sequential`: models that share devices take turns. `is_streaming`: they may score
        beside generation. `turn` is held while they score, where others compute on their devices
        too.
        """
        self.models = dict(models)
        self.weights = list(weights or [1.0] * len(models))
        self.is_sequential = is_sequential
        self.is_streaming = is_streaming
        self.turn = nullcontext() if turn is None else turn
        self._one_at_a_time = threading.Lock()
        self._latest: Future[list[Outcome]] | None = None
        assert len(self.weights) == len(self.models), "one weight for each model"

    @property
    def has_room(self) -> bool:
        """Return True while no forward is under way."""
        return self._latest is None or self._latest.done()

    def start(self, groups: Sequence[Group]) -> Future[list[Outcome]]:
        """Start the forwards, in a thread."""
        outcomes = self._latest = Future()
        start_thread(
            "reward-models",
            lambda: outcomes.set_result(self._score(groups)),
            outcomes.set_exception,
        )
        return outcomes

    def _score(self, groups: Sequence[Group]) -> list[Outcome]:
        unscored = [replace(rollout, reward=0.0) for group in groups for rollout in group]
        experience = Experience.from_rollouts(unscored)
        with self._one_at_a_time, self.turn:
            if self.is_sequential:
                columns = {name: forward(experience) for name, forward in self.models.items()}
            else:
                pending = {name: forward.start(experience) for name, forward in self.models.items()}
                columns = {name: wait() for name, wait in pending.items()}
        numbers = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [self._outcome(group, [next(numbers) for _ in group]) for group in groups]

    def _outcome(self, group: Group, numbers: Sequence[Sequence[float]]) -> Outcome:
        scored = []
        for rollout, values in zip(group, numbers, strict=True):
            parts = dict(zip(self.models, values, strict=True))
            for name, value in parts.items():
                if not math.isfinite(value):
                    return RewardError(
                        f"sample {rollout.sample_id}: the reward model {name} answered {value}"
                        f"{LONG_TEXT if math.isnan(value) else ''}"
                    )
            reward = sum(w * v for w, v in zip(self.weights, values, strict=True))
            logged = parts if len(parts) > 1 else {}
            scored.append(replace(rollout, reward=reward, reward_parts=logged))
        return scored


def model_names(paths: Sequence[str]) -> list[str]:
    """Return the names of the parts of several reward models: the last word of each path, with a
    number where two have the same.
    """
    words = [PurePosixPath(path).name for path in paths]
    return [
        word if words.count(word) == 1 else f"{word}_{words[: k + 1].count(word)}"
        for k, word in enumerate(words)
    ]
