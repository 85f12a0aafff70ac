"""A user's Python reward functions: found in their files, called with the arguments they name.

The names say which form a function has: `reward_func(queries, prompts, labels)`, which returns a
dict of rewards, scores and extra_logs; Hugging Face's `f(prompts, completions, **columns)`, which
returns a list of floats; verl's `compute_score(data_source, solution_str, ground_truth,
extra_info)` of one row, or of lists. Several are added up. Each may be `async def`.
"""

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from reprlib import Repr
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.base import (
    RewardBatch,
    RewardResult,
    RewardSource,
    Shown,
    checked_result,
    optional_numbers,
)
from openrlhf.utils.images import Picture
from openrlhf.utils.progress import saying_what_is_awaited
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

if TYPE_CHECKING:
    from PIL.Image import Image

FUNCTION_NAME, LIST_NAME, WEIGHTS_NAME = "reward_func", "reward_funcs", "reward_weights"
QUERY_NAMES = ("queries", "labels", "responses", "columns")  # of reward_func
COMPLETION_NAMES = ("completions", "completion_ids")  # of Hugging Face's form
ROW_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")  # of verl's form
ACCURACY = "acc"  # beside the score of verl's form, which may be any number: 0 or 1
LIST_NAMES = tuple(f"{name}s" for name in ROW_NAMES)
KNOWN = (
    "queries, prompts, labels, responses, columns; or prompts, completions, completion_ids, "
    f"labels, trainer_state, log_metric, log_extra; or {', '.join(ROW_NAMES)}; and images, image"
)
IMAGES, IMAGE = "images", "image"  # of any form: those of each sample, and the first or None
MAX_SHOWN = 120  # characters of an argument
MAX_SHOWN_COLUMNS = 12
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
RewardFunction = Callable[..., object]


@dataclass(frozen=True)
class WeightedFunction:
    """One function and its share in the reward.

    Example: `WeightedFunction(is_short, "rewards.py", "is_short", 0.2)`
    """

    function: RewardFunction
    file: str  # that it is from, for messages
    name: str
    weight: float

    @property
    def source(self) -> str:
        """Return the file that defines it, and its own name."""
        return f"{defined_at(self.file, self.function)}: {_name(self.function)}"


