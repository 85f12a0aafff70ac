"""Runs episodes in a worker process, as awaitables on the controller's event loop.

User code that blocks or ends its process costs its own episode: the process is replaced, and the
other episodes begin again.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import socket

from openrlhf.engines.base import Completion, GenerationRequest
from openrlhf.errors import ConfigError
from openrlhf.rollout.agents.channel import Channel
from openrlhf.rollout.agents.episode import AgentSetup, EpisodeRequest, EpisodeResult
from openrlhf.rollout.agents.worker import serve
from openrlhf.rollout.engine_pool import Sampler
from openrlhf.utils.agent import AgentError

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
        self.culprit = ""  # sample id of the episode that blocked it
        self.last_words = ""  # why it ended
        self._sampler = sampler
        self._channel = Channel(self._serve)
        self._acting: set[str] = set()  # sample ids
        self._turns: dict[asyncio.Future[object], str] = {}  # that are sampled -> sample id

    async def start(self) -> None:
        """Load the agent file and make its executor; raises ConfigError."""
        ours, theirs = socket.socketpair()
        self._process = CONTEXT.Process(target=serve, args=(theirs, self.setup), name="agents")
        await asyncio.to_thread(self._process.start)
        atexit.register(self.kill)
        theirs.close()
        await self._channel.open(ours)
        self.ending = asyncio.ensure_future(self._end())
        try:
            await asyncio.wait_for(self._channel.call("start"), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            self.kill()
            raise ConfigError(
                f"{self.setup.path}: AgentExecutor was not made in {START_TIMEOUT_S:g} s. "
                "Do less in its __init__."
            ) from None
        except ConnectionError:
            await self.ending
            raise ConfigError(self.last_words) from None
        except ConfigError:
            self.kill()
            await self.ending
            raise

    async def act(self, request: EpisodeRequest) -> EpisodeResult | None:
        """Return the result of an episode; None when the process ended under it.

        Raises AgentError, EngineError.
        """
        sample_id, path = request.sample_id, self.setup.path
        self._acting.add(sample_id)
        limit_s = self.setup.episode_timeout_s + GRACE_S
        try:
            result: EpisodeResult = await asyncio.wait_for(
                self._channel.call("run", request), limit_s
            )
            return result
        except asyncio.TimeoutError:  # it could not even end the episode itself
            self.kill()
            raise AgentError(f"{path}: its process hangs", "episode_timeout") from None
        except ConnectionError:
            await asyncio.shield(self.ending)
            if sample_id == self.culprit:
                raise AgentError(self.last_words, "blocked") from None
            return None
        finally:
            self._acting.remove(sample_id)
            # Turns of no episode that is known may be anybody's, as long as there is one.
            over = [t for t, owner in self._turns.items() if owner == sample_id or not self._acting]
            for turn in over:
                turn.cancel()
            if over:  # an engine cannot sleep, and its model not be trained, meanwhile
                await asyncio.wait(over)

    def kill(self) -> None:
        """End the process; episodes that it runs return None."""
        atexit.unregister(self.kill)
        if self._process.is_alive():
            self._process.kill()

    async def _end(self) -> None:
        """Serve the process until it has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        listening = asyncio.ensure_future(self._channel.listen())
        listening.add_done_callback(lambda done: self.kill())
        await ended.wait()
        loop.remove_reader(self._process.sentinel)
        self.is_over = True
        # Its last words may be on their way; a child of it may hold the connection open.
        await asyncio.wait({listening}, timeout=LAST_WORDS_S)
        listening.cancel()
        self._process.join()
        code = self._process.exitcode
        self.last_words = (
            self.last_words or f"{self.setup.path}: its process ended with exit code {code}"
        )

    async def _serve(self, name: str, sample_id: str, value: object) -> Completion | None:
        if isinstance(value, GenerationRequest):
            turn = asyncio.ensure_future(self._sampler.sample(value))
            self._turns[turn] = sample_id
            try:
                return (await turn)[0]
            finally:
                del self._turns[turn]
        self.culprit, self.last_words = sample_id, str(value)
        return None


class AgentWorker:
    """Runs episodes in one process at a time, on one engine, whose cache knows their past turns."""

    def __init__(self, setup: AgentSetup, sampler: Sampler) -> None:
        self.setup = setup
        self.sampler = sampler
        self.num_episodes = 0  # that it was given and has not ended
        self._room = asyncio.Semaphore(setup.num_tasks)
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
        """Return the result of an episode; raises AgentError, EngineError.

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
        raise AgentError(process.last_words, "blocked" if process.culprit else "exception")

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            await self._process.ending
