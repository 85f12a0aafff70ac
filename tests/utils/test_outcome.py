"""Which evaluations are compared, when a policy got worse, and what a run says at its end."""

import pytest

from openrlhf.utils.metrics import STDERR
from openrlhf.utils.outcome import (
    has_fallen,
    noteworthy,
    reward_alone,
    say_outcome,
    taught_nothing,
)


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


def test_the_end_of_a_run_says_which_loss_was_the_lowest_and_that_it_rose(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "eval/gpt_loss"
    records = [
        {"step": step, name: loss, name + STDERR: 0.1, "loss": 7.0}
        for step, loss in ((2, 2.0), (4, 1.0), (6, 1.5))
    ]
    say_outcome(name, records, records, where=lambda step: f"ckpt/global_step{step}")
    said = capsys.readouterr()
    assert said.out == (
        "gpt_loss: first 2.000 ±0.100 (step 2), best 1.000 ±0.100 (step 4, ckpt/global_step4), "
        "last 1.500 ±0.100 (step 6)\n"
    )
    assert said.err == (
        "warning: the model got worse: gpt_loss rose from 1.000 ±0.100 at step 4 to 1.500 ±0.100 "
        "at step 6, by more than two standard errors. The model of step 4: ckpt/global_step4.\n"
    )


def test_a_fall_on_one_of_several_data_sources_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    first, other, same = "eval/eval_a_pass1", "eval/eval_b_pass1", "eval/eval_c_pass1"
    rates = {first + STDERR: 0.05, other + STDERR: 0.05, same + STDERR: 0.05, same: 0.5}
    records = [
        {"step": 0, first: 0.5, other: 0.25} | rates,
        {"step": 4, first: 0.75, other: 0.75} | rates,
        {"step": 6, "reward": 0.5},
        {"step": 8, first: 1, other: 0} | rates,
    ]
    say_outcome(first, [records[0], records[-1]], records, where=str)
    assert capsys.readouterr().err == (
        "warning: the model got worse: b_pass1 fell from 0.750 ±0.050 at step 4 to 0.000 ±0.050 "
        "at step 8, by more than two standard errors. The model of step 4: 4.\n"
    )


def test_without_evaluations_the_best_step_of_training_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = [{"step": 1, "reward": 0.5, "loss": 1.0}, {"step": 2, "reward": 0.25, "loss": 0.5}]
    say_outcome(None, [], records, where=str)
    assert capsys.readouterr().out == "reward of a step: best 0.5 (step 1), last 0.25 (step 2)\n"


def test_steps_that_taught_nothing_are_counted_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spreads = (0.0, 0.5, 1e-9, 0.25)
    records = [{"step": 0, "eval/p": 1.0}]
    records += [
        {"step": step, "reward": 0.5, "group_reward_std": spread}
        for step, spread in enumerate(spreads, start=1)
    ]
    told = "2 of 4 logged steps taught nothing: all samples of every prompt got the same reward"
    say_outcome(None, [], records, where=str)
    assert capsys.readouterr().out.splitlines()[0] == f"hint: {told}"
    assert taught_nothing(records) == told
    assert taught_nothing(records[2:3]) == ""


def test_a_reward_that_rises_while_the_score_stays_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rewards = [0.1, 0.2, 0.1, 0.3, 0.4, 0.5, 0.7, 0.8, 0.7]
    stays, rises = [0.2, 0.3, 0.2] * 3, [0.2, 0.3, 0.2, 0.4, 0.5, 0.4, 0.6, 0.7, 0.6]

    def said(rewards: list[float], scores: list[float]) -> str:
        pairs = enumerate(zip(rewards, scores, strict=True))
        return reward_alone([{"step": k, "reward": r, "score": s} for k, (r, s) in pairs])

    assert said(rewards, stays).startswith(
        "the reward rose from 0.133 to 0.733, and the score, which is not trained on, went from "
        "0.233 to 0.233: "
    )
    assert said(rewards, rises) == said(stays, stays) == said(rewards[:8], stays[:8]) == ""
    assert said(rewards, [1.0] * 9) == ""  # every response is right: it cannot rise
    assert reward_alone([{"step": k, "reward": r} for k, r in enumerate(rewards)]) == ""
    pairs = enumerate(zip(rewards, stays, strict=True))
    say_outcome(None, [], [{"step": k, "reward": r, "score": s} for k, (r, s) in pairs], where=str)
    assert "hint: the reward rose from 0.133 to 0.733" in capsys.readouterr().out
