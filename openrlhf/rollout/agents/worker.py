"""The process in which user code acts: its episodes, on one event loop.

It asks its parent for turns, and ends itself where user code holds the loop.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from openrlhf.engines.base import Completion, GenerationRequest
from openrlhf.errors import ConfigError, EngineError, OpenRLHFError
from openrlhf.rollout.agents.agent_file import EXECUTE_NAMES, AgentFile
from openrlhf.rollout.agents.engine import (
    CURRENT,
    AgentEngine,
    ResultQueue,
    TextCodec,
    TurnTaker,
    first_params,
    named_task,
)
from openrlhf.rollout.agents.episode import (
    AgentLimits,
    Episode,
    EpisodeRequest,
    EpisodeResult,
    result_of,
)
from openrlhf.utils.agent import AgentError, OpenAISession
from openrlhf.utils.tokenizer import Tokenizer
from openrlhf.utils.user_code import accepted, file_of, in_words

# Messages are pickled tuples of a name and its values.
# From the parent: episode REQUEST | cancel SAMPLE_ID | turn NUMBER (COMPLETION or error).
# To the parent: ready (None or error) | turn NUMBER SAMPLE_ID REQUEST | abort NUMBER |
#   result SAMPLE_ID (RESULT or error) | blocked SAMPLE_ID MESSAGE.
NUM_HEADER_BYTES = 4  # before a message: its length
MAX_THREADS = 256  # for plain methods of environments


@dataclass(frozen=True)
class AgentSetup:
    """What a worker is told before its first episode."""

    path: str  # of the agent file
    tokenizer: Tokenizer
    limits: AgentLimits
    vocab_size: int


class EpisodeTimeoutError(AgentError):
    """An episode was not done in time."""

    kind = "episode_timeout"


def framed(*message: object) -> bytes:
    """Return the bytes of a message."""
    data = pickle.dumps(message)
    return len(data).to_bytes(NUM_HEADER_BYTES, "big") + data


def engine_error(error: BaseException) -> EngineError:
    """Return an error that is not the user code's, as any process can read it."""
    return EngineError(str(error) if isinstance(error, OpenRLHFError) else in_words(error))


def look_at(task: asyncio.Future[object]) -> None:
    """Take the error of a task that nobody waits for, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def serve(connection: socket.socket, setup: AgentSetup) -> None:
    """Run episodes until the parent closes the connection; the main function of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    Worker(connection, setup).run()


