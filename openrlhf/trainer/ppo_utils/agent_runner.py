"""Runs the episodes of one engine: many at once, each with deadlines, each with one outcome.

User code lives on an event loop of its own. A call that blocks that loop costs its own episode:
the loop is left behind and the others start again on a new one.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from openrlhf.engines.request_desk import TakesRequests
from openrlhf.engines.request_gatherer import AnswersRequests
from openrlhf.errors import ConfigError, EngineError, OpenRLHFError
from openrlhf.trainer.ppo_utils.agent_engine import (
    CURRENT,
    IS_LOOSE,
    AgentEngine,
    Episode,
    OpensSessions,
    ResultQueue,
    TextCodec,
    TurnTaker,
)
from openrlhf.trainer.ppo_utils.agent_file import AgentContext, AgentFile, execute_arguments
from openrlhf.trainer.ppo_utils.agent_loop import LoopThread
from openrlhf.trainer.ppo_utils.agent_outcome import failed, judge
from openrlhf.trainer.ppo_utils.agent_sampler import TurnSampler
from openrlhf.trainer.ppo_utils.agent_sampling import first_params
from openrlhf.trainer.ppo_utils.agent_trace import AgentLimits, EpisodeRequest, EpisodeResult
from openrlhf.trainer.ppo_utils.openai_server import OpenAIServer
from openrlhf.utils.mailboxes import Mailboxes
from openrlhf.utils.tokenizer import Tokenizer

MAX_RESTARTS = 3  # of an episode whose loop others blocked
START_TIMEOUT_S = 600.0  # of a user's executor
Settled = EpisodeResult | BaseException  # the latter a fault of ours, not of user code


@dataclass
class _Open:
    """An episode that has no outcome yet."""

    owner: str
    request: EpisodeRequest
    num_restarts: int = 0


class EpisodeRunner:
    """Takes episodes and gives back their results; all calls may come from any thread."""

    def __init__(
        self,
        agent: AgentFile,
        engine: TakesRequests | AnswersRequests,
        tokenizer: Tokenizer,
        limits: AgentLimits,
        *,
        vocab_size: int,
    ) -> None:
        """Make the user's executor; ConfigError when its `__init__` fails."""
        self.agent = agent
        self.limits = limits
        self._tokenizer = tokenizer
        self._taker = TurnTaker(TurnSampler(engine), limits, vocab_size=vocab_size)
        self._server: OpenAIServer | None = None
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._settled: Mailboxes[EpisodeResult] = Mailboxes()
        self._fault: OpenRLHFError | None = None  # why no further stage could be made
        self._is_closing = threading.Event()
        self._stage = self._new_stage()
        self._watcher = threading.Thread(target=self._watch, name="agent-watch", daemon=True)
        self._watcher.start()

    def submit_episodes(self, owner: str, requests: Sequence[EpisodeRequest]) -> None:
        """Take episodes; they begin as there is room, and their results are kept for `owner`."""
        with self._lock:
            if self._fault is not None:
                raise self._fault
            for request in requests:
                assert request.sample_id not in self._open, f"{request.sample_id} is running"
                self._open[request.sample_id] = _Open(owner, request)
                self._stage.start(request)

    def finished_episodes(self, owner: str, wait_s: float) -> list[EpisodeResult]:
        """Results since the last call; waits up to `wait_s` seconds for the first of them."""
        return self._settled.fetch(owner, wait_s)

    def abandon_episodes(self, owner: str) -> None:
        """Cut off what runs for an owner, and forget its results; a call that waits for them
        returns.
        """
        with self._lock:
            unwanted = [name for name, item in self._open.items() if item.owner == owner]
            for sample_id in unwanted:
                del self._open[sample_id]
            self._stage.cancel(unwanted)
        self._settled.close(owner)

    def drain(self, wait_s: float) -> None:
        """Wait for turns the engine still samples for episodes that were cut off."""
        self._taker.sampler.drain(wait_s)

    def close(self) -> None:
        """End all loops; episodes that are running have no outcome."""
        self._is_closing.set()
        self._watcher.join()
        self._stage.thread.close()
        if self._server is not None:
            self._server.close()

    def _new_stage(self) -> _Stage:
        # A loop that was left behind may still use its tokenizer: every one has its own.
        codec = TextCodec(copy.deepcopy(self._tokenizer))
        engine = AgentEngine(self._taker, codec, self._start_server)
        context = AgentContext(
            self.limits.max_steps, self.limits.max_length, engine, codec.tokenizer, ResultQueue()
        )
        return _Stage(self.agent, context, self.limits, self._taker, self._settle)

    def _start_server(self) -> OpensSessions:
        with self._lock:
            if self._server is None:
                codec = TextCodec(copy.deepcopy(self._tokenizer))
                self._server = OpenAIServer(self._taker, codec)
            return self._server

    def _settle(self, stage: _Stage, sample_id: str, settled: Settled) -> None:
        with self._lock:
            if stage is not self._stage or sample_id not in self._open:
                return  # the episode was begun again elsewhere, or has its outcome
            owner = self._open.pop(sample_id).owner
        self._settled.put(owner, settled)

    def _watch(self) -> None:
        """Replace the stage when user code holds it for longer than a step may take."""
        allowed_s = self.limits.step_timeout_s
        while not self._is_closing.wait(min(allowed_s / 4, 1.0)):
            if self._stage.thread.seconds_behind() > allowed_s:
                self._replace_stage()

    def _replace_stage(self) -> None:
        old = self._stage
        culprit, place = old.thread.current_task(), old.thread.place_in(self.agent.path)
        old.thread.abandon()
        try:
            new = self._new_stage()
        except OpenRLHFError as error:
            self._give_up(error)
            return
        message = (
            f"{place or self.agent.path}: blocked the event loop for over "
            f"{self.limits.step_timeout_s:g} s. Use await, asyncio.to_thread or plain functions."
        )
        # Nobody waits for these turns, and no weights could be sent under them.
        old.end_turns()
        with self._lock:
            self._stage = new
            for sample_id, item in list(self._open.items()):
                item.num_restarts += 1
                if sample_id == culprit or item.num_restarts > MAX_RESTARTS:
                    del self._open[sample_id]
                    self._settled.put(item.owner, failed(item.request, "blocked", message))
                else:
                    new.start(item.request)

    def _give_up(self, error: OpenRLHFError) -> None:
        """End everything that is open with an error that ends the run."""
        with self._lock:
            self._fault = error
            for owner in {item.owner for item in self._open.values()}:
                self._settled.put(owner, error)
            self._open.clear()
            self._is_closing.set()


