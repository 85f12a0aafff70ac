"""Runs episodes in a worker process, as awaitables on the controller's event loop.

User code that blocks or ends its process costs its own episode: the process is replaced, and the
other episodes begin again.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import pickle
import socket
from collections import defaultdict
from contextlib import suppress
from functools import partial
from typing import Any

from openrlhf.engines.base import Completion
from openrlhf.errors import ConfigError, OpenRLHFError
from openrlhf.rollout.agents.episode import (
    EpisodeOverError,
    EpisodeRequest,
    EpisodeResult,
    failed,
)
from openrlhf.rollout.agents.worker import (
    NUM_HEADER_BYTES,
    AgentSetup,
    engine_error,
    framed,
    serve,
)
from openrlhf.rollout.engine_pool import Sampler

Outcome = EpisodeResult | OpenRLHFError | None  # None: the process ended first

MAX_RESTARTS = 3  # of an episode whose process ended
START_TIMEOUT_S = 600.0  # of a user's executor
LAST_WORDS_S = 1.0  # from the end of a process to the end of what it sent
GRACE_S = 60.0  # over the deadline of an episode, until its process is killed

CONTEXT = multiprocessing.get_context("forkserver")  # engines have threads, which a fork loses
CONTEXT.set_forkserver_preload(["openrlhf.rollout.agents.worker", "transformers"])


class AgentProcess:
    """One worker process, from its start to its end."""

    def __init__(self, setup: AgentSetup, sampler: Sampler) -> None:
        self.setup = setup
        self.is_over = False
        self.last_words = ""  # why it ended
        self._sampler = sampler
        self.culprit = ""  # sample id of the episode that blocked it
        self._acting: dict[str, asyncio.Future[Outcome]] = {}  # by sample id
        self._turns: dict[int, asyncio.Future[list[Completion]]] = {}  # that are sampled
        self._turns_of: dict[str, set[int]] = defaultdict(set)  # by sample id

    async def start(self) -> None:
        """Load the agent file and make its executor; raises ConfigError."""
        ours, theirs = socket.socketpair()
        self._process = CONTEXT.Process(target=serve, args=(theirs, self.setup), name="agents")
        await asyncio.to_thread(self._process.start)
        atexit.register(self.kill)
        theirs.close()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._ready: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.listening = asyncio.ensure_future(self._listen())
        try:
            error = await asyncio.wait_for(self._ready, START_TIMEOUT_S)
        except asyncio.TimeoutError:
            self.kill()
            error = ConfigError(
                f"{self.setup.path}: AgentExecutor was not made in {START_TIMEOUT_S:g} s. "
                "Do less in its __init__."
            )
        if isinstance(error, OpenRLHFError):
            self.kill()
            raise error

    async def act(self, request: EpisodeRequest) -> EpisodeResult | None:
        """Return the result of an episode; None when the process ended under it."""
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._acting[request.sample_id] = outcome
        self._send("episode", request)
        limit_s = self.setup.limits.episode_timeout_s + GRACE_S
        try:
            result = await asyncio.wait_for(asyncio.shield(outcome), limit_s)
        except asyncio.TimeoutError:  # it could not even end the episode itself
            self.kill()
            return failed(request, "episode_timeout", f"{self.setup.path}: its process hangs")
        finally:
            del self._acting[request.sample_id]
            # Turns of no episode that is known may be anybody's, as long as there is one.
            over = self._turns_of.get(request.sample_id, ()) if self._acting else self._turns
            turns = [self._turns[number] for number in over]
            for turn in turns:
                turn.cancel()
            if not outcome.done():
                self._send("cancel", request.sample_id)
            if turns:  # an engine cannot sleep, and its model not be trained, meanwhile
                await asyncio.wait(turns)
        if isinstance(result, OpenRLHFError):
            raise result
        if result is None and request.sample_id == self.culprit:
            return failed(request, "blocked", self.last_words)
        return result

    def kill(self) -> None:
        """End the process; episodes that it runs return None."""
        atexit.unregister(self.kill)
        if self._process.is_alive():
            self._process.kill()

    def _send(self, *message: object) -> None:
        if not self.is_over:
            self._writer.write(framed(*message))

    async def _listen(self) -> None:
        """Take what the process sends; return when it has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        taking = asyncio.ensure_future(self._take_all())
        taking.add_done_callback(lambda done: self.kill())
        await ended.wait()
        loop.remove_reader(self._process.sentinel)
        # Its last words may be on their way; a child of it may hold the connection open.
        await asyncio.wait({taking}, timeout=LAST_WORDS_S)
        taking.cancel()
        self.is_over = True
        self._writer.close()
        self._process.join()
        if not self.last_words:
            code = self._process.exitcode
            self.last_words = f"{self.setup.path}: its process ended with exit code {code}"
        if not self._ready.done():
            self._ready.set_result(ConfigError(self.last_words))
        for turn in self._turns.copy().values():
            turn.cancel()
        for outcome in self._acting.values():
            if not outcome.done():
                outcome.set_result(None)

    async def _take_all(self) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                header = await self._reader.readexactly(NUM_HEADER_BYTES)
                size = int.from_bytes(header, "big")
                self._take(*pickle.loads(await self._reader.readexactly(size)))

    def _take(self, name: str, *values: Any) -> None:
        if name == "turn":
            number, sample_id, request = values
            turn = asyncio.ensure_future(self._sampler.sample(request))
            self._turns[number] = turn
            self._turns_of[sample_id].add(number)
            turn.add_done_callback(partial(self._answer, number, sample_id))
        elif name == "abort" and values[0] in self._turns:
            self._turns[values[0]].cancel()
        elif name == "result" and values[0] in self._acting:
            self._acting[values[0]].set_result(values[1])
        elif name == "blocked":
            self.culprit, self.last_words = values
        elif name == "ready":
            self._ready.set_result(values[0])

    def _answer(self, number: int, sample_id: str, turn: asyncio.Future[list[Completion]]) -> None:
        del self._turns[number]
        self._turns_of[sample_id].discard(number)
        if turn.cancelled():
            self._send("turn", number, EpisodeOverError(f"episode {sample_id} has ended"))
        else:
            error = turn.exception()
            self._send("turn", number, engine_error(error) if error else turn.result()[0])
        if not self._turns_of[sample_id]:
            del self._turns_of[sample_id]


class AgentWorker:
    """Runs episodes in one process at a time, on one engine, whose cache knows their past turns."""

    def __init__(self, setup: AgentSetup, sampler: Sampler) -> None:
        self.setup = setup
        self.sampler = sampler
        self.num_episodes = 0  # that it was given and has not ended
        self._room = asyncio.Semaphore(setup.limits.num_tasks)
        self._starting = asyncio.Lock()
        self._process: AgentProcess | None = None

    async def process(self) -> AgentProcess:
        """Return the process, a new one where the last has ended; raises ConfigError."""
        async with self._starting:
            if self._process is None or self._process.is_over:
                self._process = AgentProcess(self.setup, self.sampler)
                await self._process.start()
            return self._process

    async def run(self, request: EpisodeRequest) -> EpisodeResult:
        """Run an episode and return its result; what fails in it is a value.

        Raises ConfigError where the executor cannot be made again.
        """
        self.num_episodes += 1
        try:
            async with self._room:
                for _ in range(1 + MAX_RESTARTS):
                    process = await self.process()
                    result = await process.act(request)
                    if result is not None:
                        return result
        finally:
            self.num_episodes -= 1
        kind = "blocked" if process.culprit else "exception"
        return failed(request, kind, process.last_words)

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            await self._process.listening
