"""Functions of the user's where the name of a formula stands: `file.py:name` or `module:name`.

A kind of formula has a built-in function whose signature the user's must have, and a trial: before
a run each is called once on a few numbers. What it raises is blamed on the line of its file.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import wraps
from textwrap import shorten
from typing import Any, TypeAlias

import torch
from torch import Tensor

from openrlhf.algorithms.advantages import ESTIMATORS, rloo
from openrlhf.algorithms.policy_loss import POLICY_LOSSES, ClipRange, PolicyLossTerms, ppo_loss
from openrlhf.algorithms.preference_loss import (
    PREFERENCE_LOSSES,
    PairLogps,
    PreferenceOptions,
    dpo,
)
from openrlhf.errors import ConfigError
from openrlhf.utils.user_code import blaming, check_signature, defined_at, import_function

Function: TypeAlias = Callable[..., Any]
MAX_SEEN = 120  # characters of what a function returned


@dataclass(frozen=True)
class Formula:
    """A formula that a user may write."""

    built_in: Mapping[str, Function]  # by name
    like: Function  # one of them, whose parameters the user's function takes
    returns: str  # what must come back, for who returns anything else
    is_right: Callable[[Function], bool]  # calls a function on a few numbers


def _is_right_estimator(function: Function) -> bool:
    """Equal rewards of a group must give numbers too."""
    rewards_B = torch.tensor([1.0, 0.0, 2.0, 2.0, 2.0])
    shaped_B = function(rewards_B, torch.tensor([0, 0, 1, 1, 1]))
    return _has_shape(shaped_B, (5,)) and bool(shaped_B.isfinite().all())


def _is_right_policy_loss(function: Function) -> bool:
    terms = function(
        torch.tensor([-1.0, -2.0, -0.5], requires_grad=True),
        torch.tensor([-1.1, -1.9, -0.5]),
        advantages_N=torch.tensor([1.0, 1.0, -1.0]),
        num_actions_B=torch.tensor([2, 1]),
        clip=ClipRange(),
    )
    is_per_token = isinstance(terms, PolicyLossTerms) and all(_has_shape(v, (3,)) for v in terms)
    return is_per_token and terms.loss_N.requires_grad


def _is_right_preference_loss(function: Function) -> bool:
    sums_2B = torch.tensor([[-4.0, -6.0, -2.0], [-5.0, -3.0, -7.0]])
    lengths_2B = torch.tensor([[3, 4, 2], [4, 2, 5]])
    pairs = PairLogps(sums_2B.clone().requires_grad_(), lengths_2B, sums_2B)
    terms = function(pairs, PreferenceOptions())
    if not (isinstance(terms, tuple) and len(terms) == 2):
        return False
    losses_B, rewards = terms
    return _has_shape(losses_B, (3,)) and losses_B.requires_grad and _has_shape(rewards, (2, 3))


def _has_shape(value: object, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


ESTIMATOR = Formula(
    {name: found.shape for name, found in ESTIMATORS.items()},
    like=rloo,
    returns="a tensor like rewards_B: one finite number a sample, also where a group's are equal",
    is_right=_is_right_estimator,
)
POLICY_LOSS = Formula(
    POLICY_LOSSES,
    like=ppo_loss,
    returns="PolicyLossTerms of openrlhf.algorithms.policy_loss: numbers a token, with a gradient "
    "in loss_N. Compute it from logprobs_N; means and sums over samples are taken behind it",
    is_right=_is_right_policy_loss,
)
PREFERENCE_LOSS = Formula(
    PREFERENCE_LOSSES,
    like=dpo,
    returns="(losses_B, rewards): a loss a pair with a gradient, and a reward a response, (2, B). "
    "Compute both from pairs.sums_2B",
    is_right=_is_right_preference_loss,
)

_loaded: dict[str, Function] = {}  # by file and name: a run has one version of a user's file


def check_function(formula: Formula, name: str) -> None:
    """Load the user's function at `name` anew, if it is no built-in's, and try it; raise
    ConfigError for parameters or results that are not the built-in's, and for what it raises.
    """
    if name in formula.built_in:
        return
    function = import_function(name)
    path = inspect.getsourcefile(function) or name
    if name.rpartition(":")[0].endswith(".py"):
        path = name  # as it was typed
    check_signature(function, formula.like, path=path)

    @wraps(function)
    def blamed(*args: object, **named: object) -> Any:
        with blaming(path, ConfigError):
            return function(*args, **named)

    seen = ""

    def tried(*args: object, **named: object) -> Any:
        nonlocal seen
        given = inspect.signature(formula.like).bind(*args, **named).arguments
        trial = f"in a trial call before the run, with made-up values: {', '.join(_shapes(given))}"
        with blaming(path, ConfigError, during=f" ({trial})"):
            result = function(*args, **named)
        seen = f"{shorten(repr(result), MAX_SEEN, placeholder=' ...')} {trial}"
        return result

    if not formula.is_right(tried):
        called = getattr(function, "__name__", name)
        raise ConfigError(
            f"{defined_at(path, function)}: {called} must return {formula.returns}. It returned "
            f"{seen}."
        )
    _loaded[name] = blamed


def _shapes(values: Mapping[str, object]) -> Iterator[str]:
    """Yield the name and the shape of each tensor: `rewards_B (5,)`, `pairs.sums_2B (2, 3)`."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield f"{name} {tuple(value.shape)}"
        elif is_dataclass(value):
            yield from _shapes({f"{name}.{part}": held for part, held in vars(value).items()})


def find_function(formula: Formula, name: str) -> Function:
    """Return the built-in of this name, or the user's function, which a check has loaded."""
    if name in formula.built_in:
        return formula.built_in[name]
    if name not in _loaded:
        check_function(formula, name)
    return _loaded[name]
