"""The samples of a prompt by way of agents: each is an episode, which comes with its reward."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.engines.base import SamplingSettings
from openrlhf.errors import EngineError
from openrlhf.rollout.agents.episode import AgentSetup, EpisodeRequest, EpisodeResult, Segment
from openrlhf.rollout.agents.runner import AgentWorker
from openrlhf.rollout.engine_pool import Sampler
from openrlhf.rollout.rollout import RolloutRequest, Rollouts
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer
from openrlhf.utils.agent import AgentError
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.tokenizer import Tokenizer


class AgentEpisodes:
    """Acts out the samples of prompts, with one worker process for each engine."""

    in_rounds = False

    def __init__(
        self, setup: AgentSetup, samplers: Sequence[Sampler], policy: FailurePolicy
    ) -> None:
        self.tokenizer = setup.tokenizer
        self.policy = policy
        self.workers = [AgentWorker(setup, sampler) for sampler in samplers]

    async def start(self) -> None:
        """Start the workers; raises ConfigError for a file that cannot act."""
        await asyncio.gather(*(worker.process() for worker in self.workers))

    async def close(self) -> None:
        """End the workers."""
        await asyncio.gather(*(worker.close() for worker in self.workers))

    def describe(self) -> str:
        """Return how many episodes are under way."""
        return f"{sum(worker.num_episodes for worker in self.workers)} episodes are acted out"

    async def act(self, request: RolloutRequest) -> list[Rollout]:
        """Return the rollouts of all episodes; AgentError when one has failed after its retries."""
        prompt, metrics = request.prompt, request.metrics
        asked = episode_requests(prompt, request.sampling, request.name)
        episodes = [asyncio.ensure_future(self.run(one, metrics)) for one in asked]
        try:
            results = await asyncio.gather(*episodes)
        except AgentError as error:
            raise AgentError(f"row {prompt.row_id + 1}: {error.kind}: {error}") from error
        finally:
            for episode in episodes:  # those beside one that has failed
                episode.cancel()
            await asyncio.wait(episodes)
        rollouts = [
            rollout
            for one, result in zip(asked, results, strict=True)
            for rollout in self.rollouts_of(prompt, one.sample_id, result, request.group_id)
        ]
        num_tokens = sum(rollout.num_actions for rollout in rollouts)
        metrics.add("num_generated_tokens", num_tokens, reduction="sum")
        return rollouts

    async def run(self, request: EpisodeRequest, metrics: Metrics) -> EpisodeResult:
        """Return the result of an episode, which begins anew as often as the policy says.

        Raises AgentError when the last try has failed, EngineError where the engine failed.
        """
        for num_tries in itertools.count(1):
            worker = min(self.workers, key=lambda worker: worker.num_episodes)
            try:
                result = await worker.run(request)
            except EngineError as error:
                raise EngineError(f"sample {request.sample_id}: {error}") from error
            except AgentError as error:
                metrics.add(f"agent/num_failed_{error.kind}", 1, reduction="sum")
                if num_tries > self.policy.num_retries:
                    raise
                metrics.add("num_reward_retries", 1, reduction="sum")
            else:
                add_metrics(result, metrics)
                return result
        raise AssertionError("unreachable")

    def rollouts_of(
        self, prompt: PromptRecord, sample_id: str, result: EpisodeResult, group_id: int
    ) -> list[Rollout]:
        """Return one rollout for each segment of an episode."""
        return [
            Rollout(
                sample_id=f"{sample_id}#{index}" if index else sample_id,
                episode_id=sample_id,
                group_id=group_id,
                row_id=prompt.row_id,
                token_ids=torch.tensor(segment.token_ids, dtype=torch.int64),
                action_mask=torch.tensor(segment.action_mask, dtype=torch.bool),
                logprobs=torch.tensor(segment.logprobs, dtype=torch.float32),
                weight_versions=torch.tensor(segment.weight_versions, dtype=torch.int32),
                finish_reason="length" if result.is_truncated else "stop",
                prompt_text=self._text(segment, 0, segment.num_prompt_tokens)
                if index
                else prompt.prompt_text,
                response_text=self._text(segment, segment.num_prompt_tokens, None),
                label=prompt.label,
                datasource=prompt.datasource,
                columns=prompt.columns,
                reward=result.reward,
                score=result.score,
                extra_logs=result.extra_logs,
            )
            for index, segment in enumerate(result.segments)
        ]

    def _text(self, segment: Segment, start: int, stop: int | None) -> str:
        ids = segment.token_ids[start:stop]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def agent_rollouts(
    setup: AgentSetup, samplers: Sequence[Sampler], policy: FailurePolicy
) -> Rollouts:
    """Return rollouts by agents, whose workers have started; raises ConfigError."""
    agents = AgentEpisodes(setup, samplers, policy)
    rollouts = Rollouts(agents, GroupScorer(None, policy))
    rollouts.loop.run(agents.start())
    return rollouts


def episode_requests(
    prompt: PromptRecord, sampling: SamplingSettings, name: str
) -> list[EpisodeRequest]:
    """Return the episodes of a prompt."""
    one = replace(sampling, num_samples=1)
    return [
        EpisodeRequest(
            sample_id=f"{name}/{k}",
            prompt_text=prompt.prompt_text,
            prompt_token_ids=prompt.prompt_token_ids,
            sampling=one if sampling.seed is None else replace(one, seed=sampling.seed + k),
            label=prompt.label,
            columns=prompt.columns,
        )
        for k in range(sampling.num_samples)
    ]


def add_metrics(result: EpisodeResult, metrics: Metrics) -> None:
    """Note how long an episode was, and what its agent said about it."""
    metrics.add("agent/num_turns", result.num_turns)
    metrics.add("agent/episode_s", result.seconds)
    metrics.add("agent/num_segments", len(result.segments))
    if result.score is not None:
        metrics.add("score", result.score)
    for name, value in result.extra_logs.items():
        metrics.add(f"extra/{name}", value)


def agent_setup(config: PPOConfig, tokenizer: Tokenizer, *, vocab_size: int) -> AgentSetup:
    """Return what the agents of a run are told."""
    data = config.data
    return AgentSetup(
        str(config.train.agent_func_path),
        tokenizer,
        vocab_size,
        max_length=data.max_len or data.prompt_max_len + config.rollout.max_new_tokens,
        num_tasks=config.train.async_num_tasks,
        step_timeout_s=config.reward.timeout_s,
        episode_timeout_s=config.train.agent_timeout_s,
    )