class _Stage:
    """One event loop with the user's executor on it, and the episodes that run there."""

    def __init__(
        self,
        agent: AgentFile,
        context: AgentContext,
        limits: AgentLimits,
        taker: TurnTaker,
        settle: Callable[[_Stage, str, Settled], None],
    ) -> None:
        self.agent = agent
        self.context = context
        self.limits = limits
        self.taker = taker
        self.settle = settle
        self.thread = LoopThread("agents")
        self.thread.loop.set_task_factory(_named_task)
        self.executor: Any = self._started_executor()
        self._extras = execute_arguments(self.executor.execute, context)
        self._room = asyncio.Semaphore(limits.num_tasks)
        self._tasks: dict[str, asyncio.Task[EpisodeResult]] = {}
        self._episodes: set[Episode] = set()  # that are being acted out

    def start(self, request: EpisodeRequest) -> None:
        """Begin an episode as soon as there is room."""
        self.thread.call(self._start, request)

    def cancel(self, sample_ids: Sequence[str]) -> None:
        """Cut episodes off."""
        self.thread.call(self._cancel, sample_ids)

    def end_turns(self) -> None:
        """Have nothing sampled any more for what runs here, from any thread."""
        for episode in self._episodes.copy():
            self.taker.end(episode)

    def _started_executor(self) -> Any:
        try:
            return self.thread.run(self._make_executor(), START_TIMEOUT_S)
        except FutureTimeoutError as error:
            raise ConfigError(
                f"{self.agent.path}: AgentExecutor was not made in {START_TIMEOUT_S:g} s. "
                "Do less in its __init__."
            ) from error

    async def _make_executor(self) -> Any:
        return self.agent.make_executor(self.context, step_timeout_s=self.limits.step_timeout_s)

    def _start(self, request: EpisodeRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._run(request))
        self._tasks[request.sample_id] = task
        task.add_done_callback(partial(self._done, request.sample_id))

    def _cancel(self, sample_ids: Sequence[str]) -> None:
        for sample_id in sample_ids:
            if sample_id in self._tasks:
                self._tasks[sample_id].cancel()

    def _done(self, sample_id: str, task: asyncio.Task[EpisodeResult]) -> None:
        if self._tasks.get(sample_id) is task:
            del self._tasks[sample_id]
        if not task.cancelled():  # else the stage is being closed, or nobody wants the episode
            self.settle(self, sample_id, task.exception() or task.result())

    async def _run(self, request: EpisodeRequest) -> EpisodeResult:
        async with self._room:
            began_s = time.monotonic()
            episode = Episode(request, vocab_size=self.taker.vocab_size)
            outside = self._outside_of(request)
            self._episodes.add(episode)
            CURRENT.set(episode)
            acting = asyncio.ensure_future(self._execute(request))
            try:
                await asyncio.wait({acting}, timeout=self.limits.episode_timeout_s)
                return judge(episode, acting, self.agent.path, self.limits, began_s, outside)
            finally:
                self.taker.end(episode)
                self._episodes.discard(episode)
                if not acting.done():
                    acting.cancel()
                if not self._episodes:  # nobody is left for whom it could be
                    self.taker.end(outside)
                    self.context.llm_engine.outside = None

    def _outside_of(self, request: EpisodeRequest) -> Episode:
        """What takes down the turns of loose tasks, as long as there are episodes."""
        engine = self.context.llm_engine
        if engine.outside is None:
            named = replace(request, sample_id=f"{request.sample_id}/outside")
            engine.outside = Episode(named, vocab_size=self.taker.vocab_size)
        outside: Episode = engine.outside
        return outside

    async def _execute(self, request: EpisodeRequest) -> object:
        params = first_params(request.sampling, self.limits.max_length)
        answer: object = await self.executor.execute(
            request.prompt_text, request.label, params, **self._extras
        )
        return answer


def _named_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
) -> asyncio.Task[Any]:
    """A task that carries the name of the episode it belongs to, whoever makes it; one that no
    task makes, but a connection to a server, is loose.
    """
    context = contextvars.copy_context()
    if is_loose := asyncio.current_task(loop) is None and CURRENT.get(None) is not None:
        context.run(IS_LOOSE.set, is_loose)
    task: asyncio.Task[Any] = context.run(partial(asyncio.Task, coroutine, loop=loop, **options))
    episode = CURRENT.get(None)
    if episode is not None:
        task.set_name(episode.request.sample_id)
    return task


def raise_engine_failure(result: EpisodeResult) -> None:
    """Raise EngineError where not the agent but the engine failed."""
    if result.failure is not None and result.failure.kind == "engine":
        raise EngineError(f"sample {result.sample_id}: {result.failure.message}")
