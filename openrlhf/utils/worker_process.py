"""Processes in which user code runs, and the calls between such a worker and this process.

A model's code may have run in a worker. So what it sends is JSON of limited size, which is never
unpickled, behind a line with a token: what has none, as code or its children may write to any
descriptor, is no message. The other way is trusted, and pickled.
"""

import asyncio
import atexit
import base64
import itertools
import json
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any

import psutil

from openrlhf.errors import ConfigError, EngineError, OpenRLHFError, RewardError
from openrlhf.utils.agent import AgentError
from openrlhf.utils.threads import LoopThread
from openrlhf.utils.user_code import in_words

MAX_BYTES = 2**28  # of a message of a worker
START_TIMEOUT_S = 600.0  # for what a file does when it is imported, such as loading a model
LATE_SIGNAL = signal.SIGUSR1  # to a worker at its limit, which then says where it is
LAST_WORDS_S = 1.0  # for that, and from the end of a worker to the end of what it sent
READ_S = 0.1  # for a response that has come while this loop was held
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # exit codes

Message = tuple[str, int, Any]  # kind, number of the call, arguments or result or error
Serve = Callable[..., Coroutine[Any, Any, Any]] | None  # None: calls end the other process
_STARTING = threading.Lock()


class Channel:
    """One end of the socket between both processes; used on one event loop.

    A message is a "call", the "cancel" of a call, or its "result" or "error".
    """

    def __init__(
        self, token: str, serve: Serve, encode: Callable[..., bytes], decode: Callable[..., Message]
    ) -> None:
        """`serve` is given the arguments of each call of the other end."""
        self._token, self._serve = token.encode(), serve
        self._encode, self._decode = encode, decode
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}  # of calls to the other end
        self._served: dict[int, asyncio.Future[Any]] = {}  # calls of the other end

    async def open(self, connection: socket.socket) -> None:
        """Get ready to call; `listen` takes the responses."""
        self._reader, self._writer = await asyncio.open_unix_connection(
            sock=connection, limit=MAX_BYTES
        )

    async def call(self, *arguments: Any) -> Any:
        """Return the response of the other end, or raise its error; ConnectionError once it has
        ended. Cancelling this cancels the work of the other end.
        """
        if self._writer.is_closing():
            raise ConnectionError
        number = next(self._numbers)
        response = self._pending[number] = asyncio.get_running_loop().create_future()
        self._send("call", number, arguments)
        try:
            return await response
        finally:
            del self._pending[number]
            if response.cancelled():
                self._send("cancel", number, None)

    async def listen(self) -> None:
        """Serve calls and take responses until the other end closes, or sends something with the
        token that is no message; then end what is under way.
        """
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):  # the process was killed
                while (line := await self._reader.readline()).endswith(b"\n"):
                    if line.startswith(self._token):
                        size = int(line.removeprefix(self._token))
                        if size > MAX_BYTES and self._decode is from_json:
                            raise ValueError("too long")
                        self._take(*self._decode(await self._reader.readexactly(size)))
        finally:
            self._writer.close()
            for task in self._served.values():
                task.cancel()
            for response in self._pending.values():
                if not response.done():
                    response.set_exception(ConnectionError())

    def _take(self, kind: str, number: int, value: Any) -> None:
        if kind == "call":
            assert self._serve is not None, "there is nothing to call"
            task = self._served[number] = asyncio.ensure_future(self._serve(*value))
            task.add_done_callback(partial(self._respond, number))
        elif kind == "cancel" and number in self._served:
            self._served[number].cancel()
        elif number in self._pending and not (response := self._pending[number]).done():
            (response.set_exception if kind == "error" else response.set_result)(value)

    def _respond(self, number: int, task: asyncio.Future[Any]) -> None:
        self._served.pop(number, None)
        error = AgentError("the episode has ended") if task.cancelled() else task.exception()
        if error is None:
            self._send("result", number, task.result())
        elif isinstance(error, (ConfigError, EngineError, RewardError)):
            self._send("error", number, error)
        else:
            self._send("error", number, EngineError(in_words(error)))

    def _send(self, *message: Any) -> None:
        if not self._writer.is_closing():  # a line of its own, wherever somebody else may have been
            data = self._encode(message)
            self._writer.writelines([b"\n%s%d\n" % (self._token, len(data)), data])


def to_json(message: Message) -> bytes:
    """Return a message of a worker, with dataclasses and errors as objects, bytes as base64."""
    return json.dumps(message, default=_fields).encode()


def from_json(data: bytes) -> Message:
    """Return a message of a worker; some error is raised for anything else."""
    kind, number, value = json.loads(data)
    return kind, number, _error_of(**value) if kind == "error" else value


def _fields(value: Any) -> dict[str, Any] | str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if not isinstance(value, OpenRLHFError):
        return vars(value)
    kind, trace = getattr(value, "kind", ""), value.user_traceback
    return {"name": type(value).__name__, "message": str(value), "kind": kind, "trace": trace}


def _error_of(name: str, message: str, kind: str, trace: str) -> OpenRLHFError:
    known: dict[str, Any] = {"ConfigError": ConfigError, "RewardError": RewardError}
    error = AgentError(str(message), str(kind)) if kind else known.get(name, EngineError)(message)
    return error.in_user_code(str(trace))


