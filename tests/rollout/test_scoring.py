"""Groups are scored as they come; what has no reward ends the run, is tried again or is dropped."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
import torch

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import RewardError
from openrlhf.rewards.base import RewardBatch, RewardResult, Shown, checked_result
from openrlhf.rollout.scoring import (
    FailurePolicy,
    GroupScorer,
    Scorer,
    SourceScorer,
    score_metrics,
)
from openrlhf.trainer.ppo_utils.model_scorer import ModelScorer
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout

FAIL = FailurePolicy(4)
DROP = FailurePolicy(4, drops=True)
Answers = Callable[[RewardBatch], object]


@dataclass
class Source:
    """Answers batches at once, in this thread; keeps which samples each had."""

    answers: Answers
    asked: list[list[str]] = field(default_factory=list)
    has_capacity = False

    name = "rewards"

    async def shown(self, batch: RewardBatch) -> Shown:
        return {}

    async def score(self, batch: RewardBatch) -> RewardResult:
        self.asked.append(list(batch.sample_ids))
        return checked_result(self.answers(batch), batch=batch, source="s")

    def close(self) -> None: ...


def group(index: int, size: int = 2) -> list[Rollout]:
    return [
        Rollout(
            sample_id=f"{index}/{k}",
            group_id=index,
            row_id=100 + index,
            token_ids=torch.tensor([7, 8, 9]),
            action_mask=torch.tensor([False, True, True]),
            logprobs=torch.zeros(2),
            weight_versions=torch.zeros(2, dtype=torch.int32),
            finish_reason="stop",
            prompt_text="p",
            response_text=f"r{index}<|end|>",
            plain_response=f"r{index}",
            label=index,
        )
        for k in range(size)
    ]


def by_label(batch: RewardBatch) -> object:
    return [float(str(label)) for label in batch.labels]


def failing_for(*bad: int) -> Answers:
    """One reward a sample, unless a sample of one of these groups is in the batch."""

    def answer(batch: RewardBatch) -> object:
        for label in batch.labels:
            if label in bad:
                raise RewardError(f"cannot score {label}")
        return by_label(batch)

    return answer


class Scored(NamedTuple):
    rollouts: list[Rollout]
    failed: dict[int, str]
    metrics: Metrics


def run(
    source: Source, groups: Sequence[list[Rollout]], policy: FailurePolicy, batch_size: int = 4
) -> Scored:
    """Score groups that are there at the same time; the first error is raised where none may be."""
    return score_with(SourceScorer(source, batch_size), groups, policy)


def score_with(scorer: Scorer, groups: Sequence[list[Rollout]], policy: FailurePolicy) -> Scored:
    metrics = Metrics()

    async def score_all() -> list[list[Rollout] | BaseException]:
        scoring = GroupScorer(scorer, policy)
        work = [scoring.score(one, metrics) for one in groups]
        return await asyncio.gather(*work, return_exceptions=True)

    rollouts: list[Rollout] = []
    failed: dict[int, str] = {}
    for one, outcome in zip(groups, asyncio.run(score_all()), strict=True):
        if isinstance(outcome, BaseException):
            if not policy.drops:
                raise outcome
            failed[one[0].row_id] = str(outcome)
        else:
            rollouts += outcome
    return Scored(rollouts, failed, metrics)


@pytest.mark.parametrize(("reads_images", "images"), [(True, [(), ()]), (False, ())])
def test_a_source_gets_images_in_a_run_that_reads_some(reads_images, images) -> None:
    seen: list[RewardBatch] = []
    source = Source(lambda batch: seen.append(batch) or [0.0] * 2)
    score_with(SourceScorer(source, 4, reads_images=reads_images), [group(0)], DROP)
    assert [batch.images for batch in seen] == [images]


def test_a_source_sees_the_columns_of_the_row_and_which_responses_were_cut() -> None:
    seen: list[RewardBatch] = []
    cut = replace(group(0)[0], finish_reason="length", columns={"level": 3})
    run(Source(lambda batch: seen.append(batch) or [0.0] * 2), [[cut, group(0)[1]]], DROP)
    [batch] = seen
    assert batch.columns == {"is_truncated": [True, False], "level": [3, None]}
    assert (batch.queries[0], batch.prompts[0], batch.responses[0]) == (
        "pr0<|end|>",
        "p",
        "r0",
    )


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "sizes"),
    [(3, 4, [3, 3, 3]), (8, 4, [8, 8, 8]), (1, 2, [2, 1]), (2, 1, [2, 2, 2])],
)
def test_groups_are_not_cut(num_samples: int, batch_size: int, sizes: list[int]) -> None:
    source = Source(by_label)
    run(source, [group(i, num_samples) for i in range(3)], FAIL, batch_size)
    assert [len(ids) for ids in source.asked] == sizes


def test_rows_of_other_columns_are_scored_apart() -> None:
    """As those of an evaluation beside training: what one row lacks is no column of the other's."""
    seen: list[RewardBatch] = []
    plain, told = group(0), [replace(r, columns={"level": 3}) for r in group(1)]
    run(Source(lambda batch: seen.append(batch) or by_label(batch)), [plain, told, plain], FAIL, 8)
    own = [{name: c for name, c in b.columns.items() if name != "is_truncated"} for b in seen]
    assert own == [{}, {"level": [3, 3]}, {}]


