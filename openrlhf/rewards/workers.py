"""Reward functions in worker processes: in parallel, off this process, each call with limits.

A worker that hangs or dies is killed and replaced; its call ends in a RewardError, unless it was
killed from outside: then another one has the same call.
"""

import asyncio
import faulthandler
import os
import resource
import shutil
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.base import (
    RewardBatch,
    RewardResult,
    RewardSource,
    Shown,
    checked_result,
)
from openrlhf.rewards.function import UserFunctions
from openrlhf.utils.console import warn
from openrlhf.utils.framework_logs import last_lines
from openrlhf.utils.worker_process import (
    LATE_SIGNAL,
    START_TIMEOUT_S,
    WorkerProcess,
    attend,
)

MIN_WORKERS, MAX_WORKERS = 4, 16
ORPHAN_S = 60.0  # over the limit of a call: then a worker that nobody has ended ends by itself
MAX_LOG_BYTES = 64 * 2**20  # of what a worker printed; as much again is kept beside it
MEMORY_FLAG = "(--reward_memory_gib)"
GIB = 2**30
NO_SAMPLES = RewardBatch([], [], [], [])


class FunctionPool(RewardSource):
    """Scores batches with the functions of files, several batches at a time."""

    def __init__(
        self,
        path: str | Path,
        *,
        weights: Sequence[float] | None = None,
        batch_size: int = 8,
        num_workers: int | None = None,
        timeout_s: float = 300.0,
        memory_gib: float = 8.0,
        log_dir: Path | None = None,
    ) -> None:
        """Start the first worker, the others when they are needed; raise ConfigError for what is
        wrong with the files: `path` is one, or several as `UserFunctions.load` has them.

        `timeout_s` limits a call, `memory_gib` the private memory of a worker. Without
        `num_workers` there is one a core, but some even on a small machine: many functions only
        wait. Without `log_dir` nothing that they print is kept.
        """
        super().__init__(str(path), batch_size)
        count = num_workers or min(max(os.cpu_count() or 1, MIN_WORKERS), MAX_WORKERS)
        self.weights = weights and list(weights)
        self.timeout_s = timeout_s
        self.memory_bytes = int(memory_gib * GIB)
        self.log_dir = log_dir
        self.processes: dict[int, WorkerProcess] = {}
        self._idle: asyncio.Queue[int] = asyncio.LifoQueue()
        for index in reversed(range(count)):
            self._idle.put_nowait(index)
        try:
            self._thread.run(self._ask("start", NO_SAMPLES))
        except ConfigError:
            self.close()
            raise

    @property
    def has_capacity(self) -> bool:
        return not self._idle.empty()

    def check(self, columns: Sequence[str]) -> None:
        self._thread.run(self._ask("check", RewardBatch.of_columns(columns)))

    async def shown(self, batch: RewardBatch) -> Shown:
        asked = asyncio.run_coroutine_threadsafe(self._ask("shown", batch), self._thread.loop)
        found: Shown = await asyncio.wrap_future(asked)
        return found

    async def score_part(self, batch: RewardBatch) -> RewardResult:
        reply = await self._ask("answer", batch)
        unread = reply.pop("unread", [])
        result = checked_result(reply, batch=batch, source=self.name, may_lack=True)
        return replace(result, unread=[str(key) for key in unread])

    async def _ask(self, method: str, batch: RewardBatch) -> Any:
        """Return the result of a method of UserFunctions in a worker. If that is killed from
        outside, another one is asked, once. Raise RewardError when the worker ended or did not
        reply in time, and ConfigError when the file cannot be loaded or used.
        """
        index = await self._idle.get()
        log = self.log_dir / f"reward-{index}.log" if self.log_dir else Path(os.devnull)
        hint = f" See {log}." if self.log_dir else ""
        try:
            try:
                return await self._call(await self._worker(index, log, hint), method, batch)
            except ConnectionError as error:
                process = self.processes[index]
                if not process.was_killed:
                    raise
                warn(
                    f"{self.name}: the worker (pid {process.pid}) {error} while it scored "
                    f"{batch.names()}: another one scores them."
                )
                return await self._call(await self._worker(index, log, hint), method, batch)
        except (ConnectionError, TimeoutError) as error:
            is_late = isinstance(error, TimeoutError)  # and its log ends with its stack
            flag = " (--reward_timeout_s)" if is_late else ""
            end = (not is_late and last_lines(log)) or f".{hint}"
            raise RewardError(
                f"{self.name}: the reward function {error}{flag} while it scored {batch.names()}. "
                f"Its worker (pid {self.processes[index].pid}) was replaced{end}"
            ) from error
        finally:
            self._idle.put_nowait(index)

    async def _worker(self, index: int, log: Path, hint: str) -> WorkerProcess:
        """Return the worker of this number, a new one where the last has ended or was stopped."""
        if index in self.processes and self.processes[index].is_stopped:
            self.processes[index].kill()  # by somebody, while it had nothing to do
        if index not in self.processes or self.processes[index].is_over:
            self.processes[index] = await self._start(log.absolute(), hint)
        _rotate(log)
        return self.processes[index]

    async def _start(self, log: Path, hint: str) -> WorkerProcess:
        log.parent.mkdir(parents=True, exist_ok=True)
        words = (self.name, self.weights, self.memory_bytes, log)
        return await WorkerProcess.start(serve, *words, hint=hint)

    async def _call(self, process: WorkerProcess, method: str, batch: RewardBatch) -> Any:
        try:
            return await process.call(method, batch, self.timeout_s, timeout_s=self.timeout_s)
        except asyncio.CancelledError:  # the function still runs
            process.kill()
            raise
        except RewardError as error:
            if MEMORY_FLAG in str(error):  # it may hold on to what it has
                process.kill()
            raise

    async def release(self) -> None:
        for process in self.processes.values():
            await process.close()


