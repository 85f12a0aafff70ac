"""Micro-batches over concurrent requests: what arrives while a forward runs joins the next one.

Requests come from an event loop; forwards run in the one thread that calls `run`. Rows are taken
from the waiting requests in turn, so a large request does not hold up small ones. Knows nothing of
HTTP, texts or models: a row is a list of token ids, and a function scores some of them.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from openrlhf.errors import first_line

Row = Sequence[int]  # token ids of one text
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
    future: asyncio.Future[list[float]]
    num_taken: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    failure: ScoringError | None = None
    is_over: bool = False  # answered, failed or given up: its other rows need no forward

    def put(self, index: int, score: float | ScoringError) -> bool:
        """Note what became of a row; whether the job is over by it."""
        if self.is_over:
            return False
        if isinstance(score, ScoringError):
            self.failure = ScoringError(score.error, index, is_non_finite=score.is_non_finite)
        else:
            self.scores[index] = score
        self.is_over = self.failure is not None or len(self.scores) == len(self.rows)
        return self.is_over

    def settle(self) -> None:
        """Hand the outcome to whoever waits; called in the event loop."""
        if self.future.done():
            return
        if self.failure is not None:
            self.future.set_exception(self.failure)
        else:
            self.future.set_result([self.scores[index] for index in range(len(self.rows))])


Taken = list[tuple[Job, int]]  # rows of a forward: whose, and which


class Batcher:
    """The queue between an event loop and the thread of the model."""

    def __init__(self, *, max_rows: int | None, max_tokens: int) -> None:
        self.num_forwards = 0
        self.num_rows = 0  # scored so far
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._jobs: deque[Job] = deque()  # with rows that no forward has taken
        self._open: set[Job] = set()  # somebody waits for them
        self._has_news = threading.Condition()
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Rows that no forward has taken yet."""
        with self._has_news:
            return sum(len(job.rows) - job.num_taken for job in self._jobs if not job.is_over)

    async def score(self, model: int, rows: Sequence[Row]) -> list[float]:
        """The score of every row; raises ScoringError. Cancelling it frees its place."""
        if not rows:
            return []
        job = Job(model, rows, asyncio.get_running_loop().create_future())
        with self._has_news:
            if self._is_closed:
                raise ScoringError("the server is stopping")
            self._jobs.append(job)
            self._open.add(job)
            self._has_news.notify()
        try:
            return await job.future
        finally:
            job.is_over = True
            with self._has_news:
                self._open.discard(job)

    def close(self) -> None:
        """Let `run` return once it is done; requests that still wait are failed."""
        with self._has_news:
            self._is_closed = True
            left = list(self._open)
            self._jobs.clear()
            self._has_news.notify()
        for job in left:
            job.failure = ScoringError("the server is stopping")
        _settle(left)

    def run(self, score_rows: ScoreRows) -> None:
        """Score until closed; a forward that fails is one row's or one request's error."""
        while True:
            taken = self._take()
            if not taken:
                return
            model = taken[0][0].model
            rows = [job.rows[index] for job, index in taken]
            scores = self._scores(score_rows, model, rows)
            self.num_rows += len(rows)
            outcomes = zip(taken, scores, strict=True)
            _settle([job for (job, index), score in outcomes if job.put(index, score)])

    def _take(self) -> Taken:
        """Rows of the next forward, all for one model; none once the queue is closed."""
        with self._has_news:
            while True:
                self._drop_finished()
                if self._jobs or self._is_closed:
                    break
                self._has_news.wait()
            return self._next_rows() if self._jobs else []

    def _drop_finished(self) -> None:
        self._jobs = deque(job for job in self._jobs if not job.is_over)

    def _next_rows(self) -> Taken:
        """One row of each request in turn, until the forward is full."""
        model = self._jobs[0].model
        ring = deque(job for job in self._jobs if job.model == model)
        taken: Taken = []
        num_tokens = 0
        while ring and len(taken) != self._max_rows:
            job = ring.popleft()
            num_tokens += len(job.rows[job.num_taken])
            if taken and num_tokens > self._max_tokens:
                break
            taken.append((job, job.num_taken))
            job.num_taken += 1
            if job.num_taken < len(job.rows):
                ring.append(job)
        # Those that were not served this time come first next time; so do the other models'.
        served = {id(job) for job, _ in taken}
        rest = [job for job in self._jobs if id(job) not in served]
        again = [job for job in self._jobs if id(job) in served and job.num_taken < len(job.rows)]
        self._jobs = deque([*rest, *again])
        return taken

    def _scores(
        self, score_rows: ScoreRows, model: int, rows: Sequence[Row]
    ) -> list[float | ScoringError]:
        """A score or an error for each row: what fails together is tried in halves."""
        self.num_forwards += 1
        try:
            scores = score_rows(model, rows)
        except (RuntimeError, MemoryError, IndexError) as error:  # torch's: memory, kernels, ids
            if len(rows) > 1:
                middle = len(rows) // 2
                halves = (rows[:middle], rows[middle:])
                return [s for half in halves for s in self._scores(score_rows, model, half)]
            return [ScoringError(f"the model failed: {first_line(error)[:200]}")]
        return [score if math.isfinite(score) else _non_finite(score) for score in scores]


def _non_finite(score: float) -> ScoringError:
    return ScoringError(f"non_finite: the score is {score}", is_non_finite=True)


def _settle(jobs: Iterable[Job]) -> None:
    """Wake the event loop once for all jobs that are over."""
    over = list(jobs)
    if not over:
        return

    def settle_all() -> None:
        for job in over:
            job.settle()

    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        over[0].future.get_loop().call_soon_threadsafe(settle_all)