def test_a_group_without_reward_is_dropped_and_its_neighbours_are_kept() -> None:
    source = Source(failing_for(1))
    scored = run(source, [group(i) for i in range(4)], DROP)
    assert [r.group_id for r in scored.rollouts] == [0, 0, 2, 2, 3, 3]
    assert scored.failed == {101: "cannot score 1"}
    # The batch of groups 0 and 1 failed; then each was asked for alone.
    assert source.asked[2:] == [["0/0", "0/1"], ["1/0", "1/1"]]


def test_failures_are_tried_again_as_often_as_asked() -> None:
    num_calls = 0

    def third_time_lucky(batch: RewardBatch) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 3:
            raise RewardError("not yet")
        return by_label(batch)

    policy = FailurePolicy(4, num_retries=2, retry_wait_s=0.01)
    scored = run(Source(third_time_lucky), [group(5)], policy)
    assert [r.reward for r in scored.rollouts] == [5.0, 5.0]
    assert scored.metrics["num_reward_retries"] == 2
    num_calls = 0
    with pytest.raises(RewardError, match="not yet"):
        run(
            Source(third_time_lucky), [group(5)], FailurePolicy(4, num_retries=1, retry_wait_s=0.01)
        )


def test_the_policy_is_read_from_the_flag() -> None:
    def policy(flags: str) -> FailurePolicy:
        words = f"--pretrain m --prompt_data d --remote_rm_url r.py {flags}"
        return FailurePolicy.of(parse_config(PPOConfig, words.split()).config.reward, 4)

    fail = FailurePolicy(4, max_dropped=0.01)
    assert policy("--reward_failure fail") == fail
    dropping = FailurePolicy(4, drops=True, max_dropped=0.1)
    assert policy("--reward_failure drop_group --reward_max_dropped 0.1") == dropping
    assert policy("--reward_failure retry(12)") == replace(fail, num_retries=12)
    assert policy("--reward_failure retry") == replace(fail, num_retries=3)


def forward(values: list[float]) -> object:
    """A reward model that answers this."""

    return lambda experience: lambda: torch.tensor(values)


@pytest.mark.parametrize("in_turn", [False, True])
def test_several_models_add_up_with_their_weights_and_are_logged_one_by_one(
    in_turn: bool,
) -> None:
    models = {"helpful": forward([1.0, 2.0, 3.0]), "safe": forward([0.5, 0.0, -4.0])}
    scorer = ModelScorer(models, [1.0, 0.5], in_turn=in_turn)  # type: ignore[arg-type]
    scored = score_with(scorer, [group(0, 2), group(1, 1)], FAIL)
    assert [r.reward for r in scored.rollouts] == [1.25, 2.0, 1.0]
    metrics = score_metrics(scored.rollouts)
    assert metrics["reward/helpful"] == pytest.approx(2.0)
    assert metrics["reward/safe"] == pytest.approx(-3.5 / 3)


def test_a_model_that_answers_nan_fails_that_group_alone() -> None:
    scorer = ModelScorer({"m": forward([3.0, float("nan"), 1.0, 1.0])})  # type: ignore[dict-item]
    [(row, error)] = score_with(scorer, [group(0), group(1)], DROP).failed.items()
    assert (row, error) == (100, "sample 0/1: the reward model m answered nan")


def test_keys_of_an_answer_that_are_not_read_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    source = Source(lambda batch: {"rewards": by_label(batch), "speed": 3})
    run(source, [group(1)], FAIL)
    assert "rewards: keys of the answer that are not read: speed." in capsys.readouterr().err


def test_a_source_that_is_closed_meanwhile_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Closed(Source):
        async def score(self, batch: RewardBatch) -> RewardResult:
            raise asyncio.CancelledError

    async def score_two() -> list[object]:
        scorer = GroupScorer(SourceScorer(Closed(by_label), 2), FailurePolicy(4))
        scored = (scorer.score(group(k), Metrics()) for k in range(2))
        return await asyncio.gather(*scored, return_exceptions=True)

    assert [type(outcome) for outcome in asyncio.run(score_two())] == [asyncio.CancelledError] * 2
    assert not caplog.records
