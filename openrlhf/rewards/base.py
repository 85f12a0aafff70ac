"""The interface of reward sources, and the strict check of what they return.

Imports nothing heavy: the workers of a reward function start with it.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from reprlib import Repr
from typing import Any

from openrlhf.errors import RewardError
from openrlhf.utils.images import Picture
from openrlhf.utils.threads import LoopThread
from openrlhf.utils.user_code import as_float32, mistyped_key

MAX_NAMES_SHOWN = 3
SHORT = Repr()  # of what a source returned, for a message
SHORT.maxstring = SHORT.maxother = 120
SHORT.maxlist = 12
short = SHORT.repr
PER_SAMPLE = (
    *("queries", "prompts", "responses", "labels"),
    *("sample_ids", "source_prompts", "response_ids", "images"),
)
KEYS = ("rewards", "scores", "extra_logs", "extra_columns", "parts")  # of an answer
TRUNCATED_COLUMN = "is_truncated"  # of every sample of a run, besides the row's own columns


Shown = dict[str, dict[str, str]]  # function -> argument -> its value for one sample


@dataclass(frozen=True)
class RewardBatch:
    """B samples to be scored, as text.

    Example: `RewardBatch(["2+3= 5"], ["2+3="], [" 5"], ["5"])`
    """

    queries: Sequence[str]  # B, prompt and response in one
    prompts: Sequence[str]  # B
    responses: Sequence[str]  # B, without special tokens
    labels: Sequence[object]  # B
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)  # further columns, B each
    sample_ids: Sequence[str] = ()  # B, or empty when samples are known by position only
    # B or empty: prompts as their rows have them (text, or messages), and sampled token ids.
    source_prompts: Sequence[object] = ()
    response_ids: Sequence[Sequence[int]] = ()
    images: Sequence[Sequence[Picture]] = ()  # B, or empty in a run without
    global_step: int = 0  # steps that the policy had made
    max_steps: int = 0  # of the run

    @classmethod
    def of_columns(cls, names: Sequence[str]) -> "RewardBatch":
        """Return a batch without samples whose rows would have these columns."""
        return cls([], [], [], [], columns=dict.fromkeys(names, ()))

    def __len__(self) -> int:
        return len(self.queries)

    def name_of(self, index: int) -> str:
        """Name the sample at a position, for a message."""
        return f"sample {self.sample_ids[index] if self.sample_ids else index + 1}"

    def names(self) -> str:
        """Name all samples, for a message: the first few and how many more."""
        ids = self.sample_ids or [str(number) for number in range(1, len(self) + 1)]
        rest = len(ids) - MAX_NAMES_SHOWN
        shown = ", ".join(ids[:MAX_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
        return f"sample{'s' if len(ids) > 1 else ''} {shown}"

    def parts(self, size: int) -> "list[RewardBatch]":
        """Cut the batch into consecutive slices of at most `size` samples."""
        return [self._slice(slice(k, k + size)) for k in range(0, len(self), size)]

    def _slice(self, part: slice) -> "RewardBatch":
        columns = {name: values[part] for name, values in self.columns.items()}
        return replace(
            self, columns=columns, **{name: getattr(self, name)[part] for name in PER_SAMPLE}
        )


@dataclass(frozen=True)
class RewardResult:
    """The scores of B samples, every one a finite float32.

    Example: `RewardResult([1.0, None], extra_logs={"length": [3.0, 4.0]})`
    """

    rewards: list[float | None]  # B; None for a sample that no function applies to
    # B: raw 0-1 task scores, where the source gives them; `check_scores` refuses some without.
    scores: Sequence[float | None] | None = None
    # B each; None for samples that a number does not apply to.
    extra_logs: dict[str, list[float | None]] = field(default_factory=dict)
    extra_columns: dict[str, list[object]] = field(default_factory=dict)  # B each, plain values
    # B each: what the reward is the weighted sum of; None where a part does not apply.
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)  # keys that nobody knows


class RewardSource:
    """Scores batches on an event loop of its own, so that any thread or event loop may ask."""

    def __init__(self, name: str, batch_size: int) -> None:
        """Start the thread of the loop: a subclass checks its arguments before. `batch_size`: most
        samples that are scored in one call or request.
        """
        self.name = name
        self.batch_size = batch_size
        self._thread = LoopThread("rewards")

    @property
    def has_capacity(self) -> bool:
        """Return True if a batch of any size would be begun with at once."""
        return False

    async def score(self, batch: RewardBatch) -> RewardResult:
        """Score every sample once; raises RewardError. Cancelling it gives the work up."""
        return await asyncio.wrap_future(self.submit(batch))

    def submit(self, batch: RewardBatch) -> Future[RewardResult]:
        """Start scoring, for callers without an event loop."""
        if not self._thread.is_running:
            raise RewardError(f"{self.name}: the source of rewards was closed")
        return asyncio.run_coroutine_threadsafe(self._score_parts(batch), self._thread.loop)

    def check(self, columns: Sequence[str]) -> None:
        """Raise ConfigError where samples of rows with these columns cannot be scored."""

    async def shown(self, batch: RewardBatch) -> Shown:
        """Return the arguments that functions get for the first sample."""
        return {}

    async def score_part(self, batch: RewardBatch) -> RewardResult:
        """Score at most `batch_size` samples, on the source's own loop."""
        raise NotImplementedError

    async def release(self) -> None:
        """Free what is held outside this process."""

    def close(self) -> None:
        """Give up what is not scored, end processes and connections."""
        if self._thread.is_running:
            self._thread.run(self._end())
            self._thread.close()

    async def _score_parts(self, batch: RewardBatch) -> RewardResult:
        parts = batch.parts(self.batch_size)
        return concat_results(await asyncio.gather(*map(self.score_part, parts)))

    async def _end(self) -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self.release()


