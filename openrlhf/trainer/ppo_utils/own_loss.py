"""The policy loss of a run: one of the package, or a function of the user's, tried before a run."""

import inspect
from collections.abc import Callable
from typing import cast

import torch

from openrlhf.algorithms.policy_loss import POLICY_LOSSES, ClipRange, PolicyLossTerms
from openrlhf.errors import ConfigError
from openrlhf.utils.user_code import blaming, import_function


def find_policy_loss(name: str) -> Callable[..., PolicyLossTerms]:
    """Return one of POLICY_LOSSES, or the user's function at `file.py:name` or `module:name`.

    What a user's function raises becomes a ConfigError with the line of its file.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    function = cast(Callable[..., PolicyLossTerms], import_function(name))
    path = inspect.getsourcefile(function) or name

    def terms(*tensors: torch.Tensor, **named: object) -> PolicyLossTerms:
        with blaming(path, ConfigError):
            return function(*tensors, **named)

    return terms


def check_policy_loss(name: str) -> None:
    """Raise ConfigError where a user's loss fails on three tokens of two samples, or returns
    something else than PolicyLossTerms with a gradient.
    """
    if name in POLICY_LOSSES:
        return
    terms = find_policy_loss(name)(
        torch.tensor([-1.0, -2.0, -0.5], requires_grad=True),
        torch.tensor([-1.1, -1.9, -0.5]),
        advantages_N=torch.tensor([1.0, 1.0, -1.0]),
        num_actions_B=torch.tensor([2, 1]),
        clip=ClipRange(),
    )
    is_per_token = isinstance(terms, PolicyLossTerms) and all(
        getattr(value, "shape", ()) == (3,) for value in terms
    )
    if not (is_per_token and terms.loss_N.requires_grad):
        raise ConfigError(
            f"{name} must return PolicyLossTerms of openrlhf.algorithms.policy_loss: numbers a "
            "token, with a gradient in loss_N. Compute it from logprobs_N; means and sums over "
            "samples are taken behind it."
        )
