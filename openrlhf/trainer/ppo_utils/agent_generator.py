"""From prompts to scored rollouts by way of agents: the same calls as `SamplesGenerator`.

Hands whole groups to the hosts of episodes as these have room, so that a slow one gets fewer.
"""

from __future__ import annotations

import copy
import queue
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.engines.base import SamplingSettings
from openrlhf.engines.request_gatherer import AnswersRequests
from openrlhf.rollout.agents.episode import (
    AgentLimits,
    EpisodeRequest,
    EpisodeResult,
    Segment,
)
from openrlhf.trainer.ppo_utils.agent_groups import (
    EpisodeGroup,
    add_episode_metrics,
    add_retry_metrics,
    episode_requests,
    raise_engine_failure,
)
from openrlhf.trainer.ppo_utils.agent_stream import AgentStream
from openrlhf.trainer.ppo_utils.group_stream import GroupStream
from openrlhf.trainer.ppo_utils.samples_generator import SampleBatch
from openrlhf.trainer.ppo_utils.scoring import FailurePolicy, check_scores
from openrlhf.trainer.ppo_utils.work_share import WorkHost, WorkKind, WorkShare
from openrlhf.utils.agent import AgentError
from openrlhf.utils.metrics import Metrics, timed
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.tokenizer import Tokenizer

GRACE_S = 60.0  # over the deadline of an episode, until its host is called silent


class EpisodeHost(Protocol):
    """Whatever runs episodes: a runner in this process, or one beside an engine elsewhere."""

    def submit_episodes(self, owner: str, requests: Sequence[EpisodeRequest]) -> None:
        """Take episodes."""

    def finished_episodes(self, owner: str, wait_s: float) -> list[EpisodeResult]:
        """Results since the last call; waits up to `wait_s` seconds for the first of them."""

    def abandon_episodes(self, owner: str) -> None:
        """Cut off what runs for an owner, and forget its results."""

    def drain(self, wait_s: float) -> None:
        """Wait for turns the engine still samples for episodes that were cut off."""


