"""A stream of groups from engines and rewards: prompts go to the engine with the least to do, and
groups to the scorer as they are finished.

Fetching, decoding and scoring go on in threads of the stream, whatever its driver does meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.engines.request_desk import FinishedRequest
from openrlhf.errors import RewardError
from openrlhf.trainer.ppo_utils.group_stream import FinishedGroup, GroupKey
from openrlhf.trainer.ppo_utils.host_stream import HostStream
from openrlhf.trainer.ppo_utils.scoring import (
    Group,
    GroupScorer,
    Outcome,
    add_score_metrics,
    check_scores,
)
from openrlhf.trainer.ppo_utils.stream_scoring import StreamScoring
from openrlhf.trainer.ppo_utils.work_share import WorkHost, WorkKind, WorkShare
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout

SILENCE_S = 4 * 3600.0  # of an engine that has requests
RequestHost = WorkHost[GenerationRequest, FinishedRequest]


class MakesGroups(Protocol):
    """What turns an engine's answer into rollouts."""

    def make_group(
        self,
        prompt: PromptRecord,
        request: GenerationRequest,
        completions: Sequence[Completion],
        *,
        group_id: int,
    ) -> list[Rollout]:
        """See SamplesGenerator."""


@dataclass(frozen=True)
class _Asked:
    """A prompt that an engine works on."""

    key: GroupKey
    prompt: PromptRecord
    request: GenerationRequest
    group_id: int


class EngineStream(HostStream):
    """A GroupStream over engines."""

    def __init__(
        self,
        hosts: Sequence[RequestHost],
        scorer: GroupScorer,
        maker: MakesGroups,
        sampling: SamplingSettings,
    ) -> None:
        """`maker` is used in the stream's thread alone: its tokenizer belongs to nobody else."""
        self._maker = maker
        self._sampling = sampling
        self._asked: dict[str, _Asked] = {}
        self._keys: dict[int, GroupKey] = {}  # by group id, of groups that are scored
        self._group_ids = itertools.count()
        self._last: Rollout | None = None  # the one before, to compare with
        super().__init__(scorer.policy)
        self._scoring = StreamScoring(
            scorer, self._events, self._scored, may_get_more=lambda: bool(self._asked)
        )
        kind: WorkKind[GenerationRequest, FinishedRequest] = WorkKind(
            item_name=lambda request: request.request_id,
            result_name=lambda result: result.request_id,
            size=lambda request: request.sampling.num_samples,
            silence_s=SILENCE_S,
        )
        self._work = WorkShare(hosts, kind, self._arrived, self._outlet.fail)

    def submit(self, key: GroupKey, prompt: PromptRecord, *, tag: str) -> None:
        """See GroupStream."""
        request_id = f"{tag}/{prompt.row_id}"
        assert request_id not in self._asked, f"{request_id} is running"
        self._outlet.begin()
        request = GenerationRequest(request_id, prompt.prompt_token_ids, self._sampling)
        self._asked[request_id] = _Asked(key, prompt, request, next(self._group_ids))
        self._work.submit([request])

    def describe(self) -> str:
        """See GroupStream."""
        num_scored = len(self._keys)
        rewards = f"{num_scored} prompts wait for their rewards" if num_scored else ""
        return "; ".join(filter(None, (super().describe(), rewards)))

    def _arrived(self, results: list[FinishedRequest]) -> None:
        self._events.soon(partial(self._receive, results))

    def _receive(self, results: list[FinishedRequest]) -> None:
        metrics = Metrics()
        for result in results:
            asked = self._asked.pop(result.request_id)
            group = self._maker.make_group(
                asked.prompt, asked.request, result.completions, group_id=asked.group_id
            )
            num_tokens = sum(rollout.num_actions for rollout in group)
            metrics.add("num_generated_tokens", num_tokens, reduction="sum")
            self._keys[asked.group_id] = asked.key
            self._scoring.add(group)
        self._outlet.note(metrics)
        self._scoring.send()

    def _scored(self, group: Group, outcome: Outcome) -> None:
        key = self._keys.pop(group[0].group_id)
        metrics, self._scoring.metrics = self._scoring.metrics, Metrics()
        if isinstance(outcome, RewardError):
            self._outlet.note(metrics)
            self._outlet.drop(key, outcome)
            return
        check_scores([*outcome, self._last] if self._last else outcome)
        self._last = outcome[-1]
        add_score_metrics(outcome, metrics)
        self._outlet.note(metrics)
        self._outlet.put(FinishedGroup(key, outcome))
