"""How often lost processes are started again."""

import time
from collections import defaultdict

from openrlhf.errors import EngineError

HOUR_S = 3600.0


class Restarts:
    """Counts the restarts of each role within the last hour."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._times: defaultdict[str, list[float]] = defaultdict(list)

    def note(self, role: str, why: EngineError) -> str:
        """Note one; return its number as words. Raise EngineError if there were too many."""
        now = time.monotonic()
        self._times[role] = [then for then in self._times[role] if now - then < HOUR_S]
        if len(self._times[role]) >= self.most:
            raise EngineError(
                f"{why}. It is not started again: {self.most} restart(s) of {role} within an hour "
                "are allowed (--max_restarts)."
            )
        self._times[role].append(now)
        return f"restart {len(self._times[role])} of {self.most} within an hour (--max_restarts)"
