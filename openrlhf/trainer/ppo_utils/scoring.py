"""How rollouts get their rewards: group by group while others still generate, and what becomes of
groups whose reward cannot be had.

A group is the samples of one prompt; its outcome is its scored rollouts, or a RewardError.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import Protocol

from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import RewardError
from openrlhf.rewards.base import TRUNCATED_COLUMN, RewardBatch, RewardResult, RewardSource
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout

NUM_RETRIES = 3  # of plain "retry"
MAX_RETRY_WAIT_S = 30.0

Group = Sequence[Rollout]
Outcome = list[Rollout] | RewardError
Wait = Callable[[], list[Outcome]]


class Scorer(Protocol):
    """Whatever gives rollouts their rewards: user code, servers, models."""

    @property
    def is_streaming(self) -> bool:
        """Whether groups may be scored while others still generate."""

    @property
    def batch_size(self) -> int | None:
        """Most samples of one submission, which fail together; None: any number."""

    @property
    def has_room(self) -> bool:
        """Whether a submission would be begun with at once, however small it is."""

    def submit(self, groups: Sequence[Group]) -> Wait:
        """Start scoring groups; the answer waits and has one outcome a group."""

    def start(self, groups: Sequence[Group]) -> Future[list[Outcome]]:
        """The same without a thread of the caller's that waits."""


@dataclass(frozen=True)
class FailurePolicy:
    """What is done about groups without a reward: `--reward_failure`."""

    step_size: int  # groups of a step, in however many calls it is made
    drops: bool = False  # leave them out, up to `max_dropped` of a step; else the run ends
    num_retries: int = 0
    max_dropped: float = 0.5
    retry_wait_s: float = 1.0  # before the first retry; doubles with each

    @classmethod
    def of(cls, config: PPOConfig) -> FailurePolicy:
        """The policy of a run: "fail", "drop_group", "retry" or "retry(5)"."""
        name, num_retries = config.reward.failure, 0
        if name.startswith("retry"):
            num_retries = int(name[6:-1] or NUM_RETRIES)
        return cls(
            step_size=config.rollout.batch_size,
            drops=name == "drop_group",
            num_retries=num_retries,
            max_dropped=config.reward.max_dropped,
        )

    def check_dropped(self, reasons: Sequence[str], *, of: str = "a step") -> None:
        """Raise RewardError where more groups of a step were dropped than may be; `reasons` has one
        for each. Whoever knows the whole step asks: one call may be a part of it.
        """
        if self.drops and len(reasons) > self.max_dropped * self.step_size:
            raise RewardError(
                f"{len(reasons)} prompt(s) got no rewards, more than --reward_max_dropped "
                f"{self.max_dropped:g} of the {self.step_size} of {of}: {reasons[0]}"
            )


@dataclass(frozen=True)
class ScoredGroups:
    """What became of the groups of a step."""

    rollouts: list[Rollout]  # scored, in the order of their groups
    failed: dict[int, str] = field(default_factory=dict)  # row -> why its group was dropped
    metrics: Metrics = field(default_factory=Metrics)


class Scoring(Protocol):
    """The scoring of one step, begun before its first sample is done."""

    @property
    def is_streaming(self) -> bool:
        """Whether groups are scored as they come, so that it pays to bring them early."""

    def add(self, group: Group) -> None:
        """Take a group whose samples are done."""

    def finish(self) -> ScoredGroups:
        """Wait for all outcomes; raises RewardError for one that may not be dropped."""


@dataclass(frozen=True)
class GroupScorer:
    """A scorer with its failure policy."""

    scorer: Scorer
    policy: FailurePolicy

    def begin(self) -> Scoring:
        """The scoring of a step."""
        return GroupScoring(self.scorer, self.policy)


class GroupScoring:
    """Sends groups off in batches as they come, and settles what fails at the end."""

    def __init__(self, scorer: Scorer, policy: FailurePolicy) -> None:
        self.scorer = scorer
        self.policy = policy
        self.metrics = Metrics()
        self._waiting: list[Group] = []
        self._sent: list[tuple[list[Group], Wait]] = []

    @property
    def is_streaming(self) -> bool:
        """See Scoring."""
        return self.scorer.is_streaming

    def add(self, group: Group) -> None:
        """See Scoring. Groups are not cut; small ones wait until they fill a batch, unless
        somebody has nothing to do.
        """
        size = self.scorer.batch_size or math.inf
        if sum(map(len, self._waiting)) + len(group) > size:
            self._send()
        self._waiting.append(group)
        is_full = sum(map(len, self._waiting)) >= size
        if self.is_streaming and (is_full or self.scorer.has_room):
            self._send()

    def finish(self) -> ScoredGroups:
        """See Scoring."""
        self._send()
        good: list[list[Rollout]] = []
        failed: list[tuple[Group, RewardError]] = []
        for groups, wait in self._sent:
            _sort_out(groups, wait(), good, failed)
        for attempt in range(self._num_rounds(failed)):
            failed = self._once_more(failed, good, attempt)
        if failed and not self.policy.drops:
            raise failed[0][1]
        good.sort(key=lambda group: group[0].group_id)
        rollouts = [rollout for group in good for rollout in group]
        check_scores(rollouts)
        add_score_metrics(rollouts, self.metrics)
        if self.policy.drops:
            self.metrics.add("num_dropped_groups", len(failed), reduction="sum")
        rows = {group[0].row_id: str(error) for group, error in failed}
        return ScoredGroups(rollouts, rows, self.metrics)

    def _send(self) -> None:
        if self._waiting:
            groups, self._waiting = self._waiting, []
            self._sent.append((groups, self.scorer.submit(groups)))

    def _num_rounds(self, failed: list[tuple[Group, RewardError]]) -> int:
        """How often what failed is scored again: one bad group fails its whole batch, so dropping
        begins with a second look at each group alone.
        """
        shares_a_batch = any(len(groups) > 1 for groups, _ in self._sent)
        isolates = self.policy.drops and self.scorer.batch_size is not None and shares_a_batch
        return self.policy.num_retries or int(isolates and bool(failed))

    def _once_more(
        self, failed: list[tuple[Group, RewardError]], good: list[list[Rollout]], attempt: int
    ) -> list[tuple[Group, RewardError]]:
        """Score failed groups again, each alone; what still fails."""
        if not failed:
            return failed
        if self.policy.num_retries:
            wait_s = self.policy.retry_wait_s * 2**attempt
            time.sleep(min(wait_s, MAX_RETRY_WAIT_S))
            self.metrics.add("num_reward_retries", len(failed), reduction="sum")
        still: list[tuple[Group, RewardError]] = []
        again = [(group, self.scorer.submit([group])) for group, _ in failed]
        for group, wait in again:
            _sort_out([group], wait(), good, still)
        return still


