"""The end of a stream where finished groups are fetched, and where failed ones end it or are
counted.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress

from openrlhf.errors import OpenRLHFError
from openrlhf.trainer.ppo_utils.group_stream import FinishedGroup, GroupKey
from openrlhf.trainer.ppo_utils.scoring import FailurePolicy
from openrlhf.utils.metrics import Metrics


class GroupOutlet:
    """Groups go in from a thread of the stream and are fetched by the thread that drives it."""

    def __init__(self, policy: FailurePolicy) -> None:
        self.policy = policy
        self.num_running = 0  # begun and not yet fetched
        self._out: queue.SimpleQueue[FinishedGroup | BaseException] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._metrics = Metrics()
        self._lock = threading.Lock()  # of the metrics

    def begin(self) -> None:
        """Count a group in; raises what ended the stream."""
        self._check()
        self.num_running += 1

    def fetch(self, wait_s: float) -> list[FinishedGroup]:
        """See GroupStream.finished."""
        self._check()
        groups: list[FinishedGroup] = []
        if not self.num_running:
            return groups
        with suppress(queue.Empty):
            item = self._out.get(timeout=wait_s)
            while True:
                if isinstance(item, BaseException):
                    self._error = item
                    self._check()
                else:
                    groups.append(item)
                    self.num_running -= 1
                item = self._out.get_nowait()
        return groups

    def put(self, group: FinishedGroup) -> None:
        """Hand out a group that has its rewards."""
        self._note(is_failed=False)
        self._out.put(group)

    def drop(self, key: GroupKey, error: OpenRLHFError) -> None:
        """Hand out a group that failed; raises its error where groups may not be dropped. How many
        may be is up to whoever fetches them, and knows what a step is.
        """
        if not self.policy.drops:
            raise error
        self._note(is_failed=True)
        self._out.put(FinishedGroup(key, failure=str(error)))

    def fail(self, error: BaseException) -> None:
        """End the stream with an error."""
        self._out.put(error)

    def note(self, metrics: Metrics) -> None:
        """Add metrics."""
        with self._lock:
            self._metrics.merge(metrics)

    def take_metrics(self) -> Metrics:
        """Metrics since the last call."""
        with self._lock:
            metrics, self._metrics = self._metrics, Metrics()
            return metrics

    def _note(self, *, is_failed: bool) -> None:
        if self.policy.drops:
            metrics = Metrics()
            metrics.add("num_dropped_groups", int(is_failed), reduction="sum")
            self.note(metrics)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
