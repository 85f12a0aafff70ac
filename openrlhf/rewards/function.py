"""A user's Python reward functions: found in their files, called in the form they are written in.

Two forms are understood: `reward_func(queries, prompts, labels)` that returns a dict of rewards,
scores and extra_logs, and the Hugging Face form `f(prompts, completions, **columns)` that returns
a list of floats. Several are added up. Either may be `async def`.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.base import (
    RewardBatch,
    RewardResult,
    RewardSource,
    checked_result,
    optional_numbers,
)
from openrlhf.utils.user_code import (
    accepted,
    blaming,
    defined_at,
    load_module,
    member,
    public_names,
    split_name,
    takes_any,
)

FUNCTION_NAME, LIST_NAME, WEIGHTS_NAME = "reward_func", "reward_funcs", "reward_weights"
OPTIONAL_ARGUMENTS = ("responses", "columns")  # given to a reward_func that names them
RewardFunction = Callable[..., object]


@dataclass(frozen=True)
class Part:
    """One function and its share in the reward."""

    function: RewardFunction
    file: str  # that it is from, for messages
    name: str
    weight: float

    @property
    def source(self) -> str:
        """Return where it is defined, and its own name."""
        return f"{defined_at(self.file, self.function)}: {_name(self.function)}"


class UserFunctions:
    """The functions of one or several files, with their ways of being called."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Raise ConfigError for a function of no known form."""
        for part in parts:
            _check_form(part)
        self.parts = parts
        self.names = [part.name for part in parts]
        self.files = ",".join(dict.fromkeys(part.file for part in parts))
        if len(set(self.names)) < len(parts):
            raise ConfigError(
                f"{self.files}: two reward functions have the same name: {', '.join(self.names)}. "
                "Rename one."
            )
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def load(cls, places: str | Path, weights: Sequence[float] | None = None) -> "UserFunctions":
        """Load `file.py` or `file.py:name`, or several with commas between, which are run; raise
        ConfigError. A file stands for all functions of its list, times the weight of the file.
        """
        names = str(places).split(",")
        shares = zip(names, weights or [1.0] * len(names), strict=True)
        load = cache(load_module)  # two functions of a file share what it holds
        return cls([part for name, weight in shares for part in _parts_at(name, weight, load)])

    @classmethod
    def of(
        cls, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None
    ) -> "UserFunctions":
        """Take functions of this process; raise ConfigError."""
        if weights is not None and len(weights) != len(functions):
            raise ConfigError(
                f"reward_weights has {len(weights)} values for {len(functions)} functions. Give "
                "one weight for each function."
            )
        shares = zip(functions, weights or [1.0] * len(functions), strict=True)
        return cls([Part(f, _source_file(f), _name(f), weight) for f, weight in shares])

    def answer(self, batch: RewardBatch) -> RewardResult:
        """Call every function once; raises RewardError naming the file and the line or the
        sample.

        The reward is the weighted sum of the functions that apply to a sample. Of several, the
        score of a sample is that of the first that applies to it, or else its number.
        """
        answers = [self._answer(part, batch) for part in self.parts]
        rewards, scores = [], []
        for index in range(len(batch)):
            applying = [
                (part.weight * number, result.scores[index] if result.scores else number)
                for part, (numbers, result) in zip(self.parts, answers, strict=True)
                if (number := numbers[index]) is not None
            ]
            if not applying:
                raise RewardError(
                    f"{self.files}: no reward function applies to {batch.name_of(index)}: all "
                    "returned None. Return a number for every sample from at least one of them."
                )
            rewards.append(sum(share for share, _ in applying))
            scores.append(applying[0][1])
        results = [result for _, result in answers]
        columns = dict(zip(self.names, (numbers for numbers, _ in answers), strict=True))
        has_several = len(results) > 1
        return RewardResult(
            rewards,
            scores=scores if has_several else results[0].scores,
            extra_logs={k: v for result in results for k, v in result.extra_logs.items()},
            extra_columns={k: v for result in results for k, v in result.extra_columns.items()},
            parts=(columns if has_several else {})
            | {k: v for result in results for k, v in result.parts.items()},
        )

    def _answer(
        self, part: Part, batch: RewardBatch
    ) -> tuple[Sequence[float | None], RewardResult]:
        """Return the numbers of a function, B, and what it said beside them."""
        if not _wants_completions(part.function):
            optional = {"responses": list(batch.responses), "columns": dict(batch.columns)}
            named = inspect.signature(part.function).parameters
            answer = self._call(
                part,
                *(list(batch.queries), list(batch.prompts), list(batch.labels)),
                **{name: value for name, value in optional.items() if name in named},
            )
            result = checked_result(answer, batch=batch, source=part.source)
            return result.rewards, result
        metrics: dict[str, object] = {}
        columns: dict[str, object] = {}
        arguments = _completion_arguments(batch) | {
            "log_metric": metrics.__setitem__,
            "log_extra": columns.__setitem__,
        }
        answer = self._call(part, **accepted(part.function, arguments))
        if isinstance(answer, Mapping):
            result = checked_result(answer, batch=batch, source=part.source)
            return result.rewards, result
        numbers = optional_numbers(answer, part.source, batch)
        said = {"rewards": [0.0] * len(batch), "extra_logs": metrics, "extra_columns": columns}
        return numbers, checked_result(said, batch=batch, source=part.source)

    def _call(self, part: Part, /, *args: object, **kwargs: object) -> object:
        with blaming(part.file, RewardError):
            answer = part.function(*args, **kwargs)
            if inspect.isawaitable(answer):
                # One loop for all calls: clients that the file keeps belong to their loop.
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                answer = self._loop.run_until_complete(answer)
        return answer


