"""Reward functions in worker processes: in parallel, off this process, each call with limits.

A worker that hangs or dies is killed and replaced; its call ends in a RewardError. A reply has the
token of its call, so that nothing else that user code or its children write is taken for a reward.

`python -m openrlhf.rewards.workers SOCKET FILES WEIGHTS MEMORY_BYTES PARENT` is a worker.
"""

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
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
from openrlhf.utils.processes import die_with_parent, kill_tree, limit_memory
from openrlhf.utils.worker_process import MAX_LINE_BYTES, marked_line, next_message

MIN_WORKERS, MAX_WORKERS = 4, 16
LOAD_TIMEOUT_S = 600.0  # for what a file does when it is imported, such as loading a model
DUMP_S = 0.1  # for a hanging worker to write its stack
DUMP_SIGNAL = signal.SIGUSR1
MAX_LOG_BYTES = 64 * 2**20  # of what a worker printed; as much again is kept beside it
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
        self.weights = json.dumps(weights and list(weights))
        self.timeout_s = timeout_s
        self.memory_bytes = int(memory_gib * GIB)
        logs = [log_dir and log_dir / f"reward-{index}.log" for index in range(count)]
        self.workers = [Worker(self, log) for log in logs]
        self._idle: asyncio.Queue[Worker] = asyncio.LifoQueue()
        for worker in reversed(self.workers):
            self._idle.put_nowait(worker)
        try:
            self._thread.run(self._ask("load", NO_SAMPLES))
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
        """Return what a method of UserFunctions returns in a worker."""
        worker = await self._idle.get()
        try:
            return await worker.ask(method, batch)
        finally:
            self._idle.put_nowait(worker)

    async def release(self) -> None:
        for worker in self.workers:
            await worker.kill()


class Worker:
    """One worker of a pool: its process, started when there is none, and its limits."""

    def __init__(self, pool: FunctionPool, log_path: Path | None) -> None:
        self.pool, self.path = pool, pool.name
        self.log_path = log_path or Path(os.devnull)
        self._log_hint = f" See {log_path}." if log_path else ""
        self.process: asyncio.subprocess.Process | None = None

    async def ask(self, method: str, batch: RewardBatch) -> Any:
        """Return what a method of UserFunctions returns for a batch; raises RewardError when the
        worker ended or did not reply in time, and ConfigError when the file cannot be loaded or
        used.
        """
        if self.process is None or self.process.returncode is not None:
            await self._start()
        _rotate(self.log_path)
        try:
            reply = await self._ask(method, batch, self.pool.timeout_s, " (--reward_timeout_s)")
        except (EOFError, TimeoutError, ValueError) as error:
            raise RewardError(
                f"{self.path}: the reward function {error} while it scored {batch.names()}. "
                f"Its worker was replaced.{self._log_hint}"
            ) from error
        if "is_full" in reply:
            await self.kill()
        return _answer_of(reply)

    async def kill(self) -> None:
        """End the process and what it started."""
        if self.process is not None:
            self._writer.close()
            kill_tree(self.process.pid)
            await self.process.wait()
            self.process = None

    async def _start(self) -> None:
        await self.kill()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment.setdefault("OMP_NUM_THREADS", "1")  # several workers share the cores
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, self.log_path.open("ab") as output:
            loaded = (self.path, self.pool.weights)
            words = map(str, (theirs.fileno(), *loaded, self.pool.memory_bytes, os.getpid()))
            self._reader, self._writer = await asyncio.open_unix_connection(
                sock=ours, limit=MAX_LINE_BYTES
            )
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-u", "-m", "openrlhf.rewards.workers", *words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # what it starts ends with it
            )
        try:
            reply = await self._ask("load", NO_SAMPLES, LOAD_TIMEOUT_S)
        except (EOFError, TimeoutError, ValueError) as error:
            raise ConfigError(
                f"{self.path}: the file {error} while it was imported.{self._log_hint}"
            ) from error
        _answer_of(reply)

    async def _ask(
        self, method: str, batch: RewardBatch, limit_s: float, flag: str = ""
    ) -> dict[str, Any]:
        """Return the reply to a batch; else end the process and raise EOFError, TimeoutError or
        ValueError.
        """
        assert self.process is not None, "it was started"
        token = secrets.token_hex(16)
        self._writer.write(pickle.dumps((token, method, batch)))
        reply = asyncio.ensure_future(self._reply(token))
        ended = asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait({reply, ended}, timeout=limit_s, return_when="FIRST_COMPLETED")
            if reply.done():
                return reply.result()
            if ended.done():
                code = ended.result()
                how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
                raise EOFError(f"ended its process ({how})")
            self.process.send_signal(DUMP_SIGNAL)  # its stack, to the log
            await asyncio.sleep(DUMP_S)
            raise TimeoutError(f"did not end in {limit_s:g} s{flag}")
        except BaseException:  # cancelled as well: the function still runs
            await self.kill()
            raise
        finally:
            reply.cancel()
            ended.cancel()

    async def _reply(self, token: str) -> dict[str, Any]:
        """Return the reply that has the token; wait for ever when the connection was closed."""
        found = await next_message(self._reader, token)
        if found is None:
            await asyncio.get_running_loop().create_future()
        return found or {}


def _answer_of(reply: dict[str, Any]) -> Any:
    """Return what a worker returned, or raise its error."""
    if "problems" in reply:
        raise ConfigError(reply["problems"]).in_user_code(reply["user_traceback"])
    if "error" in reply:
        raise RewardError(reply["error"]).in_user_code(reply["user_traceback"])
    return reply.get("answer")


def _rotate(path: Path) -> None:
    """Move what a large log holds to `<name>.1`; the worker, which appends, goes on in the empty
    file.
    """
    with suppress(OSError):  # a log is not worth a run
        if path.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)


def main(number: str, path: str, weights: str, memory_bytes: str, parent: str) -> None:
    """Load the functions when they are first asked; call what is asked for until the pool hangs
    up.
    """
    die_with_parent(int(parent))
    limit_memory(int(memory_bytes))
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    os.set_inheritable(int(number), False)  # noqa: FBT003 - it takes it by position only
    own_pid = os.getpid()
    connection = socket.socket(fileno=int(number))
    batches = connection.makefile("rb")
    functions: UserFunctions | None = None
    while True:
        try:
            token, method, batch = pickle.load(batches)  # from the parent
        except EOFError:
            return
        reply: dict[str, Any] = {}
        try:
            functions = functions or UserFunctions.load(path, json.loads(weights))
            if method != "load":
                reply = {"answer": getattr(functions, method)(batch)}
        except ConfigError as error:
            reply = {"problems": error.problems, "user_traceback": error.user_traceback}
        except RewardError as error:
            reply = {"error": str(error), "user_traceback": error.user_traceback}
            if isinstance(error.__cause__, MemoryError):
                reply |= {"error": f"{error} (--reward_memory_gib)", "is_full": True}
        if os.getpid() != own_pid:  # a copy that the function forked: it has no say
            os._exit(0)
        connection.settimeout(None)  # whatever default the user's code has set
        connection.sendall(marked_line(token, reply))


if __name__ == "__main__":
    main(*sys.argv[1:])
