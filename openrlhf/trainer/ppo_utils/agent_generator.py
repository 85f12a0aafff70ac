"""From prompts to scored rollouts by way of agents: the same calls as `SamplesGenerator`.

Hands whole groups to the hosts of episodes as these have room, so that a slow one gets fewer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from openrlhf.datasets.prompts_dataset import PromptRecord
from openrlhf.engines.base import SamplingSettings
from openrlhf.errors import EngineError
from openrlhf.trainer.ppo_utils.agent_runner import raise_engine_failure
from openrlhf.trainer.ppo_utils.agent_sampler import AnswersRequests
from openrlhf.trainer.ppo_utils.agent_trace import (
    AgentLimits,
    EpisodeRequest,
    EpisodeResult,
    Segment,
)
from openrlhf.trainer.ppo_utils.samples_generator import SampleBatch
from openrlhf.trainer.ppo_utils.scoring import FailurePolicy, check_scores
from openrlhf.utils.agent import AgentError
from openrlhf.utils.metrics import Metrics, timed
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.tokenizer import Tokenizer

POLL_S = 2.0  # of one look at a host for finished episodes
GRACE_S = 60.0  # over the deadline of an episode, until its host is called silent

Group = list[EpisodeRequest]


class EpisodeHost(Protocol):
    """Whatever runs episodes: a runner in this process, or one beside an engine elsewhere."""

    def submit_episodes(self, owner: str, requests: Sequence[EpisodeRequest]) -> None:
        """Take episodes."""

    def finished_episodes(self, owner: str, wait_s: float) -> list[EpisodeResult]:
        """Results since the last call; waits up to `wait_s` seconds for the first of them."""

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
        groups = [_requests(prompt, sampling, tag) for prompt in prompts]
        results: dict[str, EpisodeResult] = {}
        with timed("generation", metrics):
            for result in self.run(groups, owner=tag):
                results[result.sample_id] = result
            if any(result.failure is not None for result in results.values()):
                for host in self.hosts:  # an engine cannot sleep while it samples
                    host.drain(self.limits.episode_timeout_s)
        failed = self._failed_rows(prompts, groups, results, metrics)
        rollouts = [
            rollout
            for group_id, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
            if prompt.row_id not in failed
            for request in group
            for rollout in self._rollouts(prompt, results[request.sample_id], group_id)
        ]
        metrics.add("num_generated_tokens", sum(r.num_actions for r in rollouts), reduction="sum")
        check_scores(rollouts)
        _add_metrics(list(results.values()), metrics)
        return SampleBatch(self._with_texts(rollouts), metrics, failed)

    def run(self, groups: Sequence[Group], *, owner: str) -> Iterator[EpisodeResult]:
        """The final result of every episode, as they come; failed ones after their retries."""
        feeders = [_Feeder(host, self.limits, self.policy, owner) for host in self.hosts]
        waiting = deque(groups)
        results: queue.SimpleQueue[EpisodeResult | Future[None]] = queue.SimpleQueue()
        stop = threading.Event()
        with ThreadPoolExecutor(len(feeders), thread_name_prefix="agent-host") as pool:
            for feeder in feeders:
                pool.submit(feeder.feed, waiting, results, stop).add_done_callback(results.put)
            num_busy = len(feeders)
            try:
                while num_busy:
                    result = results.get()
                    if isinstance(result, Future):
                        result.result()
                        num_busy -= 1
                    else:
                        raise_engine_failure(result)
                        yield result
            finally:
                stop.set()

    def _failed_rows(
        self,
        prompts: Sequence[PromptRecord],
        groups: Sequence[Group],
        results: dict[str, EpisodeResult],
        metrics: Metrics,
    ) -> dict[int, str]:
        """Why each row without a whole group is dropped; AgentError where that is too much."""
        failed: dict[int, str] = {}
        kinds: Counter[str] = Counter()
        for prompt, group in zip(prompts, groups, strict=True):
            for request in group:
                failure = results[request.sample_id].failure
                if failure is not None:
                    failed.setdefault(prompt.row_id, f"{failure.kind}: {failure.message}")
                    kinds[failure.kind] += 1
        for kind, count in kinds.items():
            metrics.add(f"agent/num_failed_{kind}", count, reduction="sum")
        if self.policy.drops:
            metrics.add("num_dropped_groups", len(failed), reduction="sum")
        if failed and not self.policy.drops:
            raise AgentError(
                f"{sum(kinds.values())} of {len(results)} episodes failed: {min(failed.values())}"
            )
        if len(failed) > self.policy.max_dropped * len(groups):
            raise AgentError(
                f"{len(failed)} of {len(groups)} prompts have failed episodes, more than "
                f"--reward_max_dropped {self.policy.max_dropped:g} of a step: "
                f"{min(failed.values())}"
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


@dataclass
class _Feeder:
    """Keeps one host busy: hands it groups while it has room, and failed episodes again."""

    host: EpisodeHost
    limits: AgentLimits
    policy: FailurePolicy
    owner: str

    def feed(
        self,
        waiting: deque[Group],
        results: queue.SimpleQueue[EpisodeResult | Future[None]],
        stop: threading.Event,
    ) -> None:
        """Until nothing waits and nothing runs; raises EngineError for a host that is silent."""
        running: dict[str, EpisodeRequest] = {}
        num_tries: Counter[str] = Counter()
        heard_at = time.monotonic()
        while not stop.is_set():
            self._hand_over(waiting, running)
            if not running:
                return
            finished = self.host.finished_episodes(self.owner, POLL_S)
            if finished:
                heard_at = time.monotonic()
            for result in finished:
                request = running.pop(result.sample_id)
                num_tries[result.sample_id] += 1
                if self._may_retry(result, num_tries[result.sample_id]):
                    running[result.sample_id] = request
                    self.host.submit_episodes(self.owner, [request])
                else:
                    results.put(result)
            self._check_heard(heard_at, len(running))

    def _hand_over(self, waiting: deque[Group], running: dict[str, EpisodeRequest]) -> None:
        while waiting and len(running) < self.limits.num_tasks:
            try:
                group = waiting.popleft()
            except IndexError:  # another host took the last one
                return
            running.update({request.sample_id: request for request in group})
            self.host.submit_episodes(self.owner, group)

    def _may_retry(self, result: EpisodeResult, num_tries: int) -> bool:
        is_ours = result.failure is not None and result.failure.kind == "engine"
        return result.failure is not None and not is_ours and num_tries <= self.policy.num_retries

    def _check_heard(self, heard_at: float, num_running: int) -> None:
        # Episodes beyond the limit of a host wait for others, and blocked ones start again.
        silence_s = time.monotonic() - heard_at
        allowed_s = 2 * self.limits.episode_timeout_s + GRACE_S
        if num_running and silence_s > allowed_s:
            raise EngineError(f"{num_running} episodes gave no sign for {silence_s:.0f} s")


def _requests(prompt: PromptRecord, sampling: SamplingSettings, tag: str) -> Group:
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


def _add_metrics(results: Sequence[EpisodeResult], metrics: Metrics) -> None:
    for result in results:
        metrics.add("agent/num_turns", result.num_turns)
        metrics.add("agent/episode_s", result.seconds)
        if result.failure is not None:
            continue
        metrics.add("agent/num_segments", len(result.segments))
        if result.score is not None:
            metrics.add("score", result.score)
        for name, value in result.extra_logs.items():
            metrics.add(f"extra/{name}", value)
