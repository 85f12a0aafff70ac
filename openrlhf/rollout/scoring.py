"""Rewards of rollouts: group by group while others still generate, and the handling of groups
without one.

A group is the samples of one prompt; its outcome is its scored rollouts, or a RewardError.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from openrlhf.config.generation import RewardSourceConfig
from openrlhf.errors import RewardError
from openrlhf.rewards.base import (
    TRUNCATED_COLUMN,
    RewardBatch,
    RewardResult,
    RewardSource,
    Shown,
)
from openrlhf.utils.console import notice, warn, warn_once
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.samples import printable

NUM_RETRIES = 3  # of plain "retry"
MAX_RETRY_WAIT_S = 30.0
LABEL_NAMES = ("labels", "ground_truth", "ground_truths")  # arguments of reward functions

Group = Sequence[Rollout]
Outcome = list[Rollout] | RewardError


class Scorer:
    """Whatever gives rollouts their rewards: user code, servers, models."""

    is_streaming = True  # groups may be scored while others still generate
    # Most samples of one submission, which fail together; None: any number.
    batch_size: int | None = None

    @property
    def has_capacity(self) -> bool:
        """Return True if a submission of any size would be begun with at once."""
        return False

    async def score(self, groups: Sequence[Group]) -> list[Outcome]:
        """Return one outcome a group."""
        raise NotImplementedError


@dataclass(frozen=True)
class FailurePolicy:
    """Handling of groups without a reward: `--reward_failure`.

    Example: `FailurePolicy(step_size=128, drops=True, max_dropped=0.1)`
    """

    step_size: int  # groups of a step, in however many calls it is made
    drops: bool = False  # leave them out, up to `max_dropped` of a step; else the run ends
    num_retries: int = 0
    max_dropped: float = 0.5
    retry_wait_s: float = 1.0  # before the first retry; doubles with each

    @classmethod
    def of(cls, reward: RewardSourceConfig, step_size: int) -> "FailurePolicy":
        """Return the policy of a run: "fail", "drop_group", "retry" or "retry(5)"."""
        name, num_retries = reward.failure, 0
        if name.startswith("retry"):
            num_retries = int(name[6:-1] or NUM_RETRIES)
        return cls(
            step_size=step_size,
            drops=name == "drop_group",
            num_retries=num_retries,
            max_dropped=reward.max_dropped,
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


class GroupScorer:
    """Scores groups as they come, in batches; what has no reward is tried again or fails."""

    def __init__(self, scorer: Scorer | None, policy: FailurePolicy) -> None:
        """`scorer` None: samples come with their rewards, from an environment."""
        self.scorer = scorer
        self.policy = policy
        self._num_expected = 0  # groups that are sampled now, and could fill up a batch
        self._waiting: list[PendingGroup] = []
        self._num_sent = 0  # batches that have no outcome yet
        self.num_unscored = 0  # groups that wait for their rewards

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Sample a group inside; a batch may wait for it."""
        self._num_expected += 1
        try:
            yield
        finally:
            self._num_expected -= 1
            asyncio.get_running_loop().call_soon(self._send)  # when no other group is at hand

    async def score(self, group: Group, metrics: Metrics) -> list[Rollout]:
        """Return the scored rollouts of a group, without those that no reward applies to; raises
        RewardError after its retries.
        """
        if self.scorer is None:
            return list(group)
        self.num_unscored += 1
        try:
            scored = await self._scored(PendingGroup(group), metrics)
        finally:
            self.num_unscored -= 1
        if num_left_out := len(group) - len(scored):
            metrics.add("num_unscored_samples", num_left_out, reduction="sum")
        return scored

    async def _scored(self, pending: "PendingGroup", metrics: Metrics) -> list[Rollout]:
        group = pending.group
        self._waiting.append(pending)
        asyncio.get_running_loop().call_soon(self._send)
        outcome = await pending.outcome
        for attempt in range(self.policy.num_retries):
            if isinstance(outcome, RewardError):
                metrics.add("num_reward_retries", 1, reduction="sum")
                wait_s = self.policy.retry_wait_s * 2**attempt
                await asyncio.sleep(min(wait_s, MAX_RETRY_WAIT_S))
                outcome = await self._start([PendingGroup(group)])
        if isinstance(outcome, RewardError):
            if not (self.policy.drops and pending.shares_batch):
                raise outcome
            # Another group of the batch may have failed them all.
            outcome = await self._start([PendingGroup(group)])
            if isinstance(outcome, RewardError):
                raise outcome
        wanted = {rollout.sample_id for rollout in group}
        assert wanted.issuperset(r.sample_id for r in outcome), "these are samples of others"
        return outcome

    def _send(self) -> None:
        """Score what may be scored now, in batches.

        A busy scorer gets full batches, and an idle one does not wait: a batch that is not full
        waits only while the scorer is busy and more groups may come. Models take any number: they
        score all groups that came since their last forward. Those that may not run while others
        generate wait until generation ends.
        """
        self._waiting = [pending for pending in self._waiting if not pending.outcome.done()]
        while batch := self._next_batch():
            self._waiting = self._waiting[len(batch) :]
            self._start(batch)

    def _next_batch(self) -> "list[PendingGroup]":
        scorer = self.scorer
        if scorer is None or (not scorer.is_streaming and self._num_expected):
            return []
        size = scorer.batch_size
        if size is None:
            return [] if self._num_sent else list(self._waiting)
        batch: list[PendingGroup] = []
        num_samples = 0
        for pending in self._waiting:
            # An evaluation beside training may have other columns, and a call has one set of them.
            is_like = not batch or pending.columns == batch[0].columns
            if batch and not (is_like and num_samples + len(pending.group) <= size):
                return batch
            batch.append(pending)
            num_samples += len(pending.group)
        is_busy = self._num_sent > 0 and not scorer.has_capacity
        may_wait = is_busy and self._num_expected > 0
        return [] if may_wait and num_samples < size else batch

    def _start(self, batch: "list[PendingGroup]") -> asyncio.Future[Outcome]:
        """Score a batch; return the first outcome of it."""
        assert self.scorer is not None
        self._num_sent += 1
        scoring = asyncio.ensure_future(self.scorer.score([pending.group for pending in batch]))
        scoring.add_done_callback(partial(self._receive, batch))
        return batch[0].outcome

    def _receive(self, batch: "list[PendingGroup]", scoring: asyncio.Future[list[Outcome]]) -> None:
        assert self.scorer is not None
        self._num_sent -= 1
        if scoring.cancelled():  # the source was closed
            for pending in batch:
                pending.outcome.cancel()
            return
        error = scoring.exception()
        for k, pending in enumerate(batch):
            pending.shares_batch = len(batch) > 1 and self.scorer.batch_size is not None
            if pending.outcome.done():  # nobody waits any more
                continue
            if error is None:
                pending.outcome.set_result(scoring.result()[k])
            else:
                pending.outcome.set_exception(error)
        self._send()


