"""Rewards from a user's Python function, called in this process: it must return by itself.

Training calls it through process_pool.py, where it can be killed; this is the same function for
scripts and tests.
"""

from __future__ import annotations

from pathlib import Path

from openrlhf.rewards.base import RewardBatch, RewardResult, concat_results, result_from_answer
from openrlhf.rewards.user_function import UserFunction


class FunctionReward:
    """Scores batches with the function in a file."""

    def __init__(self, path: str | Path, *, batch_size: int | None = None) -> None:
        """`batch_size`: most samples handed to one call; None hands over all at once."""
        self.path = str(path)
        self.batch_size = batch_size
        self.user_function = UserFunction(path)

    def score(self, batch: RewardBatch) -> RewardResult:
        """Score every sample; raises RewardError naming the file and the sample."""
        parts = batch.parts(self.batch_size or max(len(batch), 1))
        return concat_results([self._score_part(part) for part in parts], source=self.path)

    def _score_part(self, batch: RewardBatch) -> RewardResult:
        answer = self.user_function.answer(batch)
        return result_from_answer(answer.as_dict(), batch=batch, source=self.path)
