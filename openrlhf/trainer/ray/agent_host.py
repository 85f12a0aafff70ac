"""Where episodes run: in the process of a vLLM actor beside its engine, or in this one.

`LLMRayActor` inherits from `AgentHost`; the controller sees it as a `RayEpisodeHost`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from openrlhf.config.ppo import PPOConfig
from openrlhf.engines.base import Completion, GenerationRequest, RolloutEngine
from openrlhf.engines.request_desk import AbortsRequests
from openrlhf.engines.request_gatherer import AnswersRequests, taking_requests
from openrlhf.errors import EngineError
from openrlhf.rollout.agents.episode import AgentLimits, EpisodeRequest, EpisodeResult
from openrlhf.rollout.agents.runner import AgentWorker
from openrlhf.rollout.agents.worker import AgentSetup
from openrlhf.trainer.ppo_utils.agent_generator import AgentSamplesGenerator, EpisodeHost
from openrlhf.trainer.ppo_utils.scoring import FailurePolicy
from openrlhf.trainer.ray.launcher import CALL_TIMEOUT_S, get
from openrlhf.utils.mailboxes import Mailboxes
from openrlhf.utils.tokenizer import Tokenizer


class EpisodeRunner:
    """Episodes of one engine for callers in other threads."""

    def __init__(self, setup: AgentSetup, engine: Any) -> None:
        """Start the worker; raises ConfigError for a file that cannot act."""
        self.limits = setup.limits
        self._engine = taking_requests(engine)
        self._pending: set[Future[list[Completion]]] = set()
        self._running: dict[str, set[Future[EpisodeResult]]] = {}  # by owner
        self._settled: Mailboxes[EpisodeResult] = Mailboxes()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
        self._worker = AgentWorker(setup, self._generate)
        asyncio.run_coroutine_threadsafe(self._worker.process(), self._loop).result()

    def submit_episodes(self, owner: str, requests: Sequence[EpisodeRequest]) -> None:
        """See EpisodeHost."""
        running = self._running.setdefault(owner, set())
        for request in requests:
            future = asyncio.run_coroutine_threadsafe(self._worker.run(request), self._loop)
            running.add(future)
            future.add_done_callback(partial(self._settle, owner))

    def finished_episodes(self, owner: str, wait_s: float) -> list[EpisodeResult]:
        """See EpisodeHost."""
        return self._settled.fetch(owner, wait_s)

    def abandon_episodes(self, owner: str) -> None:
        """See EpisodeHost."""
        for future in self._running.pop(owner, set()).copy():
            future.cancel()
        self._settled.close(owner)

    def drain(self, wait_s: float) -> None:
        """Wait for turns the engine still samples for episodes that were cut off."""
        wait(list(self._pending), timeout=wait_s)

    def close(self) -> None:
        """End the worker."""
        asyncio.run_coroutine_threadsafe(self._worker.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _settle(self, owner: str, future: Future[EpisodeResult]) -> None:
        self._running.get(owner, set()).discard(future)
        if not future.cancelled():
            self._settled.put(owner, future.exception() or future.result())

    async def _generate(self, request: GenerationRequest) -> Completion:
        (pending,) = self._engine.submit([request])
        self._pending.add(pending)
        pending.add_done_callback(self._pending.discard)
        try:
            (completion,) = await asyncio.shield(asyncio.wrap_future(pending))
        except asyncio.CancelledError:
            if isinstance(self._engine, AbortsRequests):
                self._engine.abort([pending])
            raise
        return completion


class AgentHost:
    """Adds episodes to an engine; waits are short, so that few threads of an actor are held."""

    _runner: EpisodeRunner | None = None

    def start_agents(self, setup: AgentSetup) -> None:
        """Load the agent file and make its executor."""
        self._runner = EpisodeRunner(setup, self)

    def submit_episodes(self, owner: str, requests: Sequence[EpisodeRequest]) -> None:
        """See EpisodeHost."""
        self._started().submit_episodes(owner, requests)

    def finished_episodes(self, owner: str, wait_s: float) -> list[EpisodeResult]:
        """See EpisodeHost."""
        return self._started().finished_episodes(owner, wait_s)

    def abandon_episodes(self, owner: str) -> None:
        """See EpisodeHost."""
        self._started().abandon_episodes(owner)

    def drain(self, wait_s: float) -> None:
        """See EpisodeHost."""
        self._started().drain(wait_s)

    def _started(self) -> EpisodeRunner:
        if self._runner is None:
            raise EngineError("the engine was given episodes before start_agents")
        return self._runner


@dataclass(frozen=True)
class RayEpisodeHost:
    """The episodes of an engine actor, seen from the controller."""

    handle: Any
    name: str

    def start_agents(self, setup: AgentSetup) -> None:
        """See AgentHost."""
        self._call(AgentHost.start_agents, setup)

    def submit_episodes(self, owner: str, requests: Sequence[EpisodeRequest]) -> None:
        """See EpisodeHost."""
        self._call(AgentHost.submit_episodes, owner, requests)

    def finished_episodes(self, owner: str, wait_s: float) -> list[EpisodeResult]:
        """See EpisodeHost."""
        results: list[EpisodeResult] = self._call(AgentHost.finished_episodes, owner, wait_s)
        return results

    def abandon_episodes(self, owner: str) -> None:
        """See EpisodeHost."""
        self._call(AgentHost.abandon_episodes, owner)

    def drain(self, wait_s: float) -> None:
        """See EpisodeHost."""
        self._call(AgentHost.drain, wait_s)

    def _call(self, method: Callable[..., Any], *args: object) -> Any:
        reference = getattr(self.handle, method.__name__).remote(*args)
        return get(reference, self.name, CALL_TIMEOUT_S)


@runtime_checkable
class HostsEpisodes(Protocol):
    """An engine elsewhere that runs episodes beside it."""

    def episode_host(self, setup: AgentSetup) -> EpisodeHost:
        """The engine's host, ready for episodes; raises ConfigError for a file that cannot act."""


def agent_samples_generator(
    config: PPOConfig,
    tokenizer: Tokenizer,
    engines: Sequence[RolloutEngine],
    generator: AnswersRequests,
    *,
    vocab_size: int,
) -> AgentSamplesGenerator:
    """What takes the place of the samples generator with `--agent_func_path`.

    Raises ConfigError for a file that cannot act.
    """
    assert config.train.agent_func_path is not None, "asked for with --agent_func_path only"
    setup = AgentSetup(config.train.agent_func_path, tokenizer, agent_limits(config), vocab_size)
    hosts = episode_hosts(engines, generator, setup)
    policy = FailurePolicy.of(config)
    return AgentSamplesGenerator(hosts, tokenizer, setup.limits, policy, generator)


def agent_limits(config: PPOConfig) -> AgentLimits:
    """How long and how many episodes of a run may be."""
    data = config.data
    return AgentLimits(
        max_length=data.max_len or data.prompt_max_len + config.rollout.max_new_tokens,
        num_tasks=config.train.async_num_tasks,
        step_timeout_s=config.reward.timeout_s,
        episode_timeout_s=config.train.agent_timeout_s,
    )


def episode_hosts(
    engines: Sequence[RolloutEngine], generator: AnswersRequests, setup: AgentSetup
) -> list[EpisodeHost]:
    """One host for each engine; without engines one in this process, on what generates there."""
    if not engines:
        return [EpisodeRunner(setup, generator)]
    return [
        engine.episode_host(setup)
        if isinstance(engine, HostsEpisodes)
        else EpisodeRunner(setup, engine)
        for engine in engines
    ]