class PendingGroup:
    """A group that waits for its rewards."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.columns = {name for rollout in group[:1] for name in rollout.columns}
        self.shares_batch = False


class SourceScorer(Scorer):
    """Rewards from a source that scores texts: user code or servers."""

    def __init__(
        self,
        source: RewardSource,
        batch_size: int,
        *,
        max_steps: int = 0,
        reads_images: bool = False,
    ) -> None:
        """`max_steps`: of the run, for functions that ask how far it is; `reads_images`: they get
        images, which no sample of a batch may have.
        """
        self.source = source
        self.batch_size = batch_size
        self.max_steps = max_steps
        self.reads_images = reads_images
        self._has_shown = False

    @property
    def has_capacity(self) -> bool:
        """Return False for servers, which take full batches."""
        return self.source.has_capacity

    async def score(self, groups: Sequence[Group]) -> list[Outcome]:
        """Return one outcome a group; an error of a batch is that of all its groups."""
        rollouts = [r for group in groups for r in group]
        batch = replace(texts_of(rollouts), max_steps=self.max_steps)
        if self.reads_images:
            batch = replace(batch, images=[r.images for r in rollouts])
        try:
            if not self._has_shown:
                self._has_shown = True
                say_arguments(await self.source.shown(batch), batch)
            result = await self.source.score(batch)
        except RewardError as error:
            return [error for _ in groups]
        if result.unread:
            warn_once(
                f"{self.source.name}: keys of the answer that are not read: "
                f"{', '.join(result.unread)}. Numbers that are to be logged go into extra_logs."
            )
        return _scored_groups(groups, result, self.source.name)


def say_arguments(shown: Shown, batch: RewardBatch) -> None:
    """Print what functions are given of a sample, and of several whose scores count; warn where one
    reads labels that are empty.
    """
    if len(shown) > 1:
        notice(
            "scores, which pass rates, --dynamic_filtering and the best model follow, are those of "
            f"the first function that applies to a sample: {', '.join(shown)}"
        )
    for function, arguments in shown.items():
        lines = [f"  {name}: {printable(value)}" for name, value in arguments.items()]
        if lines:
            notice("\n".join([f"arguments of {function} for {batch.name_of(0)}", *lines]))
        read = [name for name in LABEL_NAMES if name in arguments]
        if any(arguments[name] == "''" for name in read) and not any(batch.labels):
            columns = ", ".join(name for name in batch.columns if name != TRUNCATED_COLUMN)
            warn(
                f"{function} reads {read[0]}, and every label is empty. Name their column with "
                f"--label_key: {columns or 'the rows have no other column'}."
            )


def texts_of(rollouts: Sequence[Rollout]) -> RewardBatch:
    """Return rollouts as a source sees them."""
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


def _scored_groups(groups: Sequence[Group], result: RewardResult, source: str) -> list[Outcome]:
    """Return the samples of each group that have a reward, or an error where none has."""
    rewards = iter(result.rewards)
    scores = iter(result.scores or [None] * len(result.rewards))
    logs = {name: iter(column) for name, column in result.extra_logs.items()}
    columns = {name: iter(values) for name, values in result.extra_columns.items()}
    parts = {name: iter(column) for name, column in result.parts.items()}

    def scored(rollout: Rollout) -> Rollout:
        numbers = {name: next(column) for name, column in logs.items()}
        shares = {name: next(column) for name, column in parts.items()}
        return replace(
            rollout,
            reward=next(rewards),
            score=next(scores),
            extra_logs={name: v for name, v in numbers.items() if v is not None},
            extra_columns={name: next(values) for name, values in columns.items()},
            reward_parts={name: v for name, v in shares.items() if v is not None},
        )

    outcomes: list[Outcome] = []
    for group in groups:
        kept = [r for r in map(scored, group) if r.reward is not None]
        names = ", ".join(rollout.sample_id for rollout in group)
        nothing = RewardError(
            f"{source}: no reward function applies to any sample of a prompt ({names}): all "
            "returned None. Return a number for one of them at least."
        )
        outcomes.append(kept or nothing)
    return outcomes


def check_scores(rollouts: Sequence[Rollout]) -> None:
    """Refuse a step in which some samples have a score: pass rates would mix scores and rewards."""
    without = [rollout.sample_id for rollout in rollouts if rollout.score is None]
    if without and len(without) < len(rollouts):
        raise RewardError(
            f"sample {without[0]} has no score and others of its step have. "
            "Return scores for every sample or for none; an environment from each step, since an "
            "episode may be cut behind any."
        )


def score_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Return the means of what reward functions, models or agents said about samples; the parts of
    an agent's episode share it.
    """
    metrics = Metrics()
    for rollout in {r.episode_id or r.sample_id: r for r in rollouts}.values():
        if rollout.score is not None:
            metrics.add("score", rollout.score)
        for name, value in rollout.extra_logs.items():
            metrics.add(f"extra/{name}", value)  # never mixed with the trainer's own
        for name, value in rollout.reward_parts.items():
            metrics.add(f"reward/{name}", value)
    return metrics
