"""The episodes of a prompt, which are asked for and judged together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.engines.base import SamplingSettings
from openrlhf.errors import EngineError
from openrlhf.rollout.agents.episode import EpisodeRequest, EpisodeResult, Failure
from openrlhf.utils.metrics import Metrics

EpisodeGroup = list[EpisodeRequest]


def episode_requests(prompt: PromptRecord, sampling: SamplingSettings, tag: str) -> EpisodeGroup:
    """The episodes of a prompt."""
    one = replace(sampling, num_samples=1)
    return [
        EpisodeRequest(
            sample_id=f"{tag}/{prompt.row_id}/{k}",
            prompt_text=prompt.prompt_text,
            prompt_token_ids=prompt.prompt_token_ids,
            sampling=one if sampling.seed is None else replace(one, seed=sampling.seed + k),
            label=prompt.label,
            columns=prompt.columns,
        )
        for k in range(sampling.num_samples)
    ]


def add_episode_metrics(results: Sequence[EpisodeResult], metrics: Metrics) -> None:
    """Note how long episodes were, why they failed, and what their agents said about them."""
    for result in results:
        metrics.add("agent/num_turns", result.num_turns)
        metrics.add("agent/episode_s", result.seconds)
        if result.failure is not None:
            _count_failure(result.failure, metrics)
            continue
        metrics.add("agent/num_segments", len(result.segments))
        if result.score is not None:
            metrics.add("score", result.score)
        for name, value in result.extra_logs.items():
            metrics.add(f"extra/{name}", value)


def add_retry_metrics(result: EpisodeResult, metrics: Metrics) -> None:
    """Note a try that failed and is repeated; how the episode ends is noted later."""
    if result.failure is not None:
        _count_failure(result.failure, metrics)
    metrics.add("num_reward_retries", 1, reduction="sum")


def _count_failure(failure: Failure, metrics: Metrics) -> None:
    metrics.add(f"agent/num_failed_{failure.kind}", 1, reduction="sum")


def raise_engine_failure(result: EpisodeResult) -> None:
    """Raise EngineError where not the agent but the engine failed."""
    if result.failure is not None and result.failure.kind == "engine":
        raise EngineError(f"sample {result.sample_id}: {result.failure.message}")
