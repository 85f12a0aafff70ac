"""Micro-batches over concurrent requests: rows that arrive while a forward runs join the next one.

Rows are taken from the waiting requests in turn, so a large request does not hold up small ones.
Knows nothing of HTTP, texts or models: a row is a list of token ids, and a function scores some.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from openrlhf.errors import first_line

Row = Sequence[int]  # token ids of one text
Waiting = deque[tuple[Row, "asyncio.Future[float]"]]  # rows of one request
SHORTEST = ([0],)  # every vocabulary has a token 0


class ScoringError(Exception):
    """A row that could not be scored."""


class NonFiniteError(ScoringError):
    """A row whose score is not finite."""


class Batcher:
    """The queue between requests and one model, on one event loop; forwards run in `thread`."""

    def __init__(
        self,
        score_rows: Callable[[Sequence[Row]], Sequence[float]],
        thread: Executor,
        *,
        max_rows: int | None,
        max_tokens: int,
    ) -> None:
        self.num_forwards = 0
        self.num_rows = 0  # scored so far
        self.is_working = True  # the last forward did not show a broken model
        self._score_rows = score_rows
        self._thread = thread
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._requests: deque[Waiting] = deque()
        self._running: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Return how many rows no forward has taken yet."""
        return sum(not future.done() for rows in self._requests for _, future in rows)

    async def score(self, rows: Sequence[Row]) -> list[float | ScoringError]:
        """Return the score of every row, or why it has none. Cancelling frees its place."""
        futures = [asyncio.get_running_loop().create_future() for _ in rows]
        self._requests.append(deque(zip(rows, futures, strict=True)))
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())
        return await asyncio.gather(*futures, return_exceptions=True)

    async def _run(self) -> None:
        """Score until nothing waits."""
        loop = asyncio.get_running_loop()
        while taken := self._next_rows():
            rows = [row for row, _ in taken]
            scores = await loop.run_in_executor(self._thread, self._scores, rows)
            self.num_rows += len(rows)
            for (_, future), score in zip(taken, scores, strict=True):
                if future.done():  # given up
                    continue
                if isinstance(score, ScoringError):
                    future.set_exception(score)
                else:
                    future.set_result(score)

    def _next_rows(self) -> Waiting:
        """Take one row of each request in turn until the forward is full."""
        taken: Waiting = deque()
        num_tokens = 0
        while self._requests and len(taken) != self._max_rows:
            rows = self._requests.popleft()
            while rows and rows[0][1].done():  # given up
                rows.popleft()
            if not rows:
                continue
            num_tokens += len(rows[0][0])
            if taken and num_tokens > self._max_tokens:
                self._requests.appendleft(rows)
                break
            taken.append(rows.popleft())
            self._requests.append(rows)
        return taken

    def _scores(self, rows: Sequence[Row]) -> list[float | ScoringError]:
        """Return a score or an error for each row: what fails together is tried in halves."""
        self.num_forwards += 1
        try:
            scores = self._score_rows(rows)
        except (RuntimeError, MemoryError, IndexError) as error:  # torch's: memory, kernels, ids
            if len(rows) > 1:
                middle = len(rows) // 2
                return self._scores(rows[:middle]) + self._scores(rows[middle:])
            self.is_working = self._still_works()
            return [ScoringError(f"the model failed: {first_line(error)[:200]}")]
        self.is_working = True
        return [
            score if math.isfinite(score) else NonFiniteError(f"non_finite: the score is {score}")
            for score in scores
        ]

    def _still_works(self) -> bool:
        """Return True if the model scores the shortest text: after some errors a GPU does
        nothing.
        """
        try:
            self._score_rows(SHORTEST)
        except RuntimeError:
            return False
        return True
