"""The ledger balances, and says so when it does not."""

from __future__ import annotations

import pytest

from openrlhf.trainer.ppo_utils.evaluation import evaluation_metrics
from openrlhf.trainer.ppo_utils.ledger import Ledger
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


def test_a_vanished_prompt_breaks_the_balance() -> None:
    ledger = Ledger()
    ledger.draw([(0, 1)])
    ledger.pending.clear()
    with pytest.raises(AssertionError, match="out of balance"):
        ledger.check()


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
    assert metrics["eval/response_length"] == 1.0
