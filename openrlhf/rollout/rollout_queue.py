"""The bounded queue between generation and training: one thread drives the stream of samples, the
caller trains; what may start and what is trained next, `AsyncController` decides.

An error on either side ends the run with that error. Every wait has a deadline, and a line says
what is waited for when nothing comes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from openrlhf.engines.base import SamplingSettings
from openrlhf.errors import EngineError
from openrlhf.rollout.async_controller import AsyncController, AsyncLimits, Key
from openrlhf.rollout.kept_groups import (
    KeptGroup,
    KeptGroups,
    SampleOrigin,
    read_groups,
)
from openrlhf.rollout.rollout import FinishedGroup, GroupStream
from openrlhf.rollout.scoring import check_scores
from openrlhf.rollout.step_sampler import NO_SIGNAL, StepSampler
from openrlhf.utils.metrics import Metrics, timed
from openrlhf.utils.rollout import Rollout

POLL_S = 0.02  # of one look at the stream; a place that became free is filled after it
STALL_S = 20.0  # without a finished group until somebody who waits says so; then twice as long, ...
CLOSE_S = 40.0  # until the producer must have ended; its threads have 10 s each


class RolloutQueue:
    """Samples generated ahead, bounded by `limits`; a context in which they are generated.

    Prompts, filter and ledger are those of `sampler`, whose state is that of the queue too.
    Finished samples are kept beside it (`finished_groups`); what else was pending is generated
    again.
    """

    def __init__(
        self,
        sampler: StepSampler,
        open_stream: Callable[[SamplingSettings], GroupStream],
        origin: SampleOrigin,
        limits: AsyncLimits,
        *,
        wait_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`origin`: how samples are made now. `wait_s`: the longest that samples, or the end of
        running ones, are waited for; `say` is given a line when that takes long.
        """
        self.sampler = sampler
        self.origin = origin
        self.limits = limits
        self.wait_s = wait_s
        self._say = say
        self._open_stream = open_stream
        self._changed = threading.Condition()  # held for everything below
        self._core = AsyncController(limits, sampler.ledger)
        self._groups: dict[Key, list[Rollout]] = {}  # finished, not yet taken
        self._kept: Sequence[KeptGroup] = ()  # finished ones of a checkpoint
        self._stream: GroupStream | None = None
        self._num_finished = 0  # groups of any outcome
        self._failed: dict[int, str] = {}  # row -> why, since the last step
        self._metrics = Metrics()
        # Why the last groups failed, None for kept ones; as many as a step has.
        self._recent: deque[str | None] = deque(maxlen=limits.batch_size)
        self._num_rejected = 0  # groups without a signal in a row
        self._has_weights = False  # whether the engines hold the policy
        self._is_closed = False

    def __enter__(self) -> RolloutQueue:
        """Get ready; generation begins with the first weights."""
        # The ledger may have come from a checkpoint since this was made.
        self._core = AsyncController(self.limits, self.sampler.ledger)
        self._core.is_exhausted = self.sampler.cursor.is_exhausted
        self._take_up_kept()
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
        """Return True once every prompt has its outcome."""
        with self._changed:
            return self._core.is_over

    def next_step(self) -> list[Rollout]:
        """Return the samples of the next step, with group ids from 0; none when no prompt is left.

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
        """Return how far the prompts are drawn and what became of them, as JSON; what
        `finished_groups` gave before is pending in it.
        """
        with self._changed:
            return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken; before generation begins."""
        self.sampler.load_state_dict(state)

    def finished_groups(self) -> KeptGroups:
        """Return the samples that wait for their step; between two steps."""
        with self._changed:
            groups = [
                KeptGroup(key, self._core.age(key), self._groups[key]) for key in self._core.ready
            ]
        return KeptGroups(self.origin, groups)

    def load_groups(self, folder: Path) -> None:
        """Take up what `finished_groups` gave and a folder keeps, after `load_state_dict`."""
        self._kept = read_groups(folder, self.sampler.prompts, self.origin).groups

    def take_metrics(self) -> Metrics:
        """Return the metrics of generation, rewards and waiting since the last call."""
        with self._changed:
            metrics, self._metrics = self._metrics, Metrics()
            return metrics

    def take_failed(self) -> dict[int, str]:
        """Return why prompts failed since the last call, by row."""
        with self._changed:
            failed, self._failed = self._failed, {}
            return failed

    def _has_step(self) -> bool:
        return self._core.is_ready or self._core.is_over

    def _take_up_kept(self) -> None:
        ages = {group.key: group.age for group in self._kept}
        taken = set(self._core.restore(ages))
        self._groups = {group.key: group.rollouts for group in self._kept if group.key in taken}
        if self._kept:
            num_left = len(self._core.again)
            self._say(
                f"{len(taken)} finished prompts of the checkpoint wait for their step, {num_left} "
                "that were on their way are generated again"
            )
        self._kept = ()

    def _wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something that the producer brings about; the lock is held."""
        start = quiet_since = time.monotonic()
        quiet_s = STALL_S
        while not self._unless_ended(is_so):
            has_news = partial(self._has_news, is_so, self._num_finished)
            patience_s = min(quiet_since + quiet_s, start + self.wait_s) - time.monotonic()
            if self._changed.wait_for(has_news, max(patience_s, 0.0)):
                quiet_since, quiet_s = time.monotonic(), STALL_S
                continue
            waited_s = time.monotonic() - start
            line = f"waited {waited_s:.0f} s for {what}: {self._progress()}"
            if waited_s >= self.wait_s:
                raise EngineError(line)
            self._say(line)
            quiet_s *= 2

    def _has_news(self, is_so: Callable[[], bool], num_finished: int) -> bool:
        return self._unless_ended(is_so) or self._num_finished > num_finished

    def _unless_ended(self, is_so: Callable[[], bool]) -> bool:
        """Return True if something is so; raises what ended the producer."""
        if self._producer.done():
            self._producer.result()
            raise EngineError("generation ended before the run")
        return is_so()

    def _progress(self) -> str:
        """Return where the samples are that somebody waits for."""
        core = self._core
        line = (
            f"{len(core.ready)} of the {self.limits.batch_size} prompts of a step are finished, "
            f"{len(core.running)} are running"
        )
        return f"{line}. {self._stream.describe()}".rstrip(". ") if self._stream else line

    def _wake(self, producer: Future[None]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _produce(self) -> None:
        """Start groups and take in what is finished, in the producer's thread."""
        stream = self._stream = self._open_stream(self.origin.sampling)
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
            stream.submit([(key, self.sampler.prompts[row])], tag=f"episode{episode}")

    def _next_key(self) -> Key | None:
        """Return the next prompt, those of before a restart first; None when there is none."""
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
            self._num_finished += 1
            outcome = self._outcome(group)
            self._core.finish(group.key, outcome)
            if outcome is None:
                self._groups[group.key] = group.rollouts
            self._changed.notify_all()

    def _outcome(self, group: FinishedGroup) -> str | None:
        if group.failure is not None:
            self._failed[self.sampler.prompts[group.key[1]].row_id] = group.failure
            self._recent.append(group.failure)
            self.sampler.policy.check_dropped([why for why in self._recent if why is not None])
            return "failed:reward"
        outcome = None if self._keeps(group) else NO_SIGNAL
        if outcome is None:  # a step has none of those without a signal
            self._recent.append(None)
        return outcome

    def _keeps(self, group: FinishedGroup) -> bool:
        group_filter = self.sampler.group_filter
        if group_filter is None:
            return True
        is_kept = group_filter.keeps(group.rollouts)
        self._metrics.add("dynamic_filtering_pass_rate", float(is_kept))
        self._num_rejected = 0 if is_kept else self._num_rejected + 1
        self.sampler.check_not_hopeless(self._num_rejected // self.sampler.batch_size)
        return is_kept

    def _rest(self) -> None:
        """Wait while there is nothing to generate; the lock is held."""
        start = time.monotonic()
        self._changed.wait(POLL_S)
        if self._has_weights and not self._core.is_exhausted:
            seconds = time.monotonic() - start
            self._metrics.add("timing/generation_blocked", seconds, reduction="sum")
