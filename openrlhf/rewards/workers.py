"""A reward function in worker processes: in parallel, off this process, each call with limits.

A worker that hangs or dies is killed and replaced; its call ends in a RewardError. While the user's
code runs no connection is open: a worker connects to the pool's socket to hand in its reply, and
waits there for its next batch. What lacks the token of the call is dropped, so that nothing the
code writes, closes or forks is a reward. Replies are JSON: a model's code may have run in there.

`python -m openrlhf.rewards.workers SOCKET TOKEN FILE MEMORY_BYTES PARENT` is a worker.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.base import RewardBatch, RewardResult, RewardSource, checked_result
from openrlhf.rewards.function import UserFunction
from openrlhf.utils.processes import die_with_parent, kill_tree, limit_memory

MIN_WORKERS, MAX_WORKERS = 4, 16
LOAD_TIMEOUT_S = 600.0  # for what a file does when it is imported, such as loading a model
DUMP_S = 0.1  # for a hanging worker to write its stack
DUMP_SIGNAL = signal.SIGUSR1
MAX_LOG_BYTES = 64 * 2**20  # of what a worker printed; as much again is kept beside it
GIB = 2**30
NO_SAMPLES = RewardBatch([], [], [], [])


def default_num_workers() -> int:
    """Return a worker a core, but some even on a small machine: many functions only wait."""
    return min(max(os.cpu_count() or 1, MIN_WORKERS), MAX_WORKERS)


@dataclass(frozen=True)
class PoolSettings:
    """Sizes and limits of a pool."""

    batch_size: int = 8  # most samples of one call
    num_workers: int = field(default_factory=default_num_workers)
    timeout_s: float = 300.0  # for one call of the function
    memory_gib: float = 8.0  # private memory of a worker
    log_dir: Path | None = None  # where workers print to; None: nowhere


class FunctionPool(RewardSource):
    """Scores batches with the function in a file, several at a time."""

    def __init__(self, path: str | Path, settings: PoolSettings | None = None) -> None:
        """Start the first worker, the others when they are needed; raises ConfigError for what is
        wrong with the file.
        """
        self.path = str(path)
        self.settings = settings or PoolSettings()
        super().__init__(self.path, self.settings.batch_size)
        # A short path: the address of a socket has at most 107 bytes.
        short = "/tmp" if os.access("/tmp", os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(dir=short)
        self.run(self._open()).result()
        try:
            self.run(self.score_part(NO_SAMPLES)).result()
        except ConfigError:
            self.close()
            raise

    @property
    def has_room(self) -> bool:
        return bool(self._idle)

    @property
    def worker_pids(self) -> list[int]:
        """Return the processes that live now."""
        found = [worker.process for worker in self._workers if worker.process is not None]
        return [process.pid for process in found if process.returncode is None]

    async def score_part(self, batch: RewardBatch) -> RewardResult:
        async with self._places:
            worker = self._idle.pop()
            try:
                answer = await worker.answer(batch)
            except BaseException:  # cancelled as well: the function still runs
                await worker.kill()
                raise
            finally:
                self._idle.append(worker)
        if "error" in answer:
            raise RewardError(answer["error"])
        return checked_result(answer, batch=batch, source=self.path)

    async def release(self) -> None:
        for worker in self._workers:
            await worker.kill()
        self._server.close()
        self._folder.cleanup()

    async def _open(self) -> None:
        address = str(Path(self._folder.name, "mailbox"))
        self._due: dict[str, asyncio.Future[Reply]] = {}  # replies, by token
        self._server = await asyncio.start_unix_server(self._take, address)
        numbers = range(self.settings.num_workers)
        self._workers = [Worker(self.path, k, self.settings, address, self._due) for k in numbers]
        self._idle = self._workers[::-1]
        self._places = asyncio.Semaphore(len(numbers))

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a whole reply, and the connection by which its worker waits for the next batch."""
        with suppress(ConnectionError):
            token, _, reply = (await reader.read()).partition(b"\n")
            due = self._due.pop(token.decode(errors="replace"), None)
            if due is not None and not due.done():
                due.set_result((json.loads(reply), writer))
                return
        writer.close()


Reply = tuple[dict[str, Any], asyncio.StreamWriter]


