"""A reward function file in worker processes: in parallel, off this process, each call with limits.

A worker that hangs, grows or dies is killed and replaced; its call ends in a RewardError.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from openrlhf.errors import RewardError
from openrlhf.rewards.base import (
    RewardBatch,
    RewardResult,
    handed_to,
    joined,
    result_from_answer,
)
from openrlhf.rewards.worker_process import WorkerLimits, WorkerProcess

NO_SAMPLES = RewardBatch([], [], [], [])
MIN_WORKERS, MAX_WORKERS = 4, 16
CLOSE_S = 10.0  # until killed workers must have ended


def default_num_workers() -> int:
    """A worker a core, but some even on a small machine: many functions only wait."""
    return min(max(os.cpu_count() or 1, MIN_WORKERS), MAX_WORKERS)


@dataclass(frozen=True)
class PoolSettings:
    """Sizes and limits of a pool."""

    batch_size: int = 8  # most samples of one call
    num_workers: int = field(default_factory=default_num_workers)
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    log_dir: Path | None = None  # where workers print to; None: nowhere


@dataclass(frozen=True)
class _Job:
    batch: RewardBatch
    future: Future[RewardResult]


class FunctionPool:
    """Scores batches with the function in a file, several at a time; see StreamingSource.

    A thread a worker: the kernel ends a worker with the thread that started it.
    """

    def __init__(self, path: str | Path, settings: PoolSettings | None = None) -> None:
        """Start the first worker, the others when they are needed; raises ConfigError for what is
        wrong with the file.
        """
        self.path = str(path)
        self.settings = settings or PoolSettings()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers: dict[int, WorkerProcess] = {}  # by thread
        self._threads: list[threading.Thread] = []
        self._num_free = 0  # threads that wait for a job, less the jobs that wait for a thread
        self._is_closed = False
        self._put(NO_SAMPLES).result()

    def score(self, batch: RewardBatch) -> RewardResult:
        """See RewardSource."""
        return self.submit(batch).result()

    def submit(self, batch: RewardBatch) -> Future[RewardResult]:
        """See StreamingSource."""
        parts = batch.parts(self.settings.batch_size)
        return joined([self._put(part) for part in parts], source=self.path)

    def close(self) -> None:
        """Kill the workers and see them end; calls that still run end in a RewardError."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers.values():
                worker.end()
            for _ in self._threads:
                self._jobs.put(None)
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    @property
    def has_room(self) -> bool:
        """See SaysRoom."""
        with self._lock:
            return self._num_free > 0 or len(self._threads) < self.settings.num_workers

    @property
    def worker_pids(self) -> list[int]:
        """The processes that live now."""
        with self._lock:
            return [worker.process.pid for worker in self._workers.values()]

    def _put(self, batch: RewardBatch) -> Future[RewardResult]:
        job = _Job(batch, Future())
        with self._lock:
            if self._is_closed:
                raise RewardError(f"{self.path}: the pool of workers was closed")
            self._num_free -= 1
            if self._num_free < 0 and len(self._threads) < self.settings.num_workers:
                index = len(self._threads)
                thread = threading.Thread(
                    target=self._run, args=(index,), name=f"reward-{index}", daemon=True
                )
                self._threads.append(thread)
                self._num_free += 1
                thread.start()
            self._jobs.put(job)
        return job.future

    def _run(self, index: int) -> None:
        """Do jobs until told to stop; the worker is this thread's own."""
        while (job := self._jobs.get()) is not None:
            with handed_to(job.future):
                job.future.set_result(self._do(index, job.batch))
            with self._lock:
                self._num_free += 1
        self._drop(index)

    def _do(self, index: int, batch: RewardBatch) -> RewardResult:
        worker = self._worker(index)
        if not len(batch):
            return result_from_answer([], batch=batch, source=self.path)
        try:
            answer = worker.answer(batch)
        except RewardError:
            self._drop(index)
            raise
        if worker.is_too_large:  # it answered, and has leaked
            self._drop(index)
        if "error" in answer:
            raise RewardError(answer["error"])
        return result_from_answer(answer, batch=batch, source=self.path)

    def _worker(self, index: int) -> WorkerProcess:
        """The worker of a thread; a new one when there is none or it died between two calls."""
        worker = self._workers.get(index)
        if worker is not None and worker.is_alive:
            return worker
        self._drop(index)
        log_dir = self.settings.log_dir
        log_path = log_dir / f"reward-{index}.log" if log_dir else None
        worker = WorkerProcess(self.path, self.settings.limits, log_path)
        with self._lock:
            self._workers[index] = worker
            if self._is_closed:
                worker.end()
        return worker

    def _drop(self, index: int) -> None:
        with self._lock:
            worker = self._workers.pop(index, None)
        if worker is not None:
            worker.kill()
