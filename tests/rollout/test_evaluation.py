"""Pass rates by hand, and their standard errors."""

import math

import pytest

from openrlhf.rollout.evaluation import evaluation_metrics
from openrlhf.utils.metrics import STDERR, Metrics, standard_errors
from tests.helpers.rollouts import rollout


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


def test_a_prompt_of_which_samples_were_left_out_counts_with_those_it_has() -> None:
    scores = [(1.0, 0), (0.0, 0), (0.0, 1)]
    rollouts = [rollout([1], [2], reward=reward, group=group) for reward, group in scores]
    metrics = evaluation_metrics(rollouts, (2, 1))
    assert metrics["eval/eval_default_pass2"] == 0.5
    assert metrics["eval/eval_default_pass1"] == metrics["eval/eval_default_reward"] == 0.25


def test_the_standard_error_of_equal_parts_is_that_of_their_mean() -> None:
    parts = [Metrics() for _ in range(3)]
    for part, value in zip(parts, (1.0, 2.0, 6.0), strict=True):
        part.add("loss", value, weight=5)
        part.add("num_rows", 5, reduction="sum")
    # deviations -2, -1 and 3 of the mean: variance 7, divided by 3 parts
    assert standard_errors(parts) == {"loss" + STDERR: pytest.approx(math.sqrt(7 / 3))}
    assert standard_errors(parts[:1]) == {}
