"""The bounded queue between generation and training: one thread drives the stream of samples, the
caller trains; what may start and what is trained next, `AsyncController` decides.

An error on either side ends the run with that error. Every wait has a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from openrlhf.errors import EngineError
from openrlhf.trainer.ppo_utils.async_controller import AsyncController, AsyncLimits, Key
from openrlhf.trainer.ppo_utils.group_filter import NO_SIGNAL
from openrlhf.trainer.ppo_utils.group_stream import FinishedGroup, GroupStream
from openrlhf.trainer.ppo_utils.scoring import check_scores
from openrlhf.trainer.ppo_utils.step_sampler import StepSampler
from openrlhf.utils.metrics import Metrics, timed
from openrlhf.utils.rollout import Rollout

POLL_S = 0.02  # of one look at the stream; a place that became free is filled after it
CLOSE_S = 40.0  # until the producer must have ended; its threads have 10 s each


class RolloutQueue:
    """Samples generated ahead, bounded by `limits`; a context in which they are generated.

    Prompts, filter and ledger are those of `sampler`, whose state is that of the queue too: prompts
    pending when it was taken are generated again.
    """

    def __init__(
        self,
        sampler: StepSampler,
        open_stream: Callable[[], GroupStream],
        limits: AsyncLimits,
        *,
        wait_s: float,
    ) -> None:
        """`wait_s`: the longest that samples, or the end of running ones, are waited for."""
        self.sampler = sampler
        self.limits = limits
        self.wait_s = wait_s
        self._open_stream = open_stream
        self._changed = threading.Condition()  # held for everything below
        self._core = AsyncController(limits, sampler.ledger)
        self._groups: dict[Key, list[Rollout]] = {}  # finished, not yet taken
        self._failed: dict[int, str] = {}  # row -> why, since the last step
        self._metrics = Metrics()
        self._num_rejected = 0  # groups without a signal in a row
        self._has_weights = False  # whether the engines hold the policy
        self._is_closed = False

    def __enter__(self) -> RolloutQueue:
        """Get ready; generation begins with the first weights."""
        # The ledger may have come from a checkpoint since this was made.
        self._core = AsyncController(self.limits, self.sampler.ledger)
        self._core.is_exhausted = self.sampler.cursor.is_exhausted
        pool = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._producer = pool.submit(self._produce)
        self._producer.add_done_callback(self._wake)
        pool.shutdown(wait=False)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Abandon what runs. The producer's own error is raised when there is no other."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        wait([self._producer], CLOSE_S)
        if error is None and self._producer.done():
            self._producer.result()

    @property
    def is_over(self) -> bool:
        """Whether every prompt has its outcome."""
        with self._changed:
            return self._core.is_over

    def next_step(self) -> list[Rollout]:
        """Samples of the next step, with group ids from 0; none when no prompt is left.

        Raises what ended the producer, EngineError when nothing comes in time, RewardError.
        """
        with self._changed:
            with timed("wait", self._metrics):
                self._wait_until(self._has_step, "samples")
            if self._core.is_over:
                return []
            groups = [self._groups.pop(key) for key in self._core.take()]
            self._metrics.add("queue/num_ready", len(self._core.ready))
            self._metrics.add("queue/num_running", len(self._core.running))
        rollouts = [replace(r, group_id=k) for k, group in enumerate(groups) for r in group]
        check_scores(rollouts)
        return rollouts

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Weights may be sent inside: running samples are finished, or go on (partial rollout).

        While a step is under way nothing else starts before it is settled.
        """
        with self._changed, timed("drain", self._metrics):
            self._core.begin_sync()
            self._wait_until(lambda: self._core.may_sync, "running samples to finish")
        yield
        with self._changed:
            self._has_weights = True
            if not self._core.taken:
                self._core.end_sync()
            self._changed.notify_all()

    def settle(self, trained_groups: set[int]) -> None:
        """Note that the step is done; raises AssertionError when a group did not reach it."""
        with self._changed:
            assert trained_groups == set(range(len(self._core.taken))), "groups were not trained on"
            self._core.update()
            self._core.check()
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """How far the prompts are drawn and what became of them, as JSON."""
        with self._changed:
            return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken; before generation begins."""
        self.sampler.load_state_dict(state)

    def take_metrics(self) -> Metrics:
        """Metrics of generation, rewards and waiting since the last call."""
        with self._changed:
            metrics, self._metrics = self._metrics, Metrics()
            return metrics

    def take_failed(self) -> dict[int, str]:
        """Row of every prompt that failed since the last call, and why."""
        with self._changed:
            failed, self._failed = self._failed, {}
            return failed

    def _has_step(self) -> bool:
        return self._core.is_ready or self._core.is_over

    def _wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something that the producer brings about; the lock is held."""
        self._changed.wait_for(lambda: is_so() or self._producer.done(), self.wait_s)
        if self._producer.done():
            self._producer.result()
            raise EngineError("generation ended before the run")
        if not is_so():
            raise EngineError(f"waited {self.wait_s:.0f} s for {what}")

    def _wake(self, producer: Future[None]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _produce(self) -> None:
        """The producer's thread."""
        stream = self._open_stream()
        try:
            while not self._is_closed:
                self._start_groups(stream)
                for group in stream.finished(POLL_S):
                    self._receive(group)
                metrics = stream.take_metrics()
                with self._changed:
                    self._metrics.merge(metrics)
                    if not self._core.running:
                        self._rest()
        finally:
            stream.close()

    def _start_groups(self, stream: GroupStream) -> None:
        with self._changed:
            keys = []
            while self._has_weights and self._core.may_admit():
                key = self._next_key()
                if key is None:
                    break
                self._core.admit(key)
                keys.append(key)
        for key in keys:
            episode, row = key
            stream.submit(key, self.sampler.prompts[row], tag=f"episode{episode}")

    def _next_key(self) -> Key | None:
        """The next prompt, those of before a restart first; None when there is none."""
        if self._core.again:
            return next(iter(self._core.again))
        cursor = self.sampler.cursor
        episode = cursor.episode
        rows = cursor.draw(1)
        self._core.is_exhausted = cursor.is_exhausted
        return (episode, rows[0]) if rows else None

    def _receive(self, group: FinishedGroup) -> None:
        """Note what became of a group."""
        with self._changed:
            outcome = self._outcome(group)
            self._core.finish(group.key, outcome)
            if outcome is None:
                self._groups[group.key] = group.rollouts
            self._changed.notify_all()

    def _outcome(self, group: FinishedGroup) -> str | None:
        if group.failure is not None:
            self._failed[group.key[1]] = group.failure
            return "failed:reward"
        group_filter = self.sampler.group_filter
        if group_filter is None:
            return None
        is_kept = group_filter.keeps(group.rollouts)
        self._metrics.add("dynamic_filtering_pass_rate", float(is_kept))
        self._num_rejected = 0 if is_kept else self._num_rejected + 1
        self.sampler.check_not_hopeless(self._num_rejected // self.sampler.batch_size)
        return None if is_kept else NO_SIGNAL

    def _rest(self) -> None:
        """Wait while there is nothing to generate; the lock is held."""
        start = time.monotonic()
        self._changed.wait(POLL_S)
        if self._has_weights and not self._core.is_exhausted:
            seconds = time.monotonic() - start
            self._metrics.add("timing/generation_blocked", seconds, reduction="sum")