class SourceScorer:
    """Rewards from a source that scores texts: user code or servers."""

    is_streaming = True

    def __init__(self, source: RewardSource, batch_size: int, *, max_steps: int = 0) -> None:
        """`max_steps`: of the run, for functions that ask how far it is."""
        self.source = source
        self.batch_size: int | None = batch_size
        self.max_steps = max_steps

    @property
    def has_room(self) -> bool:
        """See Scorer; servers take full batches."""
        return self.source.has_room

    def submit(self, groups: Sequence[Group]) -> Wait:
        """See Scorer. An error of a batch is the outcome of all its groups."""
        return self.start(groups).result

    def start(self, groups: Sequence[Group]) -> Future[list[Outcome]]:
        """See Scorer."""
        outcomes: Future[list[Outcome]] = Future()

        def settle(answer: Future[RewardResult]) -> None:
            try:
                outcomes.set_result(_outcomes(groups, answer))
            except CancelledError:  # the source was closed
                outcomes.cancel()

        batch = texts_of([r for group in groups for r in group])
        answer = self.source.submit(replace(batch, max_steps=self.max_steps))
        answer.add_done_callback(settle)
        return outcomes


def texts_of(rollouts: Sequence[Rollout]) -> RewardBatch:
    """Rollouts as a source sees them."""
    return RewardBatch(
        queries=[r.prompt_text + r.response_text for r in rollouts],
        prompts=[r.prompt_text for r in rollouts],
        responses=[r.plain_response for r in rollouts],
        labels=[r.label for r in rollouts],
        columns={
            TRUNCATED_COLUMN: [r.is_truncated for r in rollouts],
            **{name: [r.columns.get(name) for r in rollouts] for name in rollouts[0].columns},
        }
        if rollouts
        else {},
        sample_ids=[r.sample_id for r in rollouts],
        source_prompts=[r.source_prompt for r in rollouts],
        response_ids=[r.token_ids[r.action_mask].tolist() for r in rollouts],
        global_step=max((int(r.weight_versions[-1]) for r in rollouts), default=0),
    )


def _outcomes(groups: Sequence[Group], answer: Future[RewardResult]) -> list[Outcome]:
    try:
        result = answer.result()
    except RewardError as error:
        return [error for _ in groups]
    return _scored_groups(groups, result)


def _scored_groups(groups: Sequence[Group], result: RewardResult) -> list[Outcome]:
    rewards = iter(result.rewards)
    scores = iter(result.scores or [None] * len(result.rewards))
    logs = {name: iter(column) for name, column in result.extra_logs.items()}
    columns = {name: iter(values) for name, values in result.extra_columns.items()}

    def scored(rollout: Rollout) -> Rollout:
        numbers = {name: next(column) for name, column in logs.items()}
        return replace(
            rollout,
            reward=next(rewards),
            score=next(scores),
            extra_logs={name: v for name, v in numbers.items() if v is not None},
            extra_columns={name: next(values) for name, values in columns.items()},
        )

    return [[scored(rollout) for rollout in group] for group in groups]


def _sort_out(
    groups: Sequence[Group],
    outcomes: Sequence[Outcome],
    good: list[list[Rollout]],
    failed: list[tuple[Group, RewardError]],
) -> None:
    for group, outcome in zip(groups, outcomes, strict=True):
        if isinstance(outcome, RewardError):
            failed.append((group, outcome))
        else:
            asked = [rollout.sample_id for rollout in group]
            assert [rollout.sample_id for rollout in outcome] == asked, "samples were lost"
            good.append(outcome)


def check_scores(rollouts: Sequence[Rollout]) -> None:
    """Refuse a step in which some samples have a score: pass rates would mix scores and rewards."""
    without = [rollout.sample_id for rollout in rollouts if rollout.score is None]
    if without and len(without) < len(rollouts):
        raise RewardError(
            f"sample {without[0]} has no score and others of its step have. "
            "Return scores for every sample or for none."
        )


def add_score_metrics(rollouts: Sequence[Rollout], metrics: Metrics) -> None:
    """Note what a user's function or the models said about samples."""
    for rollout in rollouts:
        if rollout.score is not None:
            metrics.add("score", rollout.score)
        for name, value in rollout.extra_logs.items():
            metrics.add(f"extra/{name}", value)  # never mixed with the trainer's own
        for name, value in rollout.reward_parts.items():
            metrics.add(f"reward/{name}", value)
