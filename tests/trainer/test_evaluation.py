"""Pass rates by hand, which evaluations are compared, and when a policy got worse."""

import pytest

from openrlhf.trainer.ppo_utils.evaluation import evaluation_metrics, has_fallen, noteworthy
from tests.trainer.test_experience import rollout


def test_pass_rates_are_keyed_by_row() -> None:
    # Two prompts, two samples each: scores 1, 0 and 0, 0.
    scores = [(1.0, 0), (0.0, 0), (0.0, 1), (0.0, 1)]
    rollouts = [rollout([1], [2], reward=reward, group=group) for reward, group in scores]
    metrics = evaluation_metrics(rollouts, (2, 1))
    assert metrics["eval/eval_default_pass2"] == 0.5
    assert metrics["eval/eval_default_pass1"] == 0.25
    # Means of the prompts 0.5 and 0: standard deviation 0.3536, over the root of 2.
    assert metrics["eval/eval_default_pass1_stderr"] == pytest.approx(0.25)
    assert metrics["eval/eval_default_pass2_stderr"] == pytest.approx(0.5)
    assert metrics["eval/eval_default_reward"] == 0.25
    assert metrics["eval/response_length"] == 1.0


def evaluations(*values: float, stderr: float | None = 0.01) -> list[dict[str, float]]:
    error = {} if stderr is None else {"p_stderr": stderr}
    return [{"step": step, "p": value, **error} for step, value in enumerate(values)]


def test_the_first_the_best_and_the_last_evaluation_are_kept() -> None:
    steps = [[found["step"] for found in noteworthy(evaluations(*v), "p")] for v in (
        (0.5,), (0.5, 0.6), (0.5, 0.75, 0.75, 0.6), (0.5, 0.4, 0.3)
    )]  # fmt: skip
    assert steps == [[0, 0, 0], [0, 1, 1], [0, 1, 3], [0, 0, 2]]
    assert noteworthy([{"step": 0, "other": 1.0}, *evaluations(0.5)], "p") == evaluations(0.5) * 3


@pytest.mark.parametrize(
    ("value", "stderr", "expected"),
    # Twice the standard error of a difference of two numbers with 0.01 each: 0.0283.
    [(0.475, 0.01, False), (0.465, 0.01, True), (0.6, 0.01, False), (0.1, None, False)],
)
def test_a_fall_is_more_than_two_standard_errors(
    value: float, stderr: float | None, expected: bool
) -> None:
    assert has_fallen(*evaluations(0.5, value, stderr=stderr), "p") == expected
