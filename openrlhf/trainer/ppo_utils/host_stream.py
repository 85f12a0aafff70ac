"""What streams of groups over hosts have in common: where finished groups are fetched, the thread
that makes them, and what they wait for.
"""

from __future__ import annotations

from typing import Any

from openrlhf.trainer.ppo_utils.group_outlet import GroupOutlet
from openrlhf.trainer.ppo_utils.group_stream import FinishedGroup
from openrlhf.trainer.ppo_utils.scoring import FailurePolicy
from openrlhf.trainer.ppo_utils.work_share import WorkShare
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.threads import EventThread


class HostStream:
    """The part of a GroupStream that does not depend on what hosts do; a subclass shares out the
    work.
    """

    _work: WorkShare[Any, Any]

    def __init__(self, policy: FailurePolicy) -> None:
        self._outlet = GroupOutlet(policy)
        self._events = EventThread("group-stream", self._outlet.fail)

    def finished(self, wait_s: float) -> list[FinishedGroup]:
        """See GroupStream."""
        return self._outlet.fetch(wait_s)

    @property
    def num_running(self) -> int:
        """See GroupStream."""
        return self._outlet.num_running

    def describe(self) -> str:
        """See GroupStream."""
        return self._work.describe()

    def take_metrics(self) -> Metrics:
        """See GroupStream."""
        return self._outlet.take_metrics()

    def close(self) -> None:
        """See GroupStream."""
        self._work.close()
        self._events.close()
