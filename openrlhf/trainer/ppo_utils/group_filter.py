"""Which groups of samples can teach something (dynamic sampling, DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.utils.rollout import Rollout

NO_SIGNAL = "filtered:no signal"


@dataclass(frozen=True)
class GroupFilter:
    """Keeps a group whose mean task score lies strictly between `low` and `high` and whose scores
    are not all equal.
    """

    low: float = 0.0
    high: float = 1.0
    max_empty: int = 10  # batches in a row without a kept group before the run ends

    def keeps(self, group: Sequence[Rollout]) -> bool:
        """Whether the samples of one prompt are kept; the parts of an episode count once."""
        scores = list({r.episode_id or r.sample_id: r.task_score for r in group}.values())
        return len(set(scores)) > 1 and self.low < sum(scores) / len(scores) < self.high
