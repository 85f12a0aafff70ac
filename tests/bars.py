"""A display of progress bars that keeps what it was told, and waiting for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

DEADLINE_S = 60.0


class Recorder:
    """A display that keeps what it was told."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.shown: list[tuple[str, int, int | None]] = []
        self.open: set[object] = set()
        self.appeared = threading.Event()

    def show(self, bar: object, description: str, num_done: int, total: int | None) -> None:
        self.shown.append((description, num_done, total))
        self.open.add(bar)
        self.appeared.set()

    def hide(self, bar: object) -> None:
        self.open.discard(bar)

    @property
    def descriptions(self) -> set[str]:
        return {description for description, _, _ in self.shown}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