def _rotate(path: Path) -> None:
    """Move what a large log holds to `<name>.1`; the worker, which appends, goes on in the empty
    file.
    """
    with suppress(OSError):  # a log is not worth a run
        if path.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)


def serve(
    connection: socket.socket,
    token: str,
    path: str,
    weights: list[float] | None,
    memory_bytes: int,
    log_path: Path,
) -> None:
    """Call functions for a pool, in the main thread: signals come only there."""
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for output in (sys.stdout, sys.stderr):
        os.dup2(log, output.fileno())
        output.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several workers share the cores
    limit_memory(memory_bytes)
    faulthandler.register(LATE_SIGNAL)
    calls: SimpleQueue[tuple[Future[Any], str, RewardBatch, float]] = SimpleQueue()

    async def take(
        method: str, batch: RewardBatch = NO_SAMPLES, limit_s: float = START_TIMEOUT_S
    ) -> Any:
        done: Future[Any] = Future()
        calls.put((done, method, batch, limit_s))
        return await asyncio.wrap_future(done)

    attend(connection, token, take)
    own_pid, functions = os.getpid(), None
    while True:
        done, method, batch, limit_s = calls.get()
        settle = done.set_result
        faulthandler.dump_traceback_later(limit_s + ORPHAN_S, exit=True)  # whoever holds the lock
        try:
            functions = functions or UserFunctions.load(path, weights)
            result = None if method == "start" else getattr(functions, method)(batch)
        except (ConfigError, RewardError) as error:  # copied, without the memory of its frames
            is_full = isinstance(error.__cause__, MemoryError)
            copy = type(error)(f"{error} {MEMORY_FLAG}" if is_full else str(error))
            result, settle = copy.in_user_code(error.user_traceback), done.set_exception
        faulthandler.cancel_dump_traceback_later()
        if os.getpid() != own_pid:  # a copy that the function forked: it has no say
            os._exit(0)
        settle(result)


def limit_memory(num_bytes: int) -> None:
    """Limit the private memory of this process; what it starts has the same limit of its own.

    Data is limited instead of the address space, of which CUDA reserves more than a machine has.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