class UserFunctions:
    """The functions of one or several files, with their ways of being called."""

    def __init__(self, parts: Sequence[WeightedFunction]) -> None:
        """Raise ConfigError for functions of the same name, and for classes."""
        self.parts = parts
        self.names = [part.name for part in parts]
        self.files = ",".join(dict.fromkeys(part.file for part in parts))
        if classes := [part.name for part in parts if inspect.isclass(part.function)]:
            raise ConfigError(f"{self.files}: {classes[0]} is a class. Give an object of it.")
        if len(set(self.names)) < len(parts):
            raise ConfigError(
                f"{self.files}: two reward functions have the same name: {', '.join(self.names)}. "
                "Rename one."
            )
        if odd := [part for part in parts if not math.isfinite(part.weight)]:
            raise ConfigError(
                f"{self.files}: {odd[0].name} has the weight {odd[0].weight}. Give a finite one."
            )
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def load(cls, sources: str | Path, weights: Sequence[float] | None = None) -> "UserFunctions":
        """Load `file.py` or `file.py:name`, or several with commas between, which are run; raise
        ConfigError. A file stands for all functions of its list; `weights` has one number for each
        source, or for each function.
        """
        names = str(sources).split(",")
        load = cache(load_module)  # two functions of a file share what it holds
        found = [list(_parts_at(name, load)) for name in names]
        parts = [part for of_source in found for part in of_source]
        shares = list(weights or [1.0] * len(names))
        if len(shares) == len(names):
            shares = [s for s, of_source in zip(shares, found, strict=True) for _ in of_source]
        if len(shares) != len(parts):
            told = ", ".join(part.name for part in parts)
            raise ConfigError(
                f"--reward_weights has {len(shares)} values for the {len(parts)} functions of "
                f"--remote_rm_url: {told}. Type one weight for each function."
            )
        return cls([replace(p, weight=p.weight * s) for p, s in zip(parts, shares, strict=True)])

    @classmethod
    def of(
        cls, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None
    ) -> "UserFunctions":
        """Take functions of this process; raise ConfigError."""
        if odd := [f for f in functions if not callable(f)]:
            raise ConfigError(
                f"reward is {odd[0]!r}, not a function. Name files of functions with "
                "remote_rm_url, and reward models with reward_pretrain."
            )
        if weights is not None and len(weights) != len(functions):
            raise ConfigError(
                f"reward_weights has {len(weights)} values for {len(functions)} functions. Give "
                "one weight for each function."
            )
        shares = zip(functions, weights or [1.0] * len(functions), strict=True)
        return cls([WeightedFunction(f, _source_file(f), _name(f), weight) for f, weight in shares])

    def check(self, batch: RewardBatch) -> None:
        """Raise ConfigError for an argument that neither a form nor a column of the batch has."""
        unseen = replace(batch, images=())  # names are all that counts, and decoding takes time
        problems = [_unknown(part, unseen) for part in self.parts]
        if found := [problem for problem in problems if problem]:
            raise ConfigError(found)

    def shown(self, batch: RewardBatch) -> Shown:
        """Return the arguments of each function for the first sample, shortened: those that it
        names, and the others together.
        """
        one = Repr()
        one.maxstring = one.maxother = MAX_SHOWN
        one.maxdict = MAX_SHOWN_COLUMNS
        return {
            part.name: {name: one.repr(v) for name, v in _first_sample(part.function, batch)}
            for part in self.parts
        }

    def answer(self, batch: RewardBatch) -> RewardResult:
        """Call every function once; raises RewardError naming the file and the line or the
        sample, ConfigError as `check` does.

        The reward is the weighted sum of the functions that apply to a sample, None where none
        does. Of several, the score of a sample is that of the first that applies to it, or else its
        number.
        """
        self.check(batch)
        answers = [self._answer(part, batch) for part in self.parts]
        rewards: list[float | None] = []
        scores: list[float | None] = []
        for index in range(len(batch)):
            applying = [
                (part.weight * number, result.scores[index] if result.scores else number)
                for part, (numbers, result) in zip(self.parts, answers, strict=True)
                if (number := numbers[index]) is not None
            ]
            rewards.append(sum(share for share, _ in applying) if applying else None)
            scores.append(applying[0][1] if applying else None)
        results = [result for _, result in answers]
        if len(results) == 1:
            return replace(results[0], rewards=rewards)
        columns = {n: list(own) for n, (own, _) in zip(self.names, answers, strict=True)}
        return RewardResult(
            rewards,
            scores,
            extra_logs=_merged([result.extra_logs for result in results]),
            extra_columns=_merged([result.extra_columns for result in results]),
            parts=columns | {k: v for result in results for k, v in result.parts.items()},
            unread=[key for result in results for key in result.unread],
        )

    def _answer(
        self, part: WeightedFunction, batch: RewardBatch
    ) -> tuple[Sequence[float | None], RewardResult]:
        """Return the numbers of a function, B, and what it returned besides."""
        noted: dict[str, list[object]] = {}
        columns: dict[str, object] = {}
        arguments = accepted(part.function, _arguments(part.function, batch, noted, columns))
        if _verl_names(part.function) == ROW_NAMES:
            lists = {name: v for name, v in arguments.items() if isinstance(v, list)}
            rows = [{n: v[index] for n, v in lists.items()} for index in range(len(batch))]
            answers = [self._call(part, **row) for row in rows]
            answer, logs, columns = _of_rows(answers, part.source)
        else:
            answer = self._call(part, **arguments)
            logs = {name: _metric(name, values, part.source) for name, values in noted.items()}
        if isinstance(answer, Mapping) and (logs or columns):
            own = {"extra_logs": logs, "extra_columns": columns}
            answer = {**answer, **{k: {**v, **(answer.get(k) or {})} for k, v in own.items()}}
        if isinstance(answer, Mapping) or _takes_queries(part.function):
            result = checked_result(answer, batch=batch, source=part.source)
            return result.rewards, result
        numbers = optional_numbers(answer, part.source, batch)
        said = {"rewards": [0.0] * len(batch), "extra_logs": logs, "extra_columns": columns}
        if _verl_names(part.function) == ROW_NAMES:
            found = zip(logs.get(ACCURACY, [None] * len(batch)), numbers, strict=True)
            said["scores"] = [(number or 0.0) if acc is None else acc for acc, number in found]
        return numbers, checked_result(said, batch=batch, source=part.source)

    def _call(self, part: WeightedFunction, **arguments: object) -> object:
        with blaming(part.file, RewardError):
            answer = part.function(**arguments)
            if inspect.isawaitable(answer):
                # One loop for all calls: clients that the file keeps belong to their loop.
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                try:
                    answer = self._loop.run_until_complete(answer)
                except asyncio.CancelledError as error:  # of its own: nobody else cancels it
                    raise TimeoutError("it was cancelled by its own code") from error
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
        """Raise ConfigError for functions that cannot be told apart."""
        given = list(functions) if isinstance(functions, list | tuple) else [functions]
        self.function = UserFunctions.of(given, weights)
        super().__init__(", ".join(self.function.names), batch_size)
        self._turn = asyncio.Lock()

    @property
    def has_capacity(self) -> bool:
        return not self._turn.locked()

    async def score_part(self, batch: RewardBatch) -> RewardResult:
        async with self._turn:
            with saying_what_is_awaited(f"{self.name} to score {batch.names()}"):
                return await asyncio.to_thread(self.function.answer, batch)

    def check(self, columns: Sequence[str]) -> None:
        self.function.check(RewardBatch.of_columns(columns))

    async def shown(self, batch: RewardBatch) -> Shown:
        return self.function.shown(batch)


