"""Rewards for groups that come one by one, for as long as a stream lives.

All calls come from the stream's event thread, which never waits for a reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from openrlhf.errors import RewardError
from openrlhf.trainer.ppo_utils.scoring import MAX_RETRY_WAIT_S, Group, GroupScorer, Outcome
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.threads import EventThread

OnOutcome = Callable[[Group, Outcome], None]


class StreamScoring:
    """Sends groups off in batches, and tells what became of each after its retries."""

    def __init__(
        self,
        scorer: GroupScorer,
        events: EventThread,
        on_outcome: OnOutcome,
        may_get_more: Callable[[], bool],
    ) -> None:
        """`may_get_more`: whether groups are still generated that could fill up a batch."""
        self.scorer = scorer.scorer
        self.policy = scorer.policy
        self.metrics = Metrics()
        self._events = events
        self._on_outcome = on_outcome
        self._may_get_more = may_get_more
        self._waiting: list[Group] = []
        self._num_sent = 0  # batches that have no answer yet
        self._num_tries: Counter[int] = Counter()  # by group id

    def add(self, group: Group) -> None:
        """Take a group; `send` follows when there is no other at hand."""
        self._waiting.append(group)

    def send(self) -> None:
        """Start what can be started.

        A batch that is not full waits only while others are scored, nobody there is idle, and more
        may come, so that a busy scorer gets full batches and an idle one no pauses. Models, which
        take any number, score all that has come since their last forward.
        """
        batch = self._next_batch()
        while batch:
            self._waiting = self._waiting[len(batch) :]
            self._start(batch)
            batch = self._next_batch()

    def _next_batch(self) -> list[Group]:
        size = self.scorer.batch_size
        if size is None:
            return [] if self._num_sent else list(self._waiting)
        batch: list[Group] = []
        num_samples = 0
        for group in self._waiting:
            if batch and num_samples + len(group) > size:
                return batch
            batch.append(group)
            num_samples += len(group)
        is_busy = self._num_sent > 0 and not self.scorer.has_room
        may_wait = is_busy and self._may_get_more()
        return [] if may_wait and num_samples < size else batch

    def _start(self, batch: list[Group]) -> None:
        self._num_sent += 1
        answer = self.scorer.start(batch)
        answer.add_done_callback(
            lambda done: self._events.soon(partial(self._receive, batch, done))
        )

    def _receive(self, batch: list[Group], answer: Future[list[Outcome]]) -> None:
        self._num_sent -= 1
        for group, outcome in zip(batch, answer.result(), strict=True):
            if isinstance(outcome, RewardError):
                self._failed(group, outcome, shares_a_batch=len(batch) > 1)
            else:
                asked = [rollout.sample_id for rollout in group]
                assert [rollout.sample_id for rollout in outcome] == asked, "samples were lost"
                self._end(group, outcome)
        self.send()

    def _failed(self, group: Group, error: RewardError, *, shares_a_batch: bool) -> None:
        """Score a group once more, alone, or give it up."""
        num_tries = self._num_tries[group[0].group_id]
        self._num_tries[group[0].group_id] += 1
        if num_tries < self.policy.num_retries:
            self.metrics.add("num_reward_retries", 1, reduction="sum")
            wait_s = min(self.policy.retry_wait_s * 2**num_tries, MAX_RETRY_WAIT_S)
            self._events.later(wait_s, partial(self._start, [group]))
        elif self.policy.drops and shares_a_batch and self.scorer.batch_size is not None:
            self._start([group])  # it may be another one that failed them all
        else:
            self._end(group, error)

    def _end(self, group: Group, outcome: Outcome) -> None:
        self._num_tries.pop(group[0].group_id, None)
        self._on_outcome(group, outcome)
