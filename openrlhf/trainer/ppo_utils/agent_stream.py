"""A stream of groups from agents: the episodes of a prompt go to the host with the least to do, and
a group is handed out when the last of its episodes has ended.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.engines.base import SamplingSettings
from openrlhf.rollout.agents.episode import EpisodeRequest, EpisodeResult
from openrlhf.trainer.ppo_utils.agent_groups import (
    EpisodeGroup,
    add_episode_metrics,
    add_retry_metrics,
    episode_requests,
    raise_engine_failure,
)
from openrlhf.trainer.ppo_utils.group_stream import FinishedGroup, GroupKey
from openrlhf.trainer.ppo_utils.host_stream import HostStream
from openrlhf.trainer.ppo_utils.scoring import FailurePolicy, check_scores
from openrlhf.trainer.ppo_utils.work_share import WorkShare
from openrlhf.utils.agent import AgentError
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout


class MakesEpisodes(Protocol):
    """What runs episodes and turns them into rollouts: see AgentSamplesGenerator."""

    policy: FailurePolicy

    def share(
        self,
        on_results: Callable[[list[EpisodeResult]], None],
        on_error: Callable[[BaseException], None],
    ) -> WorkShare[EpisodeRequest, EpisodeResult]:
        """The hosts of episodes."""

    def may_retry(self, result: EpisodeResult, num_tries: int) -> bool:
        """Whether an episode that was tried so often is tried again."""

    def make_group(
        self, prompt: PromptRecord, results: Sequence[EpisodeResult], *, group_id: int
    ) -> list[Rollout]:
        """The rollouts of a prompt's episodes."""

    def drain(self) -> None:
        """Wait for turns still sampled for episodes that were cut off."""


@dataclass
class _Acting:
    """A prompt whose episodes are acted out."""

    key: GroupKey
    prompt: PromptRecord
    episodes: EpisodeGroup
    group_id: int
    results: dict[str, EpisodeResult] = field(default_factory=dict)  # final ones
    num_tries: Counter[str] = field(default_factory=Counter)


class AgentStream(HostStream):
    """A GroupStream over agents."""

    def __init__(self, maker: MakesEpisodes, sampling: SamplingSettings) -> None:
        """`maker` makes groups in the stream's thread alone: its tokenizer is nobody else's."""
        super().__init__(maker.policy)
        self._maker = maker
        self._sampling = sampling
        self._acting: dict[str, _Acting] = {}  # by sample id
        self._group_ids = itertools.count()
        self._last: Rollout | None = None  # the one before, to compare with
        self._has_failed = False
        self._work = maker.share(self._arrived, self._outlet.fail)

    def submit(self, key: GroupKey, prompt: PromptRecord, *, tag: str) -> None:
        """See GroupStream."""
        episodes = episode_requests(prompt, self._sampling, tag)
        self._outlet.begin()
        acting = _Acting(key, prompt, episodes, next(self._group_ids))
        for episode in episodes:
            assert episode.sample_id not in self._acting, f"{episode.sample_id} is running"
            self._acting[episode.sample_id] = acting
        self._work.submit(episodes)

    def close(self) -> None:
        """See GroupStream; turns of episodes that failed are sampled no longer then."""
        super().close()
        if self._has_failed:
            self._maker.drain()

    def _arrived(self, results: list[EpisodeResult]) -> None:
        self._events.soon(partial(self._receive, results))

    def _receive(self, results: list[EpisodeResult]) -> None:
        metrics = Metrics()
        for result in results:
            raise_engine_failure(result)
            acting = self._acting[result.sample_id]
            acting.num_tries[result.sample_id] += 1
            if self._maker.may_retry(result, acting.num_tries[result.sample_id]):
                self._has_failed = True
                add_retry_metrics(result, metrics)
                again = [e for e in acting.episodes if e.sample_id == result.sample_id]
                self._work.submit(again)
            else:
                del self._acting[result.sample_id]
                acting.results[result.sample_id] = result
                if len(acting.results) == len(acting.episodes):
                    self._end(acting)
        self._outlet.note(metrics)

    def _end(self, acting: _Acting) -> None:
        """Hand out a group whose episodes have ended; AgentError where none may be dropped."""
        metrics = Metrics()
        results = [acting.results[episode.sample_id] for episode in acting.episodes]
        add_episode_metrics(results, metrics)
        failures = [result.failure for result in results if result.failure is not None]
        if failures:
            self._outlet.note(metrics)
            self._has_failed = self._maker.policy.drops  # else this ends the stream
            first = failures[0]
            message = f"row {acting.prompt.row_id + 1}: {first.kind}: {first.message}"
            self._outlet.drop(acting.key, AgentError(message))
            return
        rollouts = self._maker.make_group(acting.prompt, results, group_id=acting.group_id)
        check_scores([*rollouts, self._last] if self._last else rollouts)
        self._last = rollouts[-1]
        num_tokens = sum(rollout.num_actions for rollout in rollouts)
        metrics.add("num_generated_tokens", num_tokens, reduction="sum")
        self._outlet.note(metrics)
        self._outlet.put(FinishedGroup(acting.key, rollouts))