def _parts_at(source: str, load: Callable[[str], ModuleType]) -> Iterator[WeightedFunction]:
    """Yield the function at `file.py:name`, or those that a file is made of."""
    file, name = split_name(source)
    module = load(file)
    if name:
        yield WeightedFunction(member(module, name, file), file, name, 1.0)
        return
    functions = _functions(module, file)
    own = _weights(module, file, len(functions))
    for function, share in zip(functions, own, strict=True):
        called = _name(function)  # every file may have a reward_func
        called = Path(file).stem if called == FUNCTION_NAME else called
        yield WeightedFunction(function, file, called, share)


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


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _source_file(function: RewardFunction) -> str:
    """Return the file that defines a function, or the function where that is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_filename if code else repr(function)


def _weights(module: ModuleType, path: str, num_functions: int) -> list[float]:
    given = getattr(module, WEIGHTS_NAME, [1.0] * num_functions)
    try:
        weights = [float(weight) for weight in given]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {WEIGHTS_NAME} is no list of numbers: {given!r:.{MAX_SHOWN}}."
        ) from error
    if len(weights) != num_functions:
        raise ConfigError(
            f"{path}: {WEIGHTS_NAME} has {len(weights)} numbers for {num_functions} functions. "
            "Give one for each."
        )
    return weights


def _arguments(
    function: RewardFunction,
    batch: RewardBatch,
    metrics: dict[str, list[object]] | None = None,
    extras: dict[str, object] | None = None,
) -> dict[str, object]:
    """Return all that a function may ask for, by the names of its form: lists of B. `metrics` and
    `extras` take what it returns besides rewards. Each sample has lists and dicts of its own, which
    a function may change.
    """
    columns: dict[str, object] = {name: _own(values) for name, values in batch.columns.items()}
    named = {IMAGES, IMAGE} & {*inspect.signature(function).parameters}
    if named or (batch.images and takes_any(function)):
        images = opened(batch.images or [()] * len(batch))
        seen = {IMAGES: images, IMAGE: [next(iter(each), None) for each in images]}
        columns = columns | seen if batch.images else seen | columns
    labels, responses = _labels(batch, "labels"), list(batch.responses)
    if names := _verl_names(function):
        sources = columns.get("data_source") or columns.get("datasource") or [""] * len(batch)
        infos = columns.get("extra_info") or [{} for _ in labels]
        given = (sources, responses, _labels(batch, names[2], "ground_truth"), infos)
        return columns | dict(zip(names, given, strict=True))
    if _takes_queries(function):
        prompts, queries = list(batch.prompts), list(batch.queries)
        given = {"queries": queries, "prompts": prompts, "labels": labels, "responses": responses}
        return columns | given | {"columns": dict(columns)}
    sources = _own(batch.source_prompts or batch.prompts)
    taken = {} if metrics is None else metrics
    return columns | {
        "labels": labels,
        "prompts": sources,
        "completions": [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(sources, responses, strict=True)
        ],
        "completion_ids": [list(ids) for ids in batch.response_ids],
        "trainer_state": SimpleNamespace(global_step=batch.global_step, max_steps=batch.max_steps),
        "log_metric": lambda name, value: taken.setdefault(name, []).append(value),
        "log_extra": ({} if extras is None else extras).__setitem__,
    }


def _own(values: Sequence[object]) -> list[object]:
    """Return values of which no two share a list or a dict, as the samples of a prompt do."""
    return [copy.deepcopy(v) if isinstance(v, list | dict) else v for v in values]


def _metric(name: str, values: Sequence[Any], source: str) -> object:
    """Return the value that a function has logged under a name: the mean of several calls."""
    if len(values) == 1:
        return values[0]
    try:
        return sum(map(float, values)) / len(values)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{source}: log_metric({name!r}, …) is called {len(values)} times, not each time with "
            "a number"
        ) from error


def _merged(found: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    """Return the columns of several functions: of two of the same name, for each sample the value
    of the first that has one.
    """
    merged: dict[str, list[Any]] = {}
    for columns in found:
        for name, values in columns.items():
            before = merged.get(name, [None] * len(values))
            merged[name] = [b if a is None else a for a, b in zip(before, values, strict=True)]
    return merged


def opened(images: Sequence[Sequence[Picture]]) -> "list[list[Image]]":
    """Return the images of each sample, decoded; each is the function's own to draw on."""
    open_once = cache(Picture.open)
    return [[open_once(picture).copy() for picture in of_sample] for of_sample in images]


