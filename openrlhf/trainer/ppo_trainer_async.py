"""Asynchronous RL: the step of PPOTrainer on a bounded queue of samples, filled while it trains."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import LostRankError
from openrlhf.rollout.async_controller import AsyncLimits
from openrlhf.rollout.rollout_queue import RolloutQueue
from openrlhf.rollout.scoring import score_metrics
from openrlhf.trainer.ppo_inputs import RunInputs, say_dropped
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout


class PPOTrainerAsync(PPOTrainer):
    """Trains on samples that are at most `--async_queue_size` steps behind the policy.

    Weights change between samples, or under them with `--partial_rollout`. Evaluation shares the
    engines with the samples that are generated meanwhile.
    """

    # The first step of a run that goes on may have older samples.
    mismatch_metric = "vllm_kl/stale_0"

    def __init__(self, config: PPOConfig, inputs: RunInputs, *args: Any, **named: Any) -> None:
        super().__init__(config, inputs, *args, **named)
        size, train = config.rollout.batch_size, config.train
        limits = AsyncLimits(
            batch_size=size,
            max_staleness=train.async_queue_size,
            max_running=config.rollout.vllm_generate_batch_size or size,
            keeps_running=train.partial_rollout_enable,
        )
        self.queue = RolloutQueue(self.sampler, self.maker, inputs.sampling, limits)
        self.state.sampler = self.queue
        self._told_at = 0.0  # when a step was last reported

    def fit(self, lost: LostRankError | None = None) -> None:
        self._told_at = time.monotonic()
        with self.queue:
            super().fit(lost)
            say_dropped(self.queue.take_failed(), self.inputs.prompts)

    @property
    def has_lost_generation(self) -> bool:
        return self.queue.has_failed

    @contextmanager
    def resampling(self) -> Iterator[None]:
        with suppress(LostRankError):  # which has ended generation, and is recovered from
            self.queue.__exit__(None, None, None)
        try:
            yield
        finally:
            self.queue.__enter__()

    @property
    def is_over(self) -> bool:
        return self.is_ended or self.queue.is_over

    def generate(self, global_step: int, metrics: Metrics) -> list[Rollout]:
        """Return samples of the step, which may be finished already."""
        rollouts = self.queue.next_step()
        say_dropped(self.queue.take_failed(), self.inputs.prompts)
        metrics.merge(staleness_metrics(rollouts, self.state.weight_version))
        metrics.merge(score_metrics(rollouts))
        return rollouts

    def broadcast_to_vllm(self) -> None:
        """Send the policy's weights once no running sample would be of two versions, or under
        running samples.
        """
        with self.queue.syncing():
            super().broadcast_to_vllm()

    def generation_s(self, metrics: Metrics) -> float:
        """Return the seconds since the last step was reported: tokens are generated during
        evaluations and saves, too.
        """
        now, before = time.monotonic(), self._told_at
        self._told_at = now
        return now - before

    def report(
        self,
        global_step: int,
        metrics: Metrics,
        rollouts: Sequence[Rollout],
        file: Path | None,
    ) -> None:
        """Report a step with what generation and the queue noted meanwhile."""
        metrics.merge(self.queue.take_metrics())
        metrics.add("num_generated_tokens", 0, reduction="sum")  # a step may generate none
        super().report(global_step, metrics, rollouts, file)


def staleness_metrics(rollouts: Sequence[Rollout], weight_version: int) -> Metrics:
    """Count the steps that samples of a step are behind the policy: mean, most, and how many of
    each; the share of samples whose tokens are of several versions.
    """
    metrics = Metrics()
    for rollout in rollouts:
        versions = set(rollout.weight_versions.tolist())
        staleness = weight_version - min(versions, default=weight_version)
        metrics.add(f"num_samples/stale_{staleness}", 1, reduction="sum")
        metrics.add("staleness_mean", staleness)
        metrics.add("staleness_max", staleness, reduction="max")
        metrics.add("mixed_version_ratio", float(len(versions) > 1))
    return metrics
