"""The ledger balances, and says so when it does not."""

from __future__ import annotations

import pytest

from openrlhf.rollout.ledger import Ledger
from openrlhf.trainer.ppo_utils.evaluation import (
    Evaluation,
    evaluation_metrics,
    has_fallen,
    noteworthy,
)
from tests.trainer.test_experience import rollout


def test_every_drawn_prompt_is_settled_once() -> None:
    ledger = Ledger()
    ledger.draw([(0, 1), (0, 2), (0, 3)])
    ledger.settle([(0, 1)], "trained")
    ledger.settle([(0, 2)], "filtered:equal rewards")
    ledger.check()
    assert ledger.pending == {(0, 3)}
    with pytest.raises(AssertionError, match="no open entry"):
        ledger.settle([(0, 1)], "trained")
    with pytest.raises(AssertionError, match="drawn twice"):
        ledger.draw([(0, 3)])


def test_pass_rates_are_keyed_by_row() -> None:
    # Two prompts, two samples each: scores 1, 0 and 0, 0.
    rollouts = [
        rollout([1], [2], reward=1.0, group=0),
        rollout([1], [2], reward=0.0, group=0),
        rollout([1], [2], reward=0.0, group=1),
        rollout([1], [2], reward=0.0, group=1),
    ]
    metrics = evaluation_metrics(rollouts, 2)
    assert metrics["eval/eval_default_pass2"] == 0.5
    assert metrics["eval/eval_default_pass1"] == 0.25
    # Means of the prompts 0.5 and 0: standard deviation 0.3536, over the root of 2.
    assert metrics["eval/eval_default_pass1_stderr"] == pytest.approx(0.25)
    assert metrics["eval/eval_default_pass2_stderr"] == pytest.approx(0.5)
    assert metrics["eval/response_length"] == 1.0


def evaluations(*values: float, stderr: float | None = 0.01) -> list[Evaluation]:
    return [Evaluation("p", step, value, stderr) for step, value in enumerate(values)]


def test_the_first_the_best_and_the_last_evaluation_are_kept() -> None:
    steps = [[found.step for found in noteworthy(evaluations(*v))] for v in (
        (0.5,), (0.5, 0.6), (0.5, 0.75, 0.75, 0.6), (0.5, 0.4, 0.3)
    )]  # fmt: skip
    assert steps == [[0, 0, 0], [0, 1, 1], [0, 1, 3], [0, 0, 2]]


@pytest.mark.parametrize(
    ("value", "stderr", "expected"),
    # Twice the standard error of a difference of two numbers with 0.01 each: 0.0283.
    [(0.475, 0.01, False), (0.465, 0.01, True), (0.6, 0.01, False), (0.1, None, False)],
)
def test_a_fall_is_more_than_two_standard_errors(
    value: float, stderr: float | None, expected: bool
) -> None:
    assert has_fallen(*evaluations(0.5, value, stderr=stderr)) == expected
