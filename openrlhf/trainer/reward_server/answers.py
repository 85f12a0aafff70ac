"""Answers by request id: a request that comes twice is computed once.

A client repeats a request whose answer it did not see. While the first is under way the second
waits with it; answers given are kept, up to a number of rewards.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from openrlhf.trainer.reward_server.request import RefusedError

Answer = dict[str, Any]
MAX_ANSWERS = 1024
MAX_REWARDS = 65_536


@dataclass
class Entry:
    """One request id: the body it came with, the work, and how many wait for it."""

    digest: bytes
    task: asyncio.Task[Answer]
    num_waiting: int = 0
    is_kept: bool = False  # answered

    @property
    def is_useless(self) -> bool:
        """Whether nobody waits for it and no answer came of it."""
        if self.num_waiting:
            return False
        return not self.task.done() or self.task.cancelled() or self.task.exception() is not None


class Answers:
    """Requests under way and answers given; used in one event loop."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._num_rewards = 0  # in the answers that are kept

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
            answer = await asyncio.shield(entry.task)
        finally:
            entry.num_waiting -= 1
            if entry.is_useless:
                entry.task.cancel()
                self._forget(request_id, entry)
        if not entry.is_kept:
            entry.is_kept = True
            self._num_rewards += len(answer["rewards"])
        self._forget_oldest()
        return answer

    def _forget(self, request_id: str, entry: Entry) -> None:
        if self._entries.get(request_id) is entry:
            del self._entries[request_id]

    def _forget_oldest(self) -> None:
        while self._num_rewards > MAX_REWARDS or len(self._entries) > MAX_ANSWERS:
            name, entry = next(iter(self._entries.items()))
            if not entry.is_kept:  # under way; it goes with the next answers
                return
            self._num_rewards -= len(entry.task.result()["rewards"])
            del self._entries[name]


async def unless_gone(work: Awaitable[Answer], gone: Awaitable[None]) -> Answer | None:
    """What the work gives; None, and the work is cancelled, when the client is gone before."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        watch.cancel()
