"""Blocks end when their time is over; results wait in boxes."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from openrlhf.utils.mailboxes import Mailboxes
from openrlhf.utils.threads import OverdueError, time_limit


def test_every_owner_has_a_box_of_its_own():
    boxes: Mailboxes[int] = Mailboxes()
    for item in (1, 2):
        boxes.put("a", item)
    boxes.put("b", KeyError("lost"))
    assert boxes.fetch("a", 0.0) == [1, 2]
    assert boxes.fetch("a", 0.01) == []
    with pytest.raises(KeyError, match="lost"):
        boxes.fetch("b", 0.0)


def test_a_closed_box_lets_go_of_who_waits_and_takes_nothing_more():
    boxes: Mailboxes[int] = Mailboxes()
    came: list[list[int]] = []
    waiting = threading.Thread(target=lambda: came.append(boxes.fetch("a", 60.0)))
    waiting.start()
    boxes.put("b", 1)
    boxes.close("b")
    boxes.close("a")
    waiting.join(10)
    assert came == [[]]
    boxes.put("a", 1)
    start = time.monotonic()
    assert boxes.fetch("a", 60.0) == boxes.fetch("b", 60.0) == []
    assert time.monotonic() - start < 10


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
