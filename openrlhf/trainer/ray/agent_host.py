"""Where episodes run: in the process of a vLLM actor beside its engine, or in this one.

`LLMRayActor` inherits from `AgentHost`; the controller sees it as a `RayEpisodeHost`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from openrlhf.config.ppo import PPOConfig
from openrlhf.engines.base import RolloutEngine
from openrlhf.engines.request_gatherer import AnswersRequests
from openrlhf.errors import EngineError
from openrlhf.trainer.ppo_utils.agent_file import AgentFile
from openrlhf.trainer.ppo_utils.agent_generator import AgentSamplesGenerator, EpisodeHost
from openrlhf.trainer.ppo_utils.agent_runner import EpisodeRunner
from openrlhf.trainer.ppo_utils.agent_trace import AgentLimits, EpisodeRequest, EpisodeResult
from openrlhf.trainer.ppo_utils.scoring import FailurePolicy
from openrlhf.trainer.ray.launcher import CALL_TIMEOUT_S, get
from openrlhf.utils.tokenizer import Tokenizer


@dataclass(frozen=True)
class AgentSetup:
    """What a host is told before its first episode."""

    path: str  # of the agent file, there on every node
    tokenizer: Tokenizer
    limits: AgentLimits
    vocab_size: int

    def make_runner(self, engine: Any) -> EpisodeRunner:
        """A runner on an engine; raises ConfigError for a file that cannot act."""
        return EpisodeRunner(
            AgentFile(self.path), engine, self.tokenizer, self.limits, vocab_size=self.vocab_size
        )


class AgentHost:
    """Adds episodes to an engine; waits are short, so that few threads of an actor are held."""

    _runner: EpisodeRunner | None = None

    def start_agents(self, setup: AgentSetup) -> None:
        """Load the agent file and make its executor."""
        self._runner = setup.make_runner(self)

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
        return [setup.make_runner(generator)]
    return [
        engine.episode_host(setup)
        if isinstance(engine, HostsEpisodes)
        else setup.make_runner(engine)
        for engine in engines
    ]
