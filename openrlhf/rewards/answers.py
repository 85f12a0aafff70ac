"""What a reward source is asked and the strict check of what it answers, in plain Python.

Workers that score in processes of their own import this and nothing heavy, so that they start in
a moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from openrlhf.errors import RewardError
from openrlhf.utils.numbers import as_float32

MAX_NAMES_SHOWN = 3
PER_SAMPLE = ("sample_ids", "source_prompts", "response_ids")  # of a batch, where they are known
TRUNCATED_COLUMN = "is_truncated"  # of every sample of a run, beside the row's own columns


@dataclass(frozen=True)
class RewardBatch:
    """B samples to be scored, as text."""

    queries: Sequence[str]  # B, prompt and response in one
    prompts: Sequence[str]  # B
    responses: Sequence[str]  # B, without special tokens
    labels: Sequence[object]  # B
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)  # further columns, B each
    sample_ids: Sequence[str] = ()  # B, or empty when samples are known by position only
    # B or empty: prompts as their rows have them (text, or messages), and sampled token ids.
    source_prompts: Sequence[object] = ()
    response_ids: Sequence[Sequence[int]] = ()
    global_step: int = 0  # steps that the policy had made
    max_steps: int = 0  # of the run

    def __post_init__(self) -> None:
        sizes = {
            "queries": len(self.queries),
            "prompts": len(self.prompts),
            "responses": len(self.responses),
            "labels": len(self.labels),
            **{name: len(values) for name, values in self.columns.items()},
        }
        assert set(sizes.values()) == {len(self.queries)}, f"parts of unequal length: {sizes}"
        for name in PER_SAMPLE:
            assert len(getattr(self, name)) in (0, len(self)), f"{name} do not match the queries"

    def __len__(self) -> int:
        return len(self.queries)

    def name_of(self, index: int) -> str:
        """How a message names the sample at a position."""
        return f"sample {self.sample_ids[index] if self.sample_ids else index}"

    def names(self) -> str:
        """How a message names all samples: the first few and how many more."""
        ids = self.sample_ids or [str(index) for index in range(len(self))]
        rest = len(ids) - MAX_NAMES_SHOWN
        shown = ", ".join(ids[:MAX_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
        return f"sample{'s' if len(ids) > 1 else ''} {shown}"

    def slice(self, start: int, stop: int) -> RewardBatch:
        """Samples start to stop - 1 as a batch of their own."""
        return replace(
            self,
            queries=self.queries[start:stop],
            prompts=self.prompts[start:stop],
            responses=self.responses[start:stop],
            labels=self.labels[start:stop],
            columns={name: values[start:stop] for name, values in self.columns.items()},
            **{name: getattr(self, name)[start:stop] for name in PER_SAMPLE},
        )

    def parts(self, size: int) -> list[RewardBatch]:
        """The batch in consecutive slices of at most `size` samples."""
        return [self.slice(start, start + size) for start in range(0, len(self), size)]


@dataclass(frozen=True)
class CheckedAnswer:
    """The scores of B samples, every one a number that fits float32."""

    rewards: list[float]  # B
    scores: list[float] | None = None  # B
    # B each; None for samples that a number does not apply to.
    extra_logs: dict[str, list[float | None]] = field(default_factory=dict)
    extra_columns: dict[str, list[object]] = field(default_factory=dict)  # B each, plain values

    def as_dict(self) -> dict[str, object]:
        """The answer as a source would give it."""
        return asdict(self)


def checked_answer(answer: object, *, batch: RewardBatch, source: str) -> CheckedAnswer:
    """Check an answer of the form {rewards, scores?, extra_logs?, extra_columns?}, or bare rewards;
    RewardError names the source and the sample.
    """
    if not isinstance(answer, Mapping):
        answer = {"rewards": answer}
    if "rewards" not in answer:
        raise RewardError(
            f"{source}: the answer has no 'rewards'; it has {sorted(map(str, answer))}"
        )
    scores = answer.get("scores")
    logs = _mapping(answer, "extra_logs", source=source)
    columns = _mapping(answer, "extra_columns", source=source)
    return CheckedAnswer(
        rewards=finite_numbers(answer["rewards"], name="rewards", batch=batch, source=source),
        scores=None
        if scores is None
        else finite_numbers(scores, name="scores", batch=batch, source=source),
        extra_logs={
            str(name): _log_numbers(values, name=str(name), batch=batch, source=source)
            for name, values in logs.items()
        },
        extra_columns={
            str(name): _plain_values(values, name=str(name), batch=batch, source=source)
            for name, values in columns.items()
        },
    )


def _mapping(answer: Mapping[str, object], name: str, *, source: str) -> Mapping[object, object]:
    found = answer.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise RewardError(f"{source}: {name} is a {type(found).__name__}, not a dict")
    return found


def finite_numbers(values: object, *, name: str, batch: RewardBatch, source: str) -> list[float]:
    """One finite number per sample, B, from a tensor, an array or a list; RewardError names the
    bad sample.
    """
    numbers = optional_numbers(values, name=name, batch=batch, source=source)
    for index, number in enumerate(numbers):
        if number is None:
            raise RewardError(f"{source}: {name} of {batch.name_of(index)} is None, not a number")
    return [number for number in numbers if number is not None]


def optional_numbers(
    values: object, *, name: str, batch: RewardBatch, source: str
) -> list[float | None]:
    """The same, with None for samples that have no number."""
    numbers = _one_per_sample(values, name=name, batch=batch, source=source)
    for index, value in enumerate(numbers):
        if value is not None and not _is_number(value):
            raise RewardError(
                f"{source}: {name} of {batch.name_of(index)} is {value!r}, not a number"
            )
    floats = [None if value is None else as_float32(value) for value in numbers]  # type: ignore[arg-type]
    for index, number in enumerate(floats):
        if number is not None and not math.isfinite(number):
            raise RewardError(
                f"{source}: {name} of {batch.name_of(index)} is {numbers[index]!r}, not a finite "
                "float32"
            )
    return floats


def _log_numbers(
    values: object, *, name: str, batch: RewardBatch, source: str
) -> list[float | None]:
    """A logged value per sample, B; a scalar counts for every sample."""
    is_scalar = _is_number(values) or getattr(values, "shape", None) == ()
    spread = [values] * len(batch) if is_scalar else values
    return optional_numbers(spread, name=f"extra_logs[{name!r}]", batch=batch, source=source)


def _plain_values(values: object, *, name: str, batch: RewardBatch, source: str) -> list[object]:
    """Values to be written beside the samples, B, as JSON knows them."""
    name = f"extra_columns[{name!r}]"
    found = _one_per_sample(values, name=name, batch=batch, source=source)
    return [v if v is None or isinstance(v, (str, int, float)) else str(v) for v in found]


def _one_per_sample(values: object, *, name: str, batch: RewardBatch, source: str) -> list[object]:
    found = _as_list(values, name=name, source=source)
    if len(found) != len(batch):
        raise RewardError(
            f"{source}: {name} has {len(found)} values for {len(batch)} samples "
            f"({batch.names()}). Return exactly one per sample."
        )
    return found


def _as_list(values: object, *, name: str, source: str) -> list[object]:
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        raise RewardError(f"{source}: {name} has shape {tuple(shape)}. Return one dimension, (B,).")
    if shape is not None:
        return list(values.tolist())  # type: ignore[attr-defined]
    if isinstance(values, (list, tuple)):
        return [value.item() if getattr(value, "shape", None) == () else value for value in values]
    raise RewardError(
        f"{source}: {name} is a {type(values).__name__}. Return a list, an array or a tensor."
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float))