class CallableReward(RewardSource):
    """Scores batches with functions of this process, one call at a time, in a thread.

    A function of a script or a notebook often holds what no other process can be sent: a lambda, a
    model, a client. So it has no worker processes, and no limits of time and memory.
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction],
        *,
        weights: Sequence[float] | None = None,
        batch_size: int = 8,
    ) -> None:
        """Raise ConfigError for a function of no known form."""
        given = list(functions) if isinstance(functions, list | tuple) else [functions]
        self.function = UserFunctions.of(given, weights)
        super().__init__(", ".join(self.function.names), batch_size)
        self._turn = asyncio.Lock()

    @property
    def has_capacity(self) -> bool:
        return not self._turn.locked()

    async def score_part(self, batch: RewardBatch) -> RewardResult:
        async with self._turn:
            return await asyncio.to_thread(self.function.answer, batch)


def _parts_at(place: str, weight: float, load: Callable[[str], ModuleType]) -> Iterator[Part]:
    """Yield the function at `file.py:name`, or those that a file is made of."""
    file, name = split_name(place)
    module = load(file)
    if name:
        yield Part(member(module, name, file), file, name, weight)
        return
    functions = _functions(module, file)
    own = _weights(module, file, len(functions))
    for function, share in zip(functions, own, strict=True):
        called = _name(function)  # every file may have a reward_func
        called = Path(file).stem if called == FUNCTION_NAME else called
        yield Part(function, file, called, weight * share)


def _functions(module: ModuleType, path: str) -> list[RewardFunction]:
    """Return `reward_func`, else the list `reward_funcs`, else the only public function."""
    name = FUNCTION_NAME if hasattr(module, FUNCTION_NAME) else LIST_NAME
    public = public_names(module)
    own = [f for f in map(module.__dict__.get, public) if inspect.isfunction(f)]
    given = getattr(module, name, None) or own
    functions = list(given) if isinstance(given, (list, tuple)) else [given]
    if given is own and len(own) != 1:
        raise ConfigError(
            f"{path} has no {FUNCTION_NAME}; found: {', '.join(public) or 'nothing public'}. "
            f"Define {FUNCTION_NAME}(queries, prompts, labels) in it, or {LIST_NAME} = [f, g], or "
            f"name one: {path}:NAME."
        )
    for function in functions:
        if not callable(function):
            raise ConfigError(f"{path}: {name} is a {type(function).__name__}, not a function.")
    return functions


def _check_form(part: Part) -> None:
    """Raise ConfigError for a function that cannot be called in a known form."""
    if not _takes_queries(part.function) and not _wants_completions(part.function):
        name = _name(part.function)
        raise ConfigError(
            f"{part.source}{inspect.signature(part.function)} cannot be called. Write "
            f"{name}(queries, prompts, labels) or {name}(prompts, completions, **columns)."
        )


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _source_file(function: RewardFunction) -> str:
    """Return the file that defines a function, or the function where that is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_filename if code else repr(function)


def _weights(module: ModuleType, path: str, num_functions: int) -> list[float]:
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