class AgentSamplesGenerator:
    """Acts out the samples of a batch of prompts."""

    def __init__(
        self,
        hosts: Sequence[EpisodeHost],
        tokenizer: Tokenizer,
        limits: AgentLimits,
        policy: FailurePolicy,
        generator: AnswersRequests | None = None,
    ) -> None:
        """`generator` is what the hosts sample from, for whoever sends it weights."""
        self.generator = generator
        self.hosts = list(hosts)
        self.tokenizer = tokenizer
        self.limits = limits
        self.policy = policy

    def generate_samples(
        self, prompts: Sequence[PromptRecord], sampling: SamplingSettings, *, tag: str
    ) -> SampleBatch:
        """`num_samples` episodes of each prompt, prompt by prompt; `tag` makes sample ids unique.

        An episode has one rollout, or several that share its reward. Raises AgentError where the
        failure policy says so, and EngineError.
        """
        metrics = Metrics()
        groups = [episode_requests(prompt, sampling, tag) for prompt in prompts]
        results: dict[str, EpisodeResult] = {}
        with timed("generation", metrics):
            for result in self.run(groups, metrics):
                results[result.sample_id] = result
            has_failed = any(result.failure is not None for result in results.values())
            if has_failed or "num_reward_retries" in metrics.values():
                self.drain()
        failed = self._failed_rows(prompts, groups, results, metrics)
        rollouts = [
            rollout
            for group_id, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
            if prompt.row_id not in failed
            for rollout in self.make_group(
                prompt, [results[request.sample_id] for request in group], group_id=group_id
            )
        ]
        metrics.add("num_generated_tokens", sum(r.num_actions for r in rollouts), reduction="sum")
        check_scores(rollouts)
        add_episode_metrics(list(results.values()), metrics)
        return SampleBatch(rollouts, metrics, failed)

    def drain(self) -> None:
        """Wait for turns still sampled for episodes that were cut off: an engine cannot sleep, and
        its model not be trained, meanwhile.
        """
        for host in self.hosts:
            host.drain(self.limits.episode_timeout_s)

    def open_stream(self, sampling: SamplingSettings) -> GroupStream:
        """See SampleSource."""
        # Tokenizers are not shared between threads.
        maker = AgentSamplesGenerator(
            self.hosts, copy.deepcopy(self.tokenizer), self.limits, self.policy
        )
        return AgentStream(maker, sampling)

    def run(self, groups: Sequence[EpisodeGroup], metrics: Metrics) -> Iterator[EpisodeResult]:
        """The final result of every episode, as they come; failed ones after their retries, which
        are noted in `metrics`.
        """
        arrivals: queue.SimpleQueue[list[EpisodeResult] | BaseException] = queue.SimpleQueue()
        share = self.share(arrivals.put, arrivals.put)
        running = {request.sample_id: request for group in groups for request in group}
        num_tries: Counter[str] = Counter()
        try:
            for group in groups:
                share.submit(group)
            while running:
                results = arrivals.get()
                if isinstance(results, BaseException):
                    raise results
                for result in results:
                    raise_engine_failure(result)
                    num_tries[result.sample_id] += 1
                    if self.may_retry(result, num_tries[result.sample_id]):
                        add_retry_metrics(result, metrics)
                        share.submit([running[result.sample_id]])
                    else:
                        del running[result.sample_id]
                        yield result
        finally:
            share.close()

    def share(
        self,
        on_results: Callable[[list[EpisodeResult]], None],
        on_error: Callable[[BaseException], None],
    ) -> WorkShare[EpisodeRequest, EpisodeResult]:
        """The hosts, each with as many episodes as it may run at once."""
        kind: WorkKind[EpisodeRequest, EpisodeResult] = WorkKind(
            item_name=lambda request: request.sample_id,
            result_name=lambda result: result.sample_id,
            size=lambda request: 1,
            max_size=self.limits.num_tasks,
            # Episodes beyond the limit of a host wait for others, and blocked ones start again.
            silence_s=2 * self.limits.episode_timeout_s + GRACE_S,
        )
        hosts = [
            WorkHost(host.submit_episodes, host.finished_episodes, host.abandon_episodes)
            for host in self.hosts
        ]
        return WorkShare(hosts, kind, on_results, on_error)

    def may_retry(self, result: EpisodeResult, num_tries: int) -> bool:
        """Whether an episode that was tried so often is tried again."""
        return result.failure is not None and num_tries <= self.policy.num_retries

    def make_group(
        self, prompt: PromptRecord, results: Sequence[EpisodeResult], *, group_id: int
    ) -> list[Rollout]:
        """The rollouts of a prompt's episodes, with their texts."""
        rollouts = [
            rollout for result in results for rollout in self._rollouts(prompt, result, group_id)
        ]
        return self._with_texts(rollouts)

    def _failed_rows(
        self,
        prompts: Sequence[PromptRecord],
        groups: Sequence[EpisodeGroup],
        results: dict[str, EpisodeResult],
        metrics: Metrics,
    ) -> dict[int, str]:
        """Why each row without a whole group is dropped; AgentError where none may be."""
        failed: dict[int, str] = {}
        num_failed = 0  # episodes
        for prompt, group in zip(prompts, groups, strict=True):
            for request in group:
                failure = results[request.sample_id].failure
                if failure is not None:
                    failed.setdefault(prompt.row_id, f"{failure.kind}: {failure.message}")
                    num_failed += 1
        if self.policy.drops:
            metrics.add("num_dropped_groups", len(failed), reduction="sum")
        if failed and not self.policy.drops:
            raise AgentError(
                f"{num_failed} of {len(results)} episodes failed: {min(failed.values())}"
            )
        return failed

    def _rollouts(
        self, prompt: PromptRecord, result: EpisodeResult, group_id: int
    ) -> Iterator[Rollout]:
        """One rollout for each segment of an episode."""
        for index, segment in enumerate(result.segments):
            suffix = f"#{index}" if index else ""
            yield Rollout(
                sample_id=f"{result.sample_id}{suffix}",
                episode_id=result.sample_id,
                group_id=group_id,
                row_id=prompt.row_id,
                token_ids=torch.tensor(segment.token_ids, dtype=torch.int64),
                action_mask=torch.tensor(segment.action_mask, dtype=torch.bool),
                logprobs=torch.tensor(segment.logprobs, dtype=torch.float32),
                weight_versions=torch.tensor(segment.weight_versions, dtype=torch.int32),
                finish_reason="length" if result.is_truncated else "stop",
                prompt_text=prompt.prompt_text if index == 0 else self._prompt_text(segment),
                response_text="",
                label=prompt.label,
                datasource=prompt.datasource,
                columns=prompt.columns,
                reward=result.reward,
                score=result.score,
                extra_logs=result.extra_logs,
            )

    def _prompt_text(self, segment: Segment) -> str:
        ids = segment.token_ids[: segment.num_prompt_tokens]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _with_texts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with what follows their prompts as text, feedback included."""
        starts = [int(r.action_mask.int().argmax()) for r in rollouts]
        texts = self.tokenizer.batch_decode(
            [r.token_ids[start:].tolist() for r, start in zip(rollouts, starts, strict=True)],
            skip_special_tokens=False,
        )
        return [replace(r, response_text=text) for r, text in zip(rollouts, texts, strict=True)]