def _verl_names(function: RewardFunction) -> Sequence[str]:
    """Return the names of verl's form, of one row or of lists; () of another form."""
    parameters = inspect.signature(function).parameters
    return next((names for names in (ROW_NAMES, LIST_NAMES) if names[1] in parameters), ())


def _takes_queries(function: RewardFunction) -> bool:
    """Return True for `reward_func(queries, prompts, labels)`; `f(**columns)` is of Hugging Face's
    form.
    """
    parameters = inspect.signature(function).parameters.values()
    names = {parameter.name for parameter in parameters if parameter.kind in BY_NAME}
    others = {*COMPLETION_NAMES, *_verl_names(function)}
    return names.isdisjoint(others) and not names.isdisjoint(QUERY_NAMES)


def _labels(batch: RewardBatch, *names: str) -> list[object]:
    """Return the labels; without `--label_key`, the first of the columns that the rows have, or the
    nested one of verl's rows; raise RewardError for a row that lacks it where others have it.
    """
    if any(label != "" for label in batch.labels):
        return _own(batch.labels)
    rows = batch.columns.get("reward_model", ()) if "ground_truth" in names else ()
    nested = [row.get("ground_truth") if isinstance(row, Mapping) else None for row in rows]
    for name in names:
        if name in batch.columns:
            return _own(batch.columns[name])
    if nested.count(None) == len(nested):
        return list(batch.labels)
    if None in nested:
        which = batch.name_of(nested.index(None))
        raise RewardError(f"{which} has no reward_model.ground_truth, and others have one")
    return _own(nested)


def _of_rows(
    answers: Sequence[object], source: str
) -> tuple[list[object], dict[str, object], dict[str, object]]:
    """Return the numbers that a function returned for each row, and the values next to `score`
    where it returned dicts: numbers to be logged, and other values.
    """
    dicts = [
        {str(name): _only_value(value) for name, value in answer.items()}
        if isinstance(answer, Mapping)
        else {"score": answer}
        for answer in answers
    ]
    for said in dicts:
        if not isinstance(said.get(ACCURACY), int | float | None):
            raise RewardError(f"{source}: 'acc' is {said[ACCURACY]!r:.{MAX_SHOWN}}, not 0 or 1.")
        if "score" not in said:
            names = ", ".join(said)
            raise RewardError(f"{source}: the dict has no 'score'; it has {names or 'nothing'}.")
    numbers = [said["score"] for said in dicts]
    names = dict.fromkeys(name for said in dicts for name in said if name != "score")
    beside = {name: [said.get(name) for said in dicts] for name in names}
    logs = {k: v for k, v in beside.items() if all(isinstance(x, int | float | None) for x in v)}
    return numbers, dict(logs), {k: v for k, v in beside.items() if k not in logs}


def _only_value(value: object) -> object:
    """Return the Python number of a numpy scalar or a tensor of one number, else the value."""
    item = getattr(value, "item", None)
    return item() if item is not None and getattr(value, "shape", None) == () else value


def _unknown(part: WeightedFunction, batch: RewardBatch) -> str:
    """Return the problem of the arguments of a function; empty if it can be called."""
    signature = inspect.signature(part.function)
    known = _arguments(part.function, batch)
    parameters = signature.parameters.values()
    unknown = [
        p.name
        for p in parameters
        if (p.kind in BY_NAME and p.name not in known and p.default is p.empty)
        or (p.kind is p.POSITIONAL_ONLY)
        or (p.kind is p.VAR_POSITIONAL and len(parameters) <= 2)  # all that is behind a decorator
    ]
    if not unknown:
        return ""
    columns = ", ".join(batch.columns) or "none"
    return (
        f"{part.source}{signature} cannot be called: unknown arguments: {', '.join(unknown)}. "
        f"Arguments go by name. Known are {KNOWN}; and the columns of the rows: {columns}. Rename "
        "them, or give them defaults."
    )


def _first_sample(function: RewardFunction, batch: RewardBatch) -> Iterator[tuple[str, object]]:
    """Yield the arguments that a function names, of the first sample, and the others that it is
    given as **columns.
    """
    parameters = inspect.signature(function).parameters
    given = {
        name: _first(values)
        for name, values in accepted(function, _arguments(function, batch)).items()
        if not callable(values)
    }
    for name in parameters:
        if name in given:
            yield name, given[name]
    if others := {name: value for name, value in given.items() if name not in parameters}:
        yield "**", others


def _first(values: object) -> object:
    """Return the first of a list, or of each list of a dict."""
    if isinstance(values, dict):
        return {name: _first(column) for name, column in values.items()}
    return next(iter(values), None) if isinstance(values, list) else values
