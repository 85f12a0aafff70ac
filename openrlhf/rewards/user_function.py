"""A user's Python reward function: found in its file, called in the shape it is written in.

Two shapes are understood: `reward_func(queries, prompts, labels)` that answers a dict of rewards,
scores and extra_logs, and the Hugging Face shape `f(prompts, completions, **columns)` that answers
a list of floats. Either may be `async def`. Imports nothing heavy: workers start with it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.answers import CheckedAnswer, RewardBatch, checked_answer
from openrlhf.utils.user_code import blaming, load_module, public_names

FUNCTION_NAME = "reward_func"
OPTIONAL_ARGUMENTS = ("responses", "columns")  # given to a reward_func that names them
RewardFunction = Callable[..., object]


class UserFunction:
    """The function of a file, with its way of being called."""

    def __init__(self, path: str | Path) -> None:
        """Run the file; raises ConfigError when it has no function of a known shape."""
        self.path = str(path)
        self.function = load_reward_function(path)
        self._call = _call_completions if _wants_completions(self.function) else _call_queries
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, batch: RewardBatch) -> CheckedAnswer:
        """Call the function once; raises RewardError naming the file and the line or the sample."""
        with blaming(self.path, RewardError):
            answer = self._call(self.function, batch)
            if inspect.isawaitable(answer):
                answer = self._wait_for(answer)
        return checked_answer(answer, batch=batch, source=self.path)

    def _wait_for(self, answer: Awaitable[object]) -> object:
        # One loop for all calls: clients that the file keeps between calls belong to their loop.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(answer)


def load_reward_function(path: str | Path) -> RewardFunction:
    """`reward_func` of a file, else its only public function; ConfigError when there is neither."""
    module = load_module(path)
    function = getattr(module, FUNCTION_NAME, None) or _only_function(module, path)
    if not callable(function):
        raise ConfigError(
            f"{path}: {FUNCTION_NAME} is a {type(function).__name__}, not a function."
        )
    _refuse_unknown_shape(function, path)
    return function


def _call_queries(function: RewardFunction, batch: RewardBatch) -> object:
    accepted = inspect.signature(function).parameters
    optional = {"responses": list(batch.responses), "columns": dict(batch.columns)}
    assert tuple(optional) == OPTIONAL_ARGUMENTS
    return function(
        list(batch.queries),
        list(batch.prompts),
        list(batch.labels),
        **{name: value for name, value in optional.items() if name in accepted},
    )


def _call_completions(function: RewardFunction, batch: RewardBatch) -> object:
    arguments: dict[str, object] = {
        "labels": list(batch.labels),
        **{name: list(values) for name, values in batch.columns.items()},
        "prompts": list(batch.prompts),
        "completions": list(batch.responses),
    }
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return function(**arguments)
    names = {p.name for p in parameters}
    return function(**{name: value for name, value in arguments.items() if name in names})


def _wants_completions(function: RewardFunction) -> bool:
    return "completions" in inspect.signature(function).parameters


def _only_function(module: ModuleType, path: str | Path) -> RewardFunction:
    names = public_names(module)
    functions = [name for name in names if inspect.isfunction(getattr(module, name))]
    if len(functions) != 1:
        found = ", ".join(names) or "nothing public"
        raise ConfigError(
            f"{path} has no {FUNCTION_NAME}; found: {found}. "
            f"Define {FUNCTION_NAME}(queries, prompts, labels) in it."
        )
    function: RewardFunction = getattr(module, functions[0])
    return function


def _refuse_unknown_shape(function: RewardFunction, path: str | Path) -> None:
    if _wants_completions(function):
        return
    signature = inspect.signature(function)
    try:
        given: dict[str, list[object]] = {
            name: [] for name in OPTIONAL_ARGUMENTS if name in signature.parameters
        }
        signature.bind([], [], [], **given)
    except TypeError as error:
        raise ConfigError(
            f"{path}: {getattr(function, '__name__', 'the function')}{signature} cannot be called. "
            "Write reward_func(queries, prompts, labels) or f(prompts, completions, **columns)."
        ) from error
