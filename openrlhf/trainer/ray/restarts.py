"""How often lost processes are started again."""

import threading
import time
from collections import defaultdict

from openrlhf.errors import EngineError

HOUR_S = 3600.0
EVENT_S = 60.0  # in which the processes of a lost node are missed, one after the other
# What Ray says of a process that it started on a node before it knew that the node is gone.
NEVER_RAN = "The actor never ran"


class Restarts:
    """Counts the restarts of each role within the last hour. Processes that are lost together, as
    with their node, count once.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_losses = 0  # of the run
        # When each event began, and whom it took.
        self._events: defaultdict[str, list[tuple[float, set[str]]]] = defaultdict(list)
        self._lock = threading.Lock()

    def note(self, role: str, why: EngineError, *, who: str = "") -> str:
        """Note the restart of a process of a role; return its number as words. Raise EngineError if
        there were too many.
        """
        with self._lock:
            now = time.monotonic()
            events = [event for event in self._events[role] if now - event[0] < HOUR_S]
            self._events[role] = events
            is_new = who in events[-1][1] and NEVER_RAN not in str(why) if events else True
            is_same = not is_new and now - events[-1][0] < EVENT_S
            if not is_same and len(events) >= self.most:
                raise EngineError(
                    f"{why}. It is not started again: {self.most} restart(s) of {role} within an "
                    "hour are allowed (--max_restarts)."
                )
            if not is_same:
                self.num_losses += 1
                events.append((now, set()))
            events[-1][1].add(who)
            return f"restart {len(events)} of {self.most} within an hour (--max_restarts)"
