"""A user's Python reward functions: found in their file, called in the shape they are written in.

Two shapes are understood: `reward_func(queries, prompts, labels)` that returns a dict of rewards,
scores and extra_logs, and the Hugging Face shape `f(prompts, completions, **columns)` that returns
a list of floats, several of which are added up. Either may be `async def`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.base import RewardBatch, RewardResult, checked_result, optional_numbers
from openrlhf.utils.user_code import blaming, load_module, public_names

FUNCTION_NAME, LIST_NAME, WEIGHTS_NAME = "reward_func", "reward_funcs", "reward_weights"
OPTIONAL_ARGUMENTS = ("responses", "columns")  # given to a reward_func that names them
RewardFunction = Callable[..., object]


@dataclass
class Notes:
    """What Hugging Face functions log beside their rewards, in one call."""

    metrics: dict[str, object] = field(default_factory=dict)
    columns: dict[str, object] = field(default_factory=dict)

    def log_metric(self, name: str, value: object) -> None:
        """Log a number."""
        self.metrics[name] = value

    def log_extra(self, column: str, values: object) -> None:
        """Write a value per sample, B, beside the samples."""
        self.columns[column] = values


class UserFunction:
    """The function of a file, or several, with their way of being called."""

    def __init__(self, path: str | Path) -> None:
        """Run the file; raises ConfigError when it has no function of a known shape."""
        self.path = str(path)
        module = load_module(path)
        self.functions = _functions(module, path)
        self.weights = _weights(module, path, len(self.functions))
        self.takes_completions = all(map(_wants_completions, self.functions))
        if len(self.functions) > 1 and not self.takes_completions:
            raise ConfigError(
                f"{path}: {LIST_NAME} has functions without completions. "
                "Write each as f(prompts, completions, **columns)."
            )
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, batch: RewardBatch) -> RewardResult:
        """Call every function once; raises RewardError naming the file and the line or the
        sample.
        """
        if self.takes_completions:
            answer = self._sum_of_functions(batch)
        else:
            asked = [list(batch.queries), list(batch.prompts), list(batch.labels)]
            [function] = self.functions
            answer = self._call(function, *asked, **_query_options(function, batch))
        return checked_result(answer, batch=batch, source=self.path)

    def _sum_of_functions(self, batch: RewardBatch) -> object:
        """The weighted sum of the functions, each left out where it answers None."""
        notes = Notes()
        arguments = _completion_arguments(batch, notes)
        answers = [self._call(f, **_accepted(f, arguments)) for f in self.functions]
        if len(answers) == 1 and isinstance(answers[0], Mapping):
            return answers[0]
        names = [getattr(f, "__name__", type(f).__name__) for f in self.functions]
        columns = {
            name: optional_numbers(answer, name=name, batch=batch, source=self.path)
            for name, answer in zip(names, answers, strict=True)
        }
        return {
            "rewards": [
                self._weighted_sum([column[index] for column in columns.values()], batch, index)
                for index in range(len(batch))
            ],
            "extra_logs": {**(columns if len(columns) > 1 else {}), **notes.metrics},
            "extra_columns": notes.columns,
        }

    def _weighted_sum(
        self, numbers: Sequence[float | None], batch: RewardBatch, index: int
    ) -> float:
        pairs = zip(self.weights, numbers, strict=True)
        parts = [weight * number for weight, number in pairs if number is not None]
        if not parts:
            raise RewardError(
                f"{self.path}: no reward function applies to {batch.name_of(index)}: all returned "
                "None. Return a number for every sample from at least one of them."
            )
        return sum(parts)

    def _call(self, function: RewardFunction, /, *args: object, **kwargs: object) -> object:
        with blaming(self.path, RewardError):
            answer = function(*args, **kwargs)
            if inspect.isawaitable(answer):
                # One loop for all calls: clients that the file keeps belong to their loop.
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                answer = self._loop.run_until_complete(answer)
        return answer


def _functions(module: ModuleType, path: str | Path) -> list[RewardFunction]:
    """`reward_func` of a file, else the list `reward_funcs`, else its only public function."""
    name = FUNCTION_NAME if hasattr(module, FUNCTION_NAME) else LIST_NAME
    given = getattr(module, name, None) or _only_function(module, path)
    functions = list(given) if isinstance(given, (list, tuple)) else [given]
    for function in functions:
        if not callable(function):
            raise ConfigError(f"{path}: {name} is a {type(function).__name__}, not a function.")
        _refuse_unknown_shape(function, path)
    names = [getattr(f, "__name__", type(f).__name__) for f in functions]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: {LIST_NAME} has a name twice: {', '.join(names)}. Rename one.")
    return functions


def _weights(module: ModuleType, path: str | Path, num_functions: int) -> list[float]:
    ones = [1.0] * num_functions
    weights = getattr(module, WEIGHTS_NAME, ones) if hasattr(module, LIST_NAME) else ones
    if len(weights) != num_functions:
        raise ConfigError(
            f"{path}: {WEIGHTS_NAME} has {len(weights)} numbers for {num_functions} functions. "
            "Give one for each."
        )
    return [float(weight) for weight in weights]


def _query_options(function: RewardFunction, batch: RewardBatch) -> dict[str, object]:
    """What a reward_func gets behind queries, prompts and labels."""
    parameters = inspect.signature(function).parameters
    given = {"responses": list(batch.responses), "columns": dict(batch.columns)}
    assert tuple(given) == OPTIONAL_ARGUMENTS
    return {name: value for name, value in given.items() if name in parameters}


def _completion_arguments(batch: RewardBatch, notes: Notes) -> dict[str, object]:
    """What a function in the Hugging Face shape may ask for, by name."""
    prompts = list(batch.source_prompts or batch.prompts)
    return {
        "labels": list(batch.labels),
        **{name: list(values) for name, values in batch.columns.items()},
        "prompts": prompts,
        "completions": [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, batch.responses, strict=True)
        ],
        "completion_ids": [list(ids) for ids in batch.response_ids],
        "trainer_state": SimpleNamespace(global_step=batch.global_step, max_steps=batch.max_steps),
        "log_extra": notes.log_extra,
        "log_metric": notes.log_metric,
    }


def _accepted(function: RewardFunction, arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments that a function names, all for one with **columns."""
    parameters = inspect.signature(function).parameters
    if _takes_any(function):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def _takes_any(function: RewardFunction) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _wants_completions(function: RewardFunction) -> bool:
    """Whether a function has the Hugging Face shape: `f(**columns)` has it too."""
    names = inspect.signature(function).parameters
    return bool({"completions", "completion_ids"} & set(names)) or (
        _takes_any(function) and not _takes_queries(function)
    )


def _takes_queries(function: RewardFunction) -> bool:
    signature = inspect.signature(function)
    given: dict[str, list[object]] = {
        name: [] for name in OPTIONAL_ARGUMENTS if name in signature.parameters
    }
    try:
        signature.bind([], [], [], **given)
    except TypeError:
        return False
    return True


def _only_function(module: ModuleType, path: str | Path) -> RewardFunction:
    names = public_names(module)
    functions = [name for name in names if inspect.isfunction(getattr(module, name))]
    if len(functions) != 1:
        found = ", ".join(names) or "nothing public"
        raise ConfigError(
            f"{path} has no {FUNCTION_NAME}; found: {found}. "
            f"Define {FUNCTION_NAME}(queries, prompts, labels) in it, or {LIST_NAME} = [f, g]."
        )
    function: RewardFunction = getattr(module, functions[0])
    return function


def _refuse_unknown_shape(function: RewardFunction, path: str | Path) -> None:
    if _wants_completions(function) or _takes_queries(function):
        return
    raise ConfigError(
        f"{path}: {getattr(function, '__name__', 'the function')}{inspect.signature(function)} "
        "cannot be called. Write reward_func(queries, prompts, labels) or "
        "f(prompts, completions, **columns)."
    )
