"""How rollouts get their rewards: group by group while others still generate, and what becomes of
groups whose reward cannot be had.

A group is the samples of one prompt; its outcome is its scored rollouts, or a RewardError.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
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

    def start(self, groups: Sequence[Group]) -> Future[list[Outcome]]:
        """Start scoring groups; the result has one outcome a group."""


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
class GroupScorer:
    """A scorer with its failure policy."""

    scorer: Scorer
    policy: FailurePolicy


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

    def start(self, groups: Sequence[Group]) -> Future[list[Outcome]]:
        """Start scoring; an error of a batch is the outcome of all its groups."""
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
