"""The policy loss of a run: one of the package, or a function of the user's, tried before a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

import torch

from openrlhf.algorithms.policy_loss import (
    POLICY_LOSSES,
    ClipRange,
    PolicyLoss,
    PolicyLossTerms,
    ppo_loss,
)
from openrlhf.errors import ConfigError
from openrlhf.utils.user_code import blaming, import_function


def find_policy_loss(name: str) -> PolicyLoss:
    """Return one of POLICY_LOSSES, or the user's function at `file.py:name` or `module:name`.

    What a user's function raises becomes a ConfigError with the line of its file.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    found = import_function(name)
    if isinstance(found, PolicyLoss):
        return found
    function = cast(Callable[..., PolicyLossTerms], found)
    path = _file_of(name, function)

    def terms(*tensors: torch.Tensor, **named: object) -> PolicyLossTerms:
        with blaming(path, ConfigError):
            return function(*tensors, **named)

    return PolicyLoss(terms)


def check_policy_loss(name: str) -> None:
    """Raise ConfigError where a user's loss does not take what `ppo_loss` takes, fails on three
    tokens of two samples, or returns something else than PolicyLossTerms.
    """
    if name in POLICY_LOSSES:
        return
    tokens = {"advantages_N": torch.tensor([1.0, 1.0, -1.0]), "num_actions_B": torch.tensor([2, 1])}
    named = {**tokens, "clip": ClipRange()}
    function = import_function(name)
    if not isinstance(function, PolicyLoss):
        try:
            inspect.signature(function).bind(None, None, **named)
        except TypeError as error:
            line = getattr(getattr(function, "__code__", None), "co_firstlineno", "")
            raise ConfigError(
                f"{_file_of(name, function)}:{line}: --policy_loss_type {name} does not take the "
                f"arguments of a loss ({error}). Take "
                f"{', '.join(inspect.signature(ppo_loss).parameters)}, the last three by name."
            ) from error
    logprobs_N = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    terms = find_policy_loss(name).terms(logprobs_N, torch.tensor([-1.1, -1.9, -0.5]), **named)
    if not isinstance(terms, PolicyLossTerms):
        raise ConfigError(
            f"{name} returns a {type(terms).__name__}. Return PolicyLossTerms, which "
            "openrlhf.algorithms.policy_loss has."
        )
    if (
        any(getattr(value, "shape", ()) != (3,) for value in terms)
        or not terms.loss_N.requires_grad
    ):
        raise ConfigError(
            f"{name} must return numbers a token, with a gradient in loss_N. Compute it from "
            "logprobs_N; means and sums over samples are taken behind it."
        )


def _file_of(name: str, function: Callable[..., object]) -> str:
    """Return the user's file as it was typed, or that of the function's module."""
    place = name.rpartition(":")[0]
    return place if place.endswith(".py") else inspect.getsourcefile(function) or place