class Worker:
    """The user's executor, and the episodes that it runs."""

    def __init__(self, connection: socket.socket, setup: AgentSetup) -> None:
        self.path = setup.path
        self.limits = setup.limits
        self._connection = connection
        self._sending = threading.Lock()
        self._turns: dict[int, Future[Completion]] = {}  # asked for, by number
        self._numbers = itertools.count()
        self._tasks: dict[str, asyncio.Task[EpisodeResult]] = {}  # by sample id
        self._taker = TurnTaker(self._ask, setup.limits, vocab_size=setup.vocab_size)
        self._codec = TextCodec(setup.tokenizer)
        self._server: Any = None
        self._engine = AgentEngine(self._taker, self._codec, self._open_session)
        self._context: dict[str, Any] = {
            "max_steps": setup.limits.max_steps,
            "max_length": setup.limits.max_length,
            "llm_engine": self._engine,
            "hf_tokenizer": setup.tokenizer,
            "result_queue": ResultQueue(),
        }
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(named_task)
        self._loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS))

    def run(self) -> None:
        """Make the executor, then run what the parent sends."""
        asyncio.set_event_loop(self._loop)
        threading.Thread(target=self._listen, name="parent", daemon=True).start()
        try:
            self._executor = self._loop.run_until_complete(self._make_executor())
        except ConfigError as error:
            self._send("ready", error)
            return
        context = dict.fromkeys(EXECUTE_NAMES) | self._context
        asked = {name: context[name] for name in EXECUTE_NAMES}
        self._extras = accepted(self._executor.execute, asked)
        self._send("ready", None)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        while True:
            # User code may call exit(): the loop tells its task and stops; there is more to run.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    async def _make_executor(self) -> Any:
        file = AgentFile(self.path)
        return file.make_executor(self._context, step_timeout_s=self.limits.step_timeout_s)

    def _open_session(
        self, episode: Episode, params: Mapping[str, Any], *, ignores_client_sampling: bool
    ) -> OpenAISession:
        if self._server is None:  # only where an agent asks for one
            from openrlhf.rollout.agents.openai_server import OpenAIServer  # noqa: PLC0415

            tokenizer = copy.deepcopy(self._codec.tokenizer)  # the server has its own thread
            self._server = OpenAIServer(self._taker, TextCodec(tokenizer))
        session: OpenAISession = self._server.open_session(
            episode, params, ignores_client_sampling=ignores_client_sampling
        )
        return session

    async def _run(self, request: EpisodeRequest) -> EpisodeResult:
        began_s = time.monotonic()
        episode = Episode(request, vocab_size=self._taker.vocab_size)
        if self._engine.outside is None:
            named = replace(request, sample_id=f"{request.sample_id}/outside")
            self._engine.outside = Episode(named, vocab_size=self._taker.vocab_size)
        outside = self._engine.outside
        CURRENT.set(episode)
        acting = asyncio.ensure_future(self._execute(request))
        try:
            await asyncio.wait({acting}, timeout=self.limits.episode_timeout_s)
            episode.close()
            result = result_of(episode, self._answer_of(acting), outside, self.path)
            return replace(result, seconds=time.monotonic() - began_s)
        finally:
            episode.close()
            acting.cancel()
            acting.add_done_callback(look_at)
            if len(self._tasks) == 1:  # nobody is left for whom it could be
                outside.close()
                self._engine.outside = None

    async def _execute(self, request: EpisodeRequest) -> object:
        params = first_params(request.sampling, self.limits.max_length)
        answer: object = await self._executor.execute(
            request.prompt_text, request.label, params, **self._extras
        )
        return answer

    def _answer_of(self, acting: asyncio.Future[object]) -> object:
        """Return what an episode returned, or the error that ended it."""
        if not acting.done():
            limit_s = self.limits.episode_timeout_s
            return EpisodeTimeoutError(f"the episode was not done after {limit_s:g} s")
        if acting.cancelled():
            return AgentError("the episode was cancelled by its own code")
        return acting.exception() or acting.result()

    def _start(self, request: EpisodeRequest) -> None:
        task = self._loop.create_task(self._run(request))
        self._tasks[request.sample_id] = task
        task.add_done_callback(partial(self._done, request.sample_id))

    def _cancel(self, sample_id: str) -> None:
        if sample_id in self._tasks:
            self._tasks[sample_id].cancel()

    def _done(self, sample_id: str, task: asyncio.Task[EpisodeResult]) -> None:
        del self._tasks[sample_id]
        if not task.cancelled():  # else nobody wants the result
            error = task.exception()
            self._send("result", sample_id, engine_error(error) if error else task.result())

    def _ask(self, sample_id: str, request: GenerationRequest) -> Future[Completion]:
        """Ask the engine for a turn of an episode; cancelling the future stops it."""
        number, turn = next(self._numbers), Future[Completion]()
        self._turns[number] = turn
        turn.add_done_callback(partial(self._forget, number))
        self._send("turn", number, sample_id, request)
        return turn

    def _forget(self, number: int, turn: Future[Completion]) -> None:
        del self._turns[number]
        if turn.cancelled():
            self._send("abort", number)

    def _send(self, *message: object) -> None:
        with self._sending:
            self._connection.sendall(framed(*message))

    def _listen(self) -> None:
        """Take what the parent sends; end the process when it has gone."""
        with self._connection.makefile("rb") as file:
            while header := file.read(NUM_HEADER_BYTES):
                name, *values = pickle.loads(file.read(int.from_bytes(header, "big")))
                if name == "turn":
                    self._answer_turn(*values)
                else:
                    take = self._start if name == "episode" else self._cancel
                    self._loop.call_soon_threadsafe(take, *values)
        os._exit(0)

    def _answer_turn(self, number: int, answer: Completion | OpenRLHFError) -> None:
        turn = self._turns.get(number)
        if turn is not None and turn.set_running_or_notify_cancel():
            if isinstance(answer, Completion):
                turn.set_result(answer)
            else:
                turn.set_exception(answer)

    def _watch(self) -> None:
        """End the process when user code holds the loop for longer than a step may take."""
        allowed_s = self.limits.step_timeout_s
        while True:
            beat = threading.Event()
            self._loop.call_soon_threadsafe(beat.set)
            if not beat.wait(allowed_s):
                task = asyncio.current_task(self._loop)
                message = (
                    f"{self._place() or self.path}: blocked the event loop for over "
                    f"{allowed_s:g} s. Use await, asyncio.to_thread or plain functions."
                )
                self._send("blocked", "" if task is None else task.get_name(), message)
                os._exit(1)
            time.sleep(min(allowed_s / 4, 1.0))

    def _place(self) -> str | None:
        """Return `file:line` of the deepest place in the user's file that the loop is at."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        file = file_of(self.path)
        while frame is not None:
            if frame.f_code.co_filename == file:
                return f"{self.path}:{frame.f_lineno}"
            frame = frame.f_back
        return None