class Worker:
    """One worker of a pool: its process, started when there is none, and its limits."""

    def __init__(
        self,
        path: str,
        index: int,
        settings: PoolSettings,
        address: str,
        due: dict[str, asyncio.Future[Reply]],
    ) -> None:
        self.path = path
        self.settings = settings
        self.log_path = settings.log_dir / f"reward-{index}.log" if settings.log_dir else None
        self.process: asyncio.subprocess.Process | None = None
        self._address = address
        self._due = due
        self._writer: asyncio.StreamWriter | None = None  # by which it waits for a batch

    async def answer(self, batch: RewardBatch) -> dict[str, Any]:
        """Return what the function returns, or its error; raises RewardError when the worker ended
        or did not answer in time, and ConfigError when the file cannot be loaded.
        """
        if self.process is None or self.process.returncode is not None:
            await self._start()
        if not len(batch):
            return {"rewards": []}
        if self.log_path is not None:
            _rotate(self.log_path)
        token = secrets.token_hex(16)
        assert self._writer is not None, "it waits for a batch"
        self._writer.write(pickle.dumps((token, batch)))
        self._writer.close()
        try:
            answer = await self._reply(token, self.settings.timeout_s, "(--reward_timeout_s) ")
        except _EndedError as error:
            raise RewardError(
                f"{self.path}: the reward function {error}while it scored {batch.names()}. "
                f"Its worker was replaced.{self._log_hint}"
            ) from error
        if answer.pop("is_full", False):
            await self.kill()
        return answer

    async def kill(self) -> None:
        """End the process and what it started."""
        if self._writer is not None:
            self._writer.close()
        if self.process is not None:
            kill_tree(self.process.pid)
            await self.process.wait()
            self.process = None

    async def _start(self) -> None:
        await self.kill()
        token = secrets.token_hex(16)
        memory = str(int(self.settings.memory_gib * GIB))
        words = [self._address, token, self.path, memory, str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment.setdefault("OMP_NUM_THREADS", "1")  # several workers share the cores
        with ExitStack() as stack:
            output: Any = asyncio.subprocess.DEVNULL
            if self.log_path is not None:
                self.log_path.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(self.log_path.open("ab"))
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-u", "-m", "openrlhf.rewards.workers", *words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # what it starts ends with it
            )
        try:
            answer = await self._reply(token, LOAD_TIMEOUT_S, "")
        except _EndedError as error:
            raise ConfigError(
                f"{self.path}: the file {error}while it was imported.{self._log_hint}"
            ) from error
        if "problems" in answer:
            raise ConfigError(answer["problems"])

    async def _reply(self, token: str, timeout_s: float, flag: str) -> dict[str, Any]:
        """Wait for a reply; raises _EndedError when the process ends first, or is too late."""
        assert self.process is not None, "it was started"
        due: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._due[token] = due
        ended = asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait({due, ended}, timeout=timeout_s, return_when="FIRST_COMPLETED")
            if due.done():
                answer, self._writer = due.result()
                return answer
            if not ended.done():
                self.process.send_signal(DUMP_SIGNAL)  # its stack, to the log
                await asyncio.sleep(DUMP_S)
                raise _EndedError(f"did not end in {timeout_s:g} s {flag}")
            raise _EndedError(f"ended its process ({_exit_in_words(ended.result())}) ")
        finally:
            self._due.pop(token, None)
            ended.cancel()

    @property
    def _log_hint(self) -> str:
        return f" See {self.log_path}." if self.log_path else ""


class _EndedError(Exception):
    """A worker gave no reply, in words."""


def _rotate(path: Path) -> None:
    """Move what a large log holds to `<name>.1`; the worker, which appends, goes on in the empty
    file.
    """
    with suppress(OSError):  # a log is not worth a run
        if path.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)


def _exit_in_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def main(arguments: Sequence[str]) -> None:
    """Load the function, say so, and score batches until the pool hangs up."""
    address, token, path, memory_bytes, parent = arguments
    die_with_parent(int(parent))
    limit_memory(int(memory_bytes))
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    own_pid = os.getpid()
    try:
        function = UserFunction(path)
    except ConfigError as error:
        _exchange(address, token, {"problems": error.problems})
        return
    reply: dict[str, object] = {}
    while (received := _exchange(address, token, reply)) is not None:
        token, batch = received
        try:
            reply = asdict(function.answer(batch))
        except RewardError as error:
            reply = {"error": str(error)}
            if isinstance(error.__cause__, MemoryError):
                reply = {"error": f"{error} (--reward_memory_gib)", "is_full": True}
        if os.getpid() != own_pid:  # a copy that the function forked: it has no say
            os._exit(0)


def _exchange(address: str, token: str, reply: dict[str, object]) -> tuple[str, RewardBatch] | None:
    """Hand a reply in and return the next batch with its token; None when the pool is gone."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(None)  # whatever default the user's code has set
        connection.connect(address)
        connection.sendall(f"{token}\n{json.dumps(reply)}".encode())
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            received = file.read()
    # From the parent, whose folder holds the address.
    return pickle.loads(received) if received else None


if __name__ == "__main__":
    main(sys.argv[1:])
