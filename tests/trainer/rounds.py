"""A stream over whatever only makes whole batches: what was submitted since the last call is made
together when finished groups are asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.rollout.rollout import FinishedGroup, GroupKey, SampleBatch
from openrlhf.utils.metrics import Metrics


class MakesBatches(Protocol):
    """Generates and scores the samples of prompts."""

    def __call__(self, prompts: Sequence[PromptRecord], *, tag: str) -> SampleBatch: ...


@dataclass(frozen=True)
class _Submitted:
    key: GroupKey
    prompt: PromptRecord
    tag: str


class BatchStream:
    """A GroupStream in rounds; `finished` waits for as long as a round takes."""

    in_rounds = True

    def __init__(self, generate: MakesBatches) -> None:
        self._generate = generate
        self._submitted: list[_Submitted] = []
        self._group_ids = itertools.count()
        self._metrics = Metrics()

    def submit(self, prompts: Sequence[tuple[GroupKey, PromptRecord]], *, tag: str) -> None:
        self._submitted += [_Submitted(key, prompt, tag) for key, prompt in prompts]

    def timings(self) -> Metrics:
        return Metrics()

    def finished(self, wait_s: float) -> list[FinishedGroup]:
        submitted, self._submitted = self._submitted, []
        return [
            group
            for tag in dict.fromkeys(one.tag for one in submitted)
            for group in self._round([one for one in submitted if one.tag == tag], tag)
        ]

    @property
    def num_running(self) -> int:
        return len(self._submitted)

    def describe(self) -> str:
        return f"{len(self._submitted)} prompts wait for their round"

    def take_metrics(self) -> Metrics:
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    def close(self) -> None:
        self._submitted = []

    def _round(self, submitted: Sequence[_Submitted], tag: str) -> list[FinishedGroup]:
        samples = self._generate([one.prompt for one in submitted], tag=tag)
        self._metrics.merge(samples.metrics)
        groups = []
        for one in submitted:
            row, group_id = one.prompt.row_id, next(self._group_ids)
            rollouts = [
                replace(rollout, group_id=group_id)
                for rollout in samples.rollouts
                if rollout.row_id == row
            ]
            groups.append(FinishedGroup(one.key, rollouts, samples.failed.get(row)))
        return groups
