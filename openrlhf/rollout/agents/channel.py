"""Calls between this process and one that runs user code, in both directions, over one socket.

What the worker sends is JSON (`worker_process`); what it is sent is pickled, for it may trust this
process.
"""

import asyncio
import itertools
import pickle
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from openrlhf.errors import ConfigError, EngineError, OpenRLHFError
from openrlhf.utils.agent import AgentError
from openrlhf.utils.user_code import in_words
from openrlhf.utils.worker_process import MAX_LINE_BYTES, marked_line, next_message

NUM_HEADER_BYTES = 4  # before a pickled message: its length
Message = tuple[str, int, Any]


class Channel:
    """One end of a socket; used on one event loop.

    A message is (kind, number, value): a call with its arguments, an answer with result and error,
    or the number of a call to cancel.
    """

    def __init__(self, serve: Callable[..., Coroutine[Any, Any, Any]], token: str) -> None:
        """`serve` is given the arguments of each call of the other end; `token` marks the lines of
        the worker.
        """
        self._serve = serve
        self._token = token
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}  # of calls to the other end
        self._served: dict[int, asyncio.Future[Any]] = {}  # calls of the other end
        self.is_open = False

    async def open(self, connection: socket.socket) -> None:
        """Get ready to call; `listen` takes the answers."""
        self._reader, self._writer = await asyncio.open_unix_connection(
            sock=connection, limit=MAX_LINE_BYTES
        )
        self.is_open = True

    async def call(self, *arguments: Any) -> Any:
        """Return what the other end returns, or raise its error; ConnectionError once it has ended.

        Cancelling this cancels the work of the other end.
        """
        if not self.is_open:
            raise ConnectionError("the other process has ended")
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send("call", number, arguments)
        try:
            return await answer
        finally:
            del self._answers[number]
            if answer.cancelled():
                self._send("cancel", number, None)

    async def listen(self) -> None:
        """Serve calls and take answers until the other end closes; then end what is under way.

        Raise ValueError where the worker sends no message of ours.
        """
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while message := await self._receive():
                    self._take(*message)
        finally:
            self.is_open = False
            self._writer.close()
            for task in self._served.values():
                task.cancel()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the other process has ended"))

    def _take(self, kind: str, number: int, value: Any) -> None:
        if kind == "call":
            task = self._served[number] = asyncio.ensure_future(self._serve(*value))
            task.add_done_callback(partial(self._answer, number))
        elif kind == "cancel" and number in self._served:
            self._served[number].cancel()
        elif kind == "answer" and number in self._answers and not self._answers[number].done():
            result, error = value
            if error is None:
                self._answers[number].set_result(result)
            else:
                self._answers[number].set_exception(error)

    def _answer(self, number: int, task: asyncio.Future[Any]) -> None:
        del self._served[number]
        if task.cancelled():
            self._send("answer", number, (None, AgentError("the episode has ended")))
        elif error := task.exception():
            if not isinstance(error, (AgentError, ConfigError)):
                message = str(error) if isinstance(error, OpenRLHFError) else in_words(error)
                error = EngineError(message)
            self._send("answer", number, (None, error))
        else:
            self._send("answer", number, (task.result(), None))

    def _send(self, *message: Any) -> None:
        if self.is_open:
            self._writer.write(self._encoded(message))

    async def _receive(self) -> Message | None:
        size = int.from_bytes(await self._reader.readexactly(NUM_HEADER_BYTES), "big")
        message: Message = pickle.loads(await self._reader.readexactly(size))
        return message

    def _encoded(self, message: Message) -> bytes:
        """Return a message as a line of JSON, which has errors by their fields."""
        kind, number, value = message
        if kind == "answer":
            result, error = value
            value = result, error and _fields(error)
        return marked_line(self._token, {"kind": kind, "number": number, "value": value})


class ParentChannel(Channel):
    """The end of the process that started the worker."""

    async def _receive(self) -> Message | None:
        """Return the next message of the worker; raises ValueError for what is none."""
        found = await next_message(self._reader, self._token)
        if found is None:
            return None
        try:
            kind, number, value = str(found["kind"]), int(found["number"]), found["value"]
            value = None if value is None else tuple(value)
            if kind == "answer":
                result, error = value
                value = result, error and _error_of(**error)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("sent half a message") from error
        return kind, number, value

    def _encoded(self, message: Message) -> bytes:
        data = pickle.dumps(message)
        return len(data).to_bytes(NUM_HEADER_BYTES, "big") + data


def _fields(error: OpenRLHFError) -> dict[str, str]:
    kind = error.kind if isinstance(error, AgentError) else ""
    told = {"message": str(error), "kind": kind, "user_traceback": error.user_traceback}
    return {"type": type(error).__name__, **told}


def _error_of(type: str, message: str, kind: str, user_traceback: str) -> OpenRLHFError:
    if kind:
        return AgentError(message, kind).in_user_code(user_traceback)
    error = ConfigError(message) if type == "ConfigError" else EngineError(message)
    return error.in_user_code(user_traceback)
