"""Asynchronous RL: the step of PPOTrainer behind a bounded queue, filled while it trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from openrlhf.config.ppo import PPOConfig
from openrlhf.rollout.async_controller import AsyncLimits
from openrlhf.rollout.rollout_queue import RolloutQueue, sample_origin
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.utils.logging import notice
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.user_code import code_digest

WAIT_S = 4 * 3600.0  # for samples; no call of an engine takes longer


class PPOTrainerAsync(PPOTrainer):
    """Trains on samples that are at most `--async_queue_size` updates behind the policy.

    Weights change between samples, or under them with `--partial_rollout`. Evaluation shares the
    engines with the samples that are generated meanwhile.
    """

    # The first step of a run that goes on may have older samples.
    mismatch_metric = "vllm_kl/stale_0"

    def source(self) -> RolloutQueue:
        config, sampling = self.config, self.inputs.sampling
        self.queue = RolloutQueue(
            self.sampler,
            self.rollouts,
            sampling,
            async_limits(config),
            origin=sample_origin(sampling, reward_origin(config)),
            wait_s=WAIT_S,
            say=notice,
        )
        return self.queue

    def fit(self) -> None:
        with self.queue:
            super().fit()
            self.say_failed(self.queue.take_failed())

    @property
    def is_over(self) -> bool:
        return self.queue.is_over

    def generate(self, global_step: int, metrics: Metrics) -> list[Rollout]:
        """Return samples of the step, which may be finished already."""
        rollouts = self.queue.next_step()
        self.say_failed(self.queue.take_failed())
        metrics.merge(staleness_metrics(rollouts, self.state.weight_version))
        return rollouts

    def broadcast_to_vllm(self) -> None:
        """Send the policy's weights once no running sample would be of two versions, or under
        running samples.
        """
        with self.queue.syncing():
            super().broadcast_to_vllm()

    def report(self, global_step: int, metrics: Metrics, rollouts: Sequence[Rollout]) -> None:
        """Report a step with what generation and the queue noted meanwhile."""
        metrics.merge(self.queue.take_metrics())
        metrics.add("num_generated_tokens", 0, reduction="sum")  # a step may generate none
        super().report(global_step, metrics, rollouts)


def reward_origin(config: PPOConfig) -> dict[str, Any]:
    """Return what decides the reward of a sample, as JSON: settings, and the text of user code."""
    names = {"remote_url", "model_name_or_path", "weights", "normalize_enable"}
    reward = config.reward.model_dump(mode="json", include=names)
    agent = config.train.agent_func_path
    code = config.reward.remote_url if config.reward.is_function_file else agent
    digest = code_digest(code) if code else None
    return {**reward, "agent_func_path": agent, "code_sha256": digest}


def async_limits(config: PPOConfig) -> AsyncLimits:
    """Return how far generation may run ahead in this run."""
    size = config.rollout.batch_size
    return AsyncLimits(
        batch_size=size,
        max_staleness=config.train.async_queue_size,
        max_running=config.rollout.vllm_generate_batch_size or size,
        keeps_running=config.train.partial_rollout_enable,
    )


def staleness_metrics(rollouts: Sequence[Rollout], weight_version: int) -> Metrics:
    """Count the updates that samples of a step are behind the policy: mean, most, and how many of
    each; the share of samples whose tokens are of several versions.
    """
    metrics = Metrics()
    counts: Counter[int] = Counter()
    for rollout in rollouts:
        versions = set(rollout.weight_versions.tolist())
        staleness = weight_version - min(versions, default=weight_version)
        counts[staleness] += 1
        metrics.add("staleness_mean", staleness)
        metrics.add("staleness_max", staleness, reduction="max")
        metrics.add("mixed_version_ratio", float(len(versions) > 1))
    for staleness, count in counts.items():
        metrics.add(f"num_samples/stale_{staleness}", count, reduction="sum")
    return metrics
