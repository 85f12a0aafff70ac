"""How often lost processes are started again."""

import threading
import time
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from openrlhf.errors import EngineError

HOUR_S = 3600.0
PAUSE_S = 5.0  # behind a start that failed: what stands in the way may pass
MAX_NAMED = 8  # rows
EVENT_S = 60.0  # in which the processes of a lost node are missed, one after the other
# What Ray says of a process that it started on a node before it knew that the node is gone.
NEVER_RAN = "The actor never ran"


@dataclass
class Loss:
    """The loss of processes of a role, at about the same time.

    Example: `Loss(at_s=812.5, who={"vllm-0"}, rows={"18", "25"})`
    """

    at_s: float
    who: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)  # of prompts that they were at work on


class Restarts:
    """Counts the restarts of each role within the last hour. Processes that are lost together, as
    with their node, count once.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_losses = 0  # of the run
        self._losses: defaultdict[str, list[Loss]] = defaultdict(list)
        self._lock = threading.Lock()

    def note(
        self, role: str, why: EngineError, *, who: str = "", rows: Set[str] = frozenset()
    ) -> str:
        """Note the restart of a process of a role, which was at work on these rows; return its
        number as words. Raise EngineError if there were too many.
        """
        with self._lock:
            now = time.monotonic()
            losses = [loss for loss in self._losses[role] if now - loss.at_s < HOUR_S]
            self._losses[role] = losses
            is_new = who in losses[-1].who and NEVER_RAN not in str(why) if losses else True
            is_same = not is_new and now - losses[-1].at_s < EVENT_S
            if not is_same and len(losses) >= self.most:
                suspects = _suspects([*(loss.rows for loss in losses), rows])
                raise EngineError(
                    f"{why}. It is not started again: {self.most} restart(s) of {role} within an "
                    f"hour are allowed (--max_restarts).{suspects}"
                )
            if not is_same:
                self.num_losses += 1
                losses.append(Loss(now))
            losses[-1].who.add(who)
            losses[-1].rows.update(rows)
            return f"restart {len(losses)} of {self.most} within an hour (--max_restarts)"


def _suspects(rows_of: Sequence[Set[str]]) -> str:
    """Return a sentence about the prompts that every lost process was at work on; empty if there
    are none, or if there was one loss. A process that did not start was at work on nothing.
    """
    found = [set(rows) for rows in rows_of if rows]
    shared = sorted(set.intersection(*found), key=int) if len(found) > 1 else []
    if not shared:
        return ""
    more = f" and {len(shared) - MAX_NAMED} more" if len(shared) > MAX_NAMED else ""
    return f" Each of those lost was at work on row(s) {', '.join(shared[:MAX_NAMED])}{more}."
