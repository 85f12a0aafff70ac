"""Results kept for their owners until they are fetched, whoever is first."""

from __future__ import annotations

import queue
import threading
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")

NUM_REMEMBERED = 256  # closed boxes: what still comes for them is thrown away


class Mailboxes(Generic[Item]):
    """A box for each owner; all calls may come from any thread."""

    def __init__(self) -> None:
        self._boxes: dict[str, queue.SimpleQueue[Item | BaseException | None]] = {}
        self._closed: deque[str] = deque(maxlen=NUM_REMEMBERED)
        self._lock = threading.Lock()

    def put(self, owner: str, item: Item | BaseException) -> None:
        """Keep a result, or an error for whoever fetches."""
        box = self._box(owner)
        if box is not None:
            box.put(item)

    def fetch(self, owner: str, wait_s: float) -> list[Item]:
        """What came since the last call; waits up to `wait_s` seconds for the first. Raises an
        error that was put; answers at once when the box is closed.
        """
        items: list[Item] = []
        box = self._box(owner)
        if box is None:
            return items
        with suppress(queue.Empty):
            item = box.get(timeout=wait_s)
            while item is not None:
                if isinstance(item, BaseException):
                    raise item
                items.append(item)
                item = box.get_nowait()
        return items

    def close(self, owner: str) -> None:
        """Throw away what is there and what will come; a call that waits returns."""
        with self._lock:
            box = self._boxes.pop(owner, None)
            self._closed.append(owner)
        if box is not None:
            box.put(None)

    def _box(self, owner: str) -> queue.SimpleQueue[Item | BaseException | None] | None:
        with self._lock:
            if owner in self._closed:
                return None
            return self._boxes.setdefault(owner, queue.SimpleQueue())
