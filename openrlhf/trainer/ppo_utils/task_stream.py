"""A stream of groups as tasks on one event loop: a coroutine for each prompt.

Groups are made in the loop's thread and fetched by the thread that drives the stream.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.errors import RewardError
from openrlhf.trainer.ppo_utils.group_stream import FinishedGroup, GroupKey
from openrlhf.trainer.ppo_utils.scoring import FailurePolicy, check_scores
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.threads import LoopThread


class TaskStream(ABC):
    """A GroupStream; a subclass says how a prompt becomes a group."""

    def __init__(self, policy: FailurePolicy, loop: LoopThread) -> None:
        self.policy = policy
        self.num_running = 0  # submitted and not yet fetched
        self.in_rounds = False  # prompts submitted together end together, others wait for them
        self.acted_at: float | None = None  # when the last samples came, where rewards come after
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._group_ids = itertools.count()
        self._last: list[Rollout] = []  # one of the group before, to compare with
        self._out: queue.SimpleQueue[FinishedGroup | BaseException] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._metrics = Metrics()
        self._lock = threading.Lock()  # of the metrics

    @abstractmethod
    async def make_group(self, prompt: PromptRecord, tag: str, group_id: int) -> list[Rollout]:
        """Return the scored rollouts of a prompt; raises RewardError where the group failed."""

    @abstractmethod
    def describe(self) -> str:
        """Return who works on what, in words, for whoever waits."""

    def submit(self, key: GroupKey, prompt: PromptRecord, *, tag: str) -> None:
        self.submit_all([(key, prompt)], tag=tag)

    def submit_all(self, prompts: Sequence[tuple[GroupKey, PromptRecord]], *, tag: str) -> None:
        """Start the samples of prompts, in order; of those that are sampled in rounds, in one."""
        self._check()
        self.num_running += len(prompts)
        self._loop.run(self._begin(prompts, tag))

    def finished(self, wait_s: float) -> list[FinishedGroup]:
        self._check()
        groups: list[FinishedGroup] = []
        if not self.num_running:
            return groups
        with suppress(queue.Empty):
            item = self._out.get(timeout=wait_s)
            while True:
                if isinstance(item, BaseException):
                    self._error = item
                    raise item
                groups.append(item)
                self.num_running -= 1
                item = self._out.get_nowait()
        return groups

    def take_metrics(self) -> Metrics:
        with self._lock:
            metrics, self._metrics = self._metrics, Metrics()
            return metrics

    def close(self) -> None:
        self._loop.run(self._end())

    def note(self, metrics: Metrics) -> None:
        """Add metrics."""
        with self._lock:
            self._metrics.merge(metrics)

    async def _begin(self, prompts: Sequence[tuple[GroupKey, PromptRecord]], tag: str) -> None:
        for key, prompt in prompts:
            task = asyncio.ensure_future(self._roll_out(key, prompt, tag))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        await asyncio.sleep(0)  # prompts reach the engines in the order in which they come

    async def _roll_out(self, key: GroupKey, prompt: PromptRecord, tag: str) -> None:
        try:
            rollouts, failure = await self.make_group(prompt, tag, next(self._group_ids)), None
        except RewardError as error:
            if not self.policy.drops:
                raise
            # How many may fail is up to whoever fetches them, and knows what a step is.
            rollouts, failure = [], str(error)
        check_scores([*self._last, *rollouts])
        self._last = rollouts[-1:] or self._last
        if self.policy.drops:
            metrics = Metrics()
            metrics.add("num_dropped_groups", int(failure is not None), reduction="sum")
            self.note(metrics)
        self._out.put(FinishedGroup(key, rollouts, failure))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._out.put(error)

    async def _end(self) -> None:
        tasks = self._tasks.copy()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
