"""Micro-batches over concurrent requests: what arrives while a forward runs joins the next one.

Rows are taken from the waiting requests in turn, so a large request does not hold up small ones.
Knows nothing of HTTP, texts or models: a row is a list of token ids, and a function scores some.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from openrlhf.errors import first_line

Row = Sequence[int]  # token ids of one text
SHORTEST = ([0],)  # every vocabulary has a token 0
ScoreRows = Callable[[int, Sequence[Row]], Sequence[float]]  # of the model with this index


class ScoringError(Exception):
    """A row that could not be scored: why, and its place in the request."""

    def __init__(self, error: str, index: int = 0, *, is_non_finite: bool = False) -> None:
        super().__init__(error)
        self.error = error
        self.index = index
        self.is_non_finite = is_non_finite


@dataclass(eq=False)
class Job:
    """The rows of one request for one model."""

    model: int
    rows: Sequence[Row]
    done: asyncio.Future[list[float]]
    num_taken: int = 0
    scores: dict[int, float] = field(default_factory=dict)

    @property
    def num_waiting(self) -> int:
        """Return how many rows no forward has taken; none once somebody has given up."""
        return 0 if self.done.done() else len(self.rows) - self.num_taken

    def put(self, index: int, score: float | ScoringError) -> None:
        """Note what became of a row; the first that fails fails the request."""
        if self.done.done():
            return
        if isinstance(score, ScoringError):
            error = ScoringError(score.error, index, is_non_finite=score.is_non_finite)
            self.done.set_exception(error)
            return
        self.scores[index] = score
        if len(self.scores) == len(self.rows):
            self.done.set_result([self.scores[k] for k in range(len(self.rows))])


class Batcher:
    """The queue between requests and the model, on one event loop; forwards run in a thread."""

    def __init__(self, score_rows: ScoreRows, *, max_rows: int | None, max_tokens: int) -> None:
        self.num_forwards = 0
        self.num_rows = 0  # scored so far
        self.is_working = True  # the last forward did not show a broken model
        self._score_rows = score_rows
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._jobs: deque[Job] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._running: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Return how many rows no forward has taken yet."""
        return sum(job.num_waiting for job in self._jobs)

    async def score(self, model: int, rows: Sequence[Row]) -> list[float]:
        """Return the score of every row; raises ScoringError. Cancelling it frees its place."""
        if not rows:
            return []
        job = Job(model, rows, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())
        return await job.done

    async def _run(self) -> None:
        """Score until nothing waits."""
        loop = asyncio.get_running_loop()
        while taken := self._next_rows():
            model = taken[0][0].model
            rows = [job.rows[index] for job, index in taken]
            scores = await loop.run_in_executor(self._thread, self._scores, model, rows)
            self.num_rows += len(rows)
            for (job, index), score in zip(taken, scores, strict=True):
                job.put(index, score)

    def _next_rows(self) -> list[tuple[Job, int]]:
        """Take one row of each request in turn, all for one model, until the forward is full."""
        self._jobs = deque(job for job in self._jobs if job.num_waiting)
        taken: list[tuple[Job, int]] = []
        skipped: list[Job] = []  # for other models
        num_tokens = 0
        while self._jobs and len(taken) != self._max_rows:
            job = self._jobs.popleft()
            if taken and job.model != taken[0][0].model:
                skipped.append(job)
                continue
            num_tokens += len(job.rows[job.num_taken])
            if taken and num_tokens > self._max_tokens:
                self._jobs.appendleft(job)
                break
            taken.append((job, job.num_taken))
            job.num_taken += 1
            if job.num_waiting:
                self._jobs.append(job)
        self._jobs.extendleft(reversed(skipped))
        return taken

    def _scores(self, model: int, rows: Sequence[Row]) -> list[float | ScoringError]:
        """Return a score or an error for each row: what fails together is tried in halves."""
        self.num_forwards += 1
        try:
            scores = self._score_rows(model, rows)
        except (RuntimeError, MemoryError, IndexError) as error:  # torch's: memory, kernels, ids
            if len(rows) > 1:
                middle = len(rows) // 2
                halves = (rows[:middle], rows[middle:])
                return [s for half in halves for s in self._scores(model, half)]
            self.is_working = self._still_works(model)
            return [ScoringError(f"the model failed: {first_line(error)[:200]}")]
        self.is_working = True
        return [score if math.isfinite(score) else _non_finite(score) for score in scores]

    def _still_works(self, model: int) -> bool:
        """Return True if a model scores the shortest text: after some errors a GPU does nothing."""
        try:
            self._score_rows(model, SHORTEST)
        except RuntimeError:
            return False
        return True


def _non_finite(score: float) -> ScoringError:
    return ScoringError(f"non_finite: the score is {score}", is_non_finite=True)
