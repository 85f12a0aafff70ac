"""A stream of groups from engines and rewards: prompts go to the engine with the least to do, and
groups to the scorer as they are finished.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.engines.base import GenerationRequest, SamplingSettings
from openrlhf.errors import RewardError
from openrlhf.rollout.engine_pool import EnginePool
from openrlhf.trainer.ppo_utils.scoring import (
    MAX_RETRY_WAIT_S,
    Group,
    GroupScorer,
    Outcome,
    add_score_metrics,
)
from openrlhf.trainer.ppo_utils.task_stream import TaskStream
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.threads import LoopThread


class EngineStream(TaskStream):
    """A GroupStream over engines and rewards."""

    def __init__(
        self,
        pool: EnginePool,
        scorer: GroupScorer,
        make_group: Callable[..., list[Rollout]],
        sampling: SamplingSettings,
        loop: LoopThread,
    ) -> None:
        """`make_group` is SamplesGenerator's; it is called on the loop alone."""
        super().__init__(scorer.policy, loop)
        self.in_rounds = pool.in_rounds
        self._pool = pool
        self._make_group = make_group
        self._sampling = sampling
        self._num_sampled = 0  # groups that engines work on
        self._num_scored = 0  # groups that wait for their rewards
        self._scoring = StreamScoring(scorer, may_get_more=lambda: self._num_sampled > 0)

    async def make_group(self, prompt: PromptRecord, tag: str, group_id: int) -> list[Rollout]:
        """Sample a prompt, then score its samples."""
        metrics = Metrics()
        name = f"{tag}/{prompt.row_id}"
        request = GenerationRequest(name, prompt.prompt_token_ids, self._sampling)
        self._num_sampled += 1
        try:
            completions = await self._pool.generate(request)
        finally:
            self._num_sampled -= 1
            self.acted_at = time.monotonic()
        group = self._make_group(prompt, request, completions, group_id=group_id)
        num_tokens = sum(rollout.num_actions for rollout in group)
        metrics.add("num_generated_tokens", num_tokens, reduction="sum")
        self._num_scored += 1
        try:
            scored = await self._scoring.score(group, metrics)
            add_score_metrics(scored, metrics)
        finally:
            self._num_scored -= 1
            self.note(metrics)
        return scored

    def describe(self) -> str:
        """Return which engines work, the most silent first, and what waits for its rewards."""
        words = self._pool.describe()
        if self._num_scored:
            scoring = f"{self._num_scored} prompts wait for their rewards"
            words = f"{words}; {scoring}" if words else scoring
        return words


class StreamScoring:
    """Scores groups in batches, as long as a stream lives."""

    def __init__(self, scorer: GroupScorer, may_get_more: Callable[[], bool]) -> None:
        """`may_get_more` returns True while groups are generated that could fill up a batch."""
        self.scorer = scorer.scorer
        self.policy = scorer.policy
        self._may_get_more = may_get_more
        self._waiting: list[Asked] = []
        self._num_sent = 0  # batches that have no answer yet

    async def score(self, group: Group, metrics: Metrics) -> list[Rollout]:
        """Return the scored rollouts of a group; raises RewardError after its retries."""
        asked = Asked(group)
        self._waiting.append(asked)
        asyncio.get_running_loop().call_soon(self._send)  # when no other group is at hand
        outcome = await asked.outcome
        for attempt in range(self.policy.num_retries):
            if isinstance(outcome, RewardError):
                metrics.add("num_reward_retries", 1, reduction="sum")
                wait_s = self.policy.retry_wait_s * 2**attempt
                await asyncio.sleep(min(wait_s, MAX_RETRY_WAIT_S))
                outcome = await self._start([Asked(group)])
        if isinstance(outcome, RewardError):
            if not (self.policy.drops and asked.shares_batch):
                raise outcome
            outcome = await self._start([Asked(group)])  # another one may have failed them all
            if isinstance(outcome, RewardError):
                raise outcome
        wanted = [rollout.sample_id for rollout in group]
        assert [rollout.sample_id for rollout in outcome] == wanted, "samples were lost"
        return outcome

    def _send(self) -> None:
        """Start what can be started.

        A batch that is not full waits only while others are scored, nobody there is idle, and more
        may come, so that a busy scorer gets full batches and an idle one no pauses. Models, which
        take any number, score all that has come since their last forward; those that may not run
        beside generation wait for its end.
        """
        while batch := self._next_batch():
            self._waiting = self._waiting[len(batch) :]
            self._start(batch)

    def _next_batch(self) -> list[Asked]:
        size = self.scorer.batch_size
        if not self.scorer.is_streaming and self._may_get_more():
            return []
        if size is None:
            return [] if self._num_sent else list(self._waiting)
        batch: list[Asked] = []
        num_samples = 0
        for asked in self._waiting:
            if batch and num_samples + len(asked.group) > size:
                return batch
            batch.append(asked)
            num_samples += len(asked.group)
        is_busy = self._num_sent > 0 and not self.scorer.has_room
        may_wait = is_busy and self._may_get_more()
        return [] if may_wait and num_samples < size else batch

    def _start(self, batch: list[Asked]) -> asyncio.Future[Outcome]:
        """Score a batch; return the first outcome of it."""
        self._num_sent += 1
        answer = asyncio.wrap_future(self.scorer.start([asked.group for asked in batch]))
        answer.add_done_callback(partial(self._receive, batch))
        return batch[0].outcome

    def _receive(self, batch: list[Asked], answer: asyncio.Future[list[Outcome]]) -> None:
        self._num_sent -= 1
        error = answer.exception()
        for k, asked in enumerate(batch):
            asked.shares_batch = len(batch) > 1 and self.scorer.batch_size is not None
            if asked.outcome.done():  # nobody waits any more
                continue
            if error is None:
                asked.outcome.set_result(answer.result()[k])
            else:
                asked.outcome.set_exception(error)
        self._send()


class Asked:
    """A group that waits for its rewards."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.shares_batch = False
