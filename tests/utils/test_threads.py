"""Blocks end when their time is over."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from openrlhf.utils.threads import OverdueError, time_limit


def test_a_block_is_interrupted_in_the_thread_that_runs_it() -> None:
    ends: list[str] = []

    def work(seconds: float) -> None:
        try:
            with time_limit(0.2):
                end_s = time.monotonic() + seconds
                while time.monotonic() < end_s:
                    with suppress(Exception):
                        sum(range(1000))
            ends.append("done")
        except OverdueError:
            ends.append("overdue")

    threads = [threading.Thread(target=work, args=(s,)) for s in (0.0, 60.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(ends) == ["done", "overdue"]
