"""Answers by request id: a request that comes twice is computed once.

A client repeats a request whose answer it did not see. While the first is under way the second
waits with it; answers given are kept, up to a number of them and of bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from openrlhf.trainer.reward_server.request import RefusedError

Answer = dict[str, Any]
MAX_ANSWERS = 1024
MAX_BYTES = 32 * 2**20


@dataclass
class Entry:
    """One request id: the body it came with, the work, and how many wait for it."""

    digest: bytes
    task: asyncio.Task[Answer]
    num_waiting: int = 0
    num_bytes: int = 0  # of the answer, once it is kept

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer."""
        task = self.task
        return task.done() and not task.cancelled() and task.exception() is None

    @property
    def is_useless(self) -> bool:
        """Whether nobody waits for it and no answer came of it."""
        return not self.num_waiting and not self.is_answered


class Answers:
    """Requests under way and answers given; used in one event loop."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._num_bytes = 0  # of the answers that are kept

    async def get(
        self,
        request_id: str | None,
        body: bytes,
        compute: Callable[[], Coroutine[Any, Any, Answer]],
    ) -> Answer:
        """The answer to a body; raises what `compute` raises, and RefusedError for an id that came
        with another body. The work is cancelled when nobody waits for it any more.
        """
        if request_id is None:
            return await compute()
        digest = hashlib.sha256(body).digest()
        entry = self._entries.get(request_id)
        if entry is None:
            entry = Entry(digest, asyncio.ensure_future(compute()))
            self._entries[request_id] = entry
        elif entry.digest != digest:
            raise RefusedError(422, "the id was used for another request", "x-request-id")
        return await self._wait(request_id, entry)

    async def _wait(self, request_id: str, entry: Entry) -> Answer:
        entry.num_waiting += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.num_waiting -= 1
            if entry.is_useless:
                entry.task.cancel()
                self._forget(request_id, entry)
            elif entry.is_answered:  # even if the client left in the same moment
                self._keep(entry)

    def _keep(self, entry: Entry) -> None:
        if not entry.num_bytes:
            entry.num_bytes = size_of(entry.task.result())
            self._num_bytes += entry.num_bytes
        self._forget_oldest()

    def _forget(self, request_id: str, entry: Entry) -> None:
        if self._entries.get(request_id) is entry:
            del self._entries[request_id]

    def _forget_oldest(self) -> None:
        while self._num_bytes > MAX_BYTES or len(self._entries) > MAX_ANSWERS:
            # What is under way stays, and holds no younger answer back from being forgotten.
            kept = next((name for name, entry in self._entries.items() if entry.num_bytes), None)
            if kept is None:
                return
            self._num_bytes -= self._entries.pop(kept).num_bytes


def size_of(value: object) -> int:
    """Bytes of memory that an answer takes, whose lists hold no lists."""
    own = sys.getsizeof(value)
    if isinstance(value, dict):
        return own + sum(map(size_of, value.values()))
    return own + sum(map(sys.getsizeof, value)) if isinstance(value, list) else own


async def unless_gone(work: Awaitable[Answer], gone: Awaitable[None]) -> Answer | None:
    """What the work gives; None, and the work is cancelled, when the client is gone before."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        watch.cancel()
