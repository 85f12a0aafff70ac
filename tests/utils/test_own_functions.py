"""A user's own formula takes the place of a built-in one, or is refused with its line."""

import pickle
import re
from pathlib import Path

import pytest
import torch

from openrlhf.algorithms.advantages import group_standardised
from openrlhf.algorithms.preference_loss import PairLogps, PreferenceOptions, dpo
from openrlhf.config.ppo import AdvantageConfig
from openrlhf.errors import ConfigError
from openrlhf.trainer.ppo_utils.experience_maker import estimator_of
from openrlhf.utils.own_functions import (
    ESTIMATOR,
    POLICY_LOSS,
    PREFERENCE_LOSS,
    Formula,
    check_function,
    find_function,
)
from tests.source import ROOT

CODE = """
import torch
from openrlhf.algorithms.policy_loss import ppo_loss
from openrlhf.algorithms.preference_loss import dpo

def grpo(rewards_B, group_ids_B):
    shaped_B = torch.empty_like(rewards_B)
    for group in group_ids_B.unique():
        r = rewards_B[group_ids_B == group]
        shaped_B[group_ids_B == group] = (r - r.mean()) / (r.std() + 1e-9)
    return shaped_B

def one(rewards_B): return rewards_B
def fails(rewards_B, group_ids_B):
    return rewards_B + 1 / int(group_ids_B[0])
def mean(rewards_B, group_ids_B): return rewards_B.mean()
def undefined(rewards_B, group_ids_B):
    return torch.cat([(r - r.mean()) / r.std() for r in (rewards_B[:2], rewards_B[2:])])

def two(logprobs_N, old_logprobs_N): return logprobs_N
def no_gradient(logprobs_N, *args, **named): return ppo_loss(logprobs_N.detach(), *args, **named)

def mine(pairs, options): return dpo(pairs, options)
def more(pairs, options, temperature): return dpo(pairs, options)
def losses_alone(pairs, options): return dpo(pairs, options)[0]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(CODE)
    return path


def test_own_formulas_give_what_the_built_in_ones_do(file: Path) -> None:
    rewards_B, groups_B = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0]), torch.tensor([0, 0, 0, 4, 4])
    shape = estimator_of(AdvantageConfig(estimator=f"{file}:grpo")).shape
    expected = group_standardised(rewards_B, groups_B)
    torch.testing.assert_close(shape(rewards_B, groups_B), expected)
    sums = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]])
    pairs, options = PairLogps(sums, sums.abs(), sums.flip(0)), PreferenceOptions(beta=0.5)
    mine = find_function(PREFERENCE_LOSS, f"{file}:mine")
    assert torch.equal(mine(pairs, options)[0], dpo(pairs, options)[0])


@pytest.mark.parametrize(
    ("formula", "name", "said"),
    [
        (
            ESTIMATOR,
            "one",
            "{file}:13: one(rewards_B) cannot be called as it will be: too many positional "
            "arguments. Write one(rewards_B, group_ids_B).",
        ),
        (
            ESTIMATOR,
            "fails",
            "{file}:15: ZeroDivisionError: division by zero (in a trial call before the run, with "
            "made-up values: rewards_B (5,), group_ids_B (5,))",
        ),
        (
            ESTIMATOR,
            "mean",
            "{file}:16: mean must return a tensor like rewards_B: one finite",
        ),
        (ESTIMATOR, "undefined", "{file}:17: undefined must return a tensor like rewards_B"),
        (
            POLICY_LOSS,
            "two",
            "{file}:20: two(logprobs_N, old_logprobs_N) cannot be called as it will be: got an "
            "unexpected keyword argument 'advantages_N'. Write two(logprobs_N, old_logprobs_N, *, "
            "advantages_N, num_actions_B, clip).",
        ),
        (POLICY_LOSS, "no_gradient", "{file}:21: no_gradient must return PolicyLossTerms"),
        (
            PREFERENCE_LOSS,
            "more",
            "{file}:24: more(pairs, options, temperature) cannot be called as it will be: missing "
            "a required argument: 'temperature'. Write more(pairs, options).",
        ),
        (
            PREFERENCE_LOSS,
            "losses_alone",
            "{file}:25: losses_alone must return (losses_B, ",
        ),
        (PREFERENCE_LOSS, "dpoo", "{file} has no dpoo; found: grpo, one, fails"),
    ],
)
def test_a_formula_that_could_not_run_is_refused(
    formula: Formula, name: str, said: str, file: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said.format(file=file))):
        check_function(formula, f"{file}:{name}")


def test_a_wrong_result_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "est.py"
    file.write_text("def one(r, groups):\n    return r.sum()\n")
    with pytest.raises(ConfigError) as caught:
        check_function(ESTIMATOR, f"{file}:one")
    assert str(caught.value).endswith(
        "a group's are equal. It returned tensor(7.) in a trial call before the run, with made-up "
        "values: rewards_B (5,), group_ids_B (5,)."
    )
    file.write_text("def two(pairs, options):\n    return pairs.lengths_2B.sum()\n")
    shapes = "values: pairs.sums_2B (2, 3), pairs.lengths_2B (2, 3), pairs.ref_sums_2B (2, 3)."
    with pytest.raises(ConfigError, match=re.escape("tensor(20) in a trial call")) as caught:
        check_function(PREFERENCE_LOSS, f"{file}:two")
    assert str(caught.value).endswith(shapes)


def test_the_formulas_of_the_document_work(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    (tmp_path / "formulas.py").write_text(page.partition("```py\n")[2].partition("```")[0])
    for formula, name in (
        (ESTIMATOR, "best_counts"),
        (POLICY_LOSS, "unclipped"),
        (PREFERENCE_LOSS, "squared"),
    ):
        check_function(formula, f"{tmp_path}/formulas.py:{name}")
    best = find_function(ESTIMATOR, f"{tmp_path}/formulas.py:best_counts")
    rewards_B, groups_B = torch.tensor([-1.0, -2.0, 3.0, 5.0]), torch.tensor([0, 0, 1, 1])
    assert best(rewards_B, groups_B).tolist() == [1, 0, 0, 1]


def test_what_a_formula_raises_later_has_the_users_traceback_alone(file: Path) -> None:
    file.write_text("def late(r, groups):\n    return r / len(groups) + [0][len(groups) - 5]\n")
    late = find_function(ESTIMATOR, f"{file}:late")
    with pytest.raises(ConfigError, match=r"own.py:2: IndexError: list index out of range") as info:
        late(torch.ones(7), torch.zeros(7))
    crossed = pickle.loads(pickle.dumps(info.value))  # as from a worker
    first, where, *_, last = crossed.user_traceback.splitlines()
    assert first.startswith("Traceback") and where.startswith(f'  File "{file}", line 2')
    assert crossed.exit_code == 2 and last == "IndexError: list index out of range"


def test_an_edit_counts_from_the_next_check_on(file: Path) -> None:
    ones = (torch.ones(2), torch.zeros(2))
    for factor in (2, 3):
        file.write_text(f"def times(r, groups):\n    return {factor} * r\n")
        check_function(ESTIMATOR, f"{file}:times")
        assert find_function(ESTIMATOR, f"{file}:times")(*ones).tolist() == [factor, factor]