class WorkerProcess:
    """A running worker, as the process that started it sees it; used on one event loop."""

    def __init__(self, process: multiprocessing.process.BaseProcess, channel: Channel) -> None:
        """Use `start`, or the process is no worker."""
        self._process, self._channel = process, channel
        self.pid = process.pid or 0
        self.is_over = False
        self.was_killed = False  # from outside: by somebody, or for want of memory on this machine
        self._end_error: OSError | None = None  # how it ended
        self.ended = asyncio.ensure_future(self._end())
        atexit.register(self.kill)

    @classmethod
    async def start(
        cls,
        target: Callable[..., None],
        path: str,
        *arguments: Any,
        serve: Serve = None,
        method: str = "spawn",
        hint: str = "",
    ) -> "WorkerProcess":
        """Start a process that runs `target(connection, token, path, *arguments)`, which calls
        `attend`, and call "start" there; raise ConfigError, with `hint`, if that fails.

        `path` is that of the user's file. `serve` is given the arguments of each call of the
        process, which without it is ended for one. `method` is one of multiprocessing.
        """
        ours, theirs = socket.socketpair()
        token = secrets.token_hex(16)
        context: Any = multiprocessing.get_context(method)
        process = context.Process(target=target, args=(theirs, token, path, *arguments))
        with theirs, _undisturbed():
            process.start()
        channel = Channel(token, serve, pickle.dumps, from_json)
        await channel.open(ours)
        worker = cls(process, channel)
        try:
            await worker.call("start", timeout_s=START_TIMEOUT_S)
        except BaseException as error:
            worker.kill()
            if not isinstance(error, OSError):
                raise
            message = f"{path}: the file {error} while it was imported.{hint}"
            raise ConfigError(message) from error
        return worker

    async def call(self, *arguments: Any, timeout_s: float) -> Any:
        """Return the worker's response, or raise its error; ConnectionError once it has ended,
        TimeoutError when it was ended at a limit, of this call or another. Cancelling this cancels
        the work of the worker.
        """
        response = asyncio.ensure_future(self._channel.call(*arguments))
        try:
            for limit_s in (timeout_s, READ_S):
                await asyncio.wait({response}, timeout=limit_s)
            if not response.done():
                with suppress(ProcessLookupError):
                    os.kill(self.pid, LATE_SIGNAL)
                await asyncio.wait({response}, timeout=LAST_WORDS_S)
            if not response.done():
                self.kill(TimeoutError(f"did not end in {timeout_s:g} s"))
            return await response
        except ConnectionError as error:
            await asyncio.shield(self.ended)
            raise self._end_error or error from None
        finally:
            response.cancel()

    @property
    def is_stopped(self) -> bool:
        """Return True if the process rests until it is told to go on (SIGSTOP)."""
        with suppress(psutil.NoSuchProcess):
            return not self.is_over and is_stopped(psutil.Process(self.pid))
        return False

    def kill(self, why: OSError | None = None) -> None:
        """End the process with all that it has started; its calls raise `why`."""
        self.is_over = True
        self._end_error = self._end_error or why
        if not self.ended.done():  # or another process may have its number
            kill_tree(self.pid)
            self._process.kill()  # one that leads no session yet

    async def close(self) -> None:
        """End the process and wait for its end."""
        self.kill()
        await asyncio.wait({self.ended})

    async def _end(self) -> None:
        """Serve the process until it has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:  # a fork server has waited for it already
            handle = os.dup(self._process.sentinel)
        loop.add_reader(handle, ended.set)
        listening = asyncio.ensure_future(self._channel.listen())
        listening.add_done_callback(lambda _: self.kill())
        try:
            await ended.wait()
            self.is_over = True
            # Its last words may be on their way; a child of it may hold the connection open.
            await asyncio.wait({listening}, timeout=LAST_WORDS_S)
        finally:
            loop.remove_reader(handle)
            os.close(handle)
            self.kill()  # what it has left in its session
            atexit.unregister(self.kill)
            self._process.join()
            code = self._process.exitcode or 0
            how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            why = f"ended its process ({how})"
            if listening.done() and not listening.cancelled() and listening.exception():
                why = f"sent half a message, or one of over {MAX_BYTES // 2**20} MiB"
            else:
                self.was_killed = self._end_error is None and code in KILLED
            listening.cancel()
            self._end_error = self._end_error or ConnectionError(why)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Have a process that is started here get no Ctrl-C, and not import the program's main file: a
    script that trains without a main guard would train a second time in it.
    """
    with _STARTING:
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            sys.modules["__main__"] = main


def attend(connection: socket.socket, token: str, serve: Serve) -> tuple[LoopThread, Channel]:
    """Serve the calls of the process that started this one, on the event loop of a thread, until it
    has gone; then end this one, with all that it has started.
    """
    os.setsid()  # what it starts ends with it, and Ctrl-C is the parent's
    signal.sigtimedwait([signal.SIGINT], 0)  # one that came before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    connection.set_inheritable(False)
    thread, channel = LoopThread("parent"), Channel(token, serve, to_json, pickle.loads)
    thread.run(channel.open(connection))
    listening = asyncio.run_coroutine_threadsafe(channel.listen(), thread.loop)
    listening.add_done_callback(lambda _: kill_tree(os.getpid()))
    return thread, channel


def is_stopped(process: psutil.Process) -> bool:
    """Return True for a process that rests until it is told to go on (SIGSTOP)."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def ending_children() -> Iterator[None]:
    """End the processes that the block starts, as user code may when it is imported."""
    before = set(psutil.Process().children())
    try:
        yield
    finally:
        for child in set(psutil.Process().children()) - before:
            end_tree(child)


def end_tree(process: psutil.Process) -> None:
    """Kill a process that may have ended, with all that it has started."""
    kill_tree(process.pid)
    with suppress(psutil.Error):
        process.kill()


def kill_tree(pid: int) -> None:
    """Kill the children of a process, wherever they went, and the session that it leads."""
    children: list[psutil.Process] = []
    with suppress(psutil.Error):
        children = psutil.Process(pid).children(recursive=True)
    for child in children:
        with suppress(psutil.Error):
            child.kill()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