def concat_results(results: Sequence[RewardResult]) -> RewardResult:
    """Join the results of consecutive slices, B in all."""
    scores = [score for r in results for score in r.scores or [None] * len(r.rewards)]
    return RewardResult(
        rewards=[reward for r in results for reward in r.rewards],
        scores=scores if any(r.scores for r in results) else None,
        extra_logs=_concat_columns([(r.extra_logs, len(r.rewards)) for r in results]),
        extra_columns=_concat_columns([(r.extra_columns, len(r.rewards)) for r in results]),
        parts=_concat_columns([(r.parts, len(r.rewards)) for r in results]),
        unread=list(dict.fromkeys(key for r in results for key in r.unread)),
    )


def _concat_columns(parts: Sequence[tuple[Mapping[str, list[Any]], int]]) -> dict[str, list[Any]]:
    """Join the columns of slices and their sizes by name; None where a slice lacks one."""
    return {
        name: [value for part, size in parts for value in part.get(name, [None] * size)]
        for name in dict.fromkeys(name for part, _ in parts for name in part)
    }


def checked_result(
    answer: object, *, batch: RewardBatch, source: str, may_lack: bool = False
) -> RewardResult:
    """Check what a source returned: {rewards, scores?, extra_logs?, extra_columns?, parts?}, or
    bare rewards. A RewardError names the source and the sample. `may_lack`: of a function, which
    may have no reward for a sample.
    """
    fields = answer if isinstance(answer, Mapping) else {"rewards": answer}
    unread = [str(key) for key in fields if key not in KEYS]
    if mistake := mistyped_key(fields, KEYS):
        raise RewardError(f"{source}: {mistake}")
    if "rewards" not in fields:
        names = short(sorted(map(str, fields)))
        raise RewardError(f"{source}: the answer has no 'rewards'; it has {names}")
    scores = fields.get("scores")
    numbers = optional_numbers if may_lack else _numbers
    return RewardResult(
        rewards=[*numbers(fields["rewards"], f"{source}: rewards", batch)],
        scores=None if scores is None else numbers(scores, f"{source}: scores", batch),
        extra_logs={
            str(name): _log_numbers(values, f"{source}: extra_logs[{short(name)}]", batch)
            for name, values in _columns(fields, "extra_logs", source).items()
        },
        extra_columns={
            str(name): [
                v if v is None or isinstance(v, str | int | float) else str(v)
                for v in _one_per_sample(values, f"{source}: extra_columns[{short(name)}]", batch)
            ]
            for name, values in _columns(fields, "extra_columns", source).items()
        },
        parts={
            str(name): optional_numbers(values, f"{source}: parts[{short(name)}]", batch)
            for name, values in _columns(fields, "parts", source).items()
        },
        unread=unread,
    )


def _columns(fields: Mapping[Any, Any], name: str, source: str) -> Mapping[object, object]:
    columns = fields.get(name) or {}
    if not isinstance(columns, Mapping):
        raise RewardError(f"{source}: {name} is a {type(columns).__name__}, not a dict")
    return columns


def optional_numbers(values: object, name: str, batch: RewardBatch) -> list[float | None]:
    """Return one finite number per sample, B, from a tensor, an array or a list; None for samples
    without one.
    """
    numbers: list[float | None] = []
    for index, value in enumerate(_one_per_sample(values, name, batch)):
        where = f"{name} of {batch.name_of(index)} is"
        if value is not None and not isinstance(value, Real | Decimal):
            raise RewardError(f"{where} {short(value)}, not a number")
        number = None if value is None else as_float32(value)
        if number is not None and not math.isfinite(number):
            told = value if isinstance(value, float) else number  # an int may have a million digits
            raise RewardError(f"{where} {told!r}, not a finite float32")
        numbers.append(number)
    return numbers


def _numbers(values: object, name: str, batch: RewardBatch) -> list[float]:
    """Return one finite number per sample, B."""
    numbers = optional_numbers(values, name, batch)
    if None in numbers:
        which = batch.name_of(numbers.index(None))
        raise RewardError(f"{name} of {which} is None, not a number")
    return [number for number in numbers if number is not None]


def _log_numbers(values: object, name: str, batch: RewardBatch) -> list[float | None]:
    """Return a logged value per sample, B; a scalar counts for every sample."""
    is_scalar = isinstance(values, int | float) or getattr(values, "shape", None) == ()
    return optional_numbers([values] * len(batch) if is_scalar else values, name, batch)


def _one_per_sample(values: Any, name: str, batch: RewardBatch) -> list[object]:
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        raise RewardError(f"{name} has shape {tuple(shape)}. Return one dimension, (B,).")
    if shape is None and not isinstance(values, list | tuple):
        kind = type(values).__name__
        raise RewardError(f"{name} is a {kind}. Return a list, an array or a tensor.")
    found = values if shape is None else values.tolist()
    if len(found) != len(batch):
        raise RewardError(
            f"{name} has {len(found)} values for {len(batch)} samples ({batch.names()}). "
            "Return exactly one per sample."
        )
    return [v.item() if getattr(v, "shape", None) == () else v for v in found]
