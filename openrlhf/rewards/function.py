"""A user's Python reward functions: found in their file, called in the shape they are written in.

Two shapes are understood: `reward_func(queries, prompts, labels)` that returns a dict of rewards,
scores and extra_logs, and the Hugging Face shape `f(prompts, completions, **columns)` that returns
a list of floats, several of which are added up. Either may be `async def`.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.base import RewardBatch, RewardResult, checked_result, optional_numbers
from openrlhf.utils.user_code import accepted, blaming, load_module, public_names, takes_any

FUNCTION_NAME, LIST_NAME, WEIGHTS_NAME = "reward_func", "reward_funcs", "reward_weights"
OPTIONAL_ARGUMENTS = ("responses", "columns")  # given to a reward_func that names them
RewardFunction = Callable[..., object]


class UserFunction:
    """The function of a file, or several, with their way of being called."""

    def __init__(self, path: str | Path) -> None:
        """Run the file; raises ConfigError when it has no function of a known shape."""
        self.path = str(path)
        module = load_module(path)
        self.functions = _functions(module, path)
        self.weights = _weights(module, path, len(self.functions))
        self.takes_completions = all(map(_wants_completions, self.functions))
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, batch: RewardBatch) -> RewardResult:
        """Call every function once; raises RewardError naming the file and the line or the
        sample.
        """
        if self.takes_completions:
            answer = self._sum_of_functions(batch)
        else:
            [function] = self.functions
            optional = {"responses": list(batch.responses), "columns": dict(batch.columns)}
            names = inspect.signature(function).parameters
            answer = self._call(
                function,
                *(list(batch.queries), list(batch.prompts), list(batch.labels)),
                **{name: value for name, value in optional.items() if name in names},
            )
        return checked_result(answer, batch=batch, source=self.path)

    def _sum_of_functions(self, batch: RewardBatch) -> object:
        """Return the weighted sum of the functions, each left out where it returns None."""
        metrics: dict[str, object] = {}
        extra_columns: dict[str, object] = {}

        def log_metric(name: str, value: object) -> None:
            metrics[name] = value

        def log_extra(column: str, values: object) -> None:
            extra_columns[column] = values

        arguments = _completion_arguments(batch)
        arguments |= {"log_metric": log_metric, "log_extra": log_extra}
        answers = [self._call(f, **accepted(f, arguments)) for f in self.functions]
        if len(answers) == 1 and isinstance(answers[0], Mapping):
            return answers[0]
        columns = {
            _name(function): optional_numbers(answer, f"{self.path}: {_name(function)}", batch)
            for function, answer in zip(self.functions, answers, strict=True)
        }
        return {
            "rewards": [
                self._weighted_sum(numbers, batch.name_of(index))
                for index, numbers in enumerate(zip(*columns.values(), strict=True))
            ],
            "extra_logs": {**(columns if len(columns) > 1 else {}), **metrics},
            "extra_columns": extra_columns,
        }

    def _weighted_sum(self, numbers: Sequence[float | None], name: str) -> float:
        pairs = zip(self.weights, numbers, strict=True)
        parts = [weight * number for weight, number in pairs if number is not None]
        if not parts:
            raise RewardError(
                f"{self.path}: no reward function applies to {name}: all returned None. "
                "Return a number for every sample from at least one of them."
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
    """Return `reward_func`, else the list `reward_funcs`, else the only public function."""
    name = FUNCTION_NAME if hasattr(module, FUNCTION_NAME) else LIST_NAME
    public = public_names(module)
    own = [f for f in map(module.__dict__.get, public) if inspect.isfunction(f)]
    given = getattr(module, name, None) or own
    functions = list(given) if isinstance(given, (list, tuple)) else [given]
    if given is own and len(own) != 1:
        raise ConfigError(
            f"{path} has no {FUNCTION_NAME}; found: {', '.join(public) or 'nothing public'}. "
            f"Define {FUNCTION_NAME}(queries, prompts, labels) in it, or {LIST_NAME} = [f, g]."
        )
    for function in functions:
        if not callable(function):
            raise ConfigError(f"{path}: {name} is a {type(function).__name__}, not a function.")
        takes_queries = len(functions) == 1 and _takes_queries(function)
        if not takes_queries and not _wants_completions(function):
            raise ConfigError(
                f"{path}: {_name(function)}{inspect.signature(function)} cannot be called. Write "
                "reward_func(queries, prompts, labels) or f(prompts, completions, **columns)."
            )
    names = [_name(function) for function in functions]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: {LIST_NAME} has a name twice: {', '.join(names)}. Rename one.")
    return functions


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _weights(module: ModuleType, path: str | Path, num_functions: int) -> list[float]:
    weights = getattr(module, WEIGHTS_NAME, [1.0] * num_functions)
    if len(weights) != num_functions:
        raise ConfigError(
            f"{path}: {WEIGHTS_NAME} has {len(weights)} numbers for {num_functions} functions. "
            "Give one for each."
        )
    return [float(weight) for weight in weights]


def _completion_arguments(batch: RewardBatch) -> dict[str, object]:
    """Return all that a function in the Hugging Face shape may ask for, by name."""
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
    }


def _wants_completions(function: RewardFunction) -> bool:
    """Return True for the Hugging Face shape: `f(**columns)` has it too."""
    names = inspect.signature(function).parameters
    return bool({"completions", "completion_ids"} & set(names)) or (
        takes_any(function) and not _takes_queries(function)
    )


def _takes_queries(function: RewardFunction) -> bool:
    signature = inspect.signature(function)
    given = {name: None for name in OPTIONAL_ARGUMENTS if name in signature.parameters}
    try:
        signature.bind(None, None, None, **given)
    except TypeError:
        return False
    return True
