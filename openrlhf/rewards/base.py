"""What a reward source is asked and what it answers: one finite float per sample, or a typed error.

A request pickles, so a source may score it in another process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from openrlhf.errors import RewardError


@dataclass(frozen=True)
class RewardBatch:
    """B samples to be scored, as text."""

    queries: Sequence[str]  # B, prompt and response in one
    prompts: Sequence[str]  # B
    responses: Sequence[str]  # B
    labels: Sequence[object]  # B
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)  # further columns, B each
    sample_ids: Sequence[str] = ()  # B, or empty when samples are known by position only

    def __post_init__(self) -> None:
        sizes = {
            "queries": len(self.queries),
            "prompts": len(self.prompts),
            "responses": len(self.responses),
            "labels": len(self.labels),
            **{name: len(values) for name, values in self.columns.items()},
        }
        assert set(sizes.values()) == {len(self.queries)}, f"parts of unequal length: {sizes}"
        assert len(self.sample_ids) in (0, len(self.queries)), "sample_ids do not match the queries"

    def __len__(self) -> int:
        return len(self.queries)

    def name_of(self, index: int) -> str:
        """How a message names the sample at a position."""
        return f"sample {self.sample_ids[index] if self.sample_ids else index}"

    def slice(self, start: int, stop: int) -> RewardBatch:
        """Samples start to stop - 1 as a batch of their own."""
        return RewardBatch(
            queries=self.queries[start:stop],
            prompts=self.prompts[start:stop],
            responses=self.responses[start:stop],
            labels=self.labels[start:stop],
            columns={name: values[start:stop] for name, values in self.columns.items()},
            sample_ids=self.sample_ids[start:stop],
        )


@dataclass(frozen=True)
class RewardResult:
    """The scores of B samples."""

    rewards: Tensor  # (B,) float32, finite
    scores: Tensor | None = None  # (B,) float32: raw 0-1 task scores, where the source gives them
    extra_logs: dict[str, Tensor] = field(default_factory=dict)  # (B,) float32 each


class RewardSource(Protocol):
    """Anything that scores texts: a function, a server, a pool of processes."""

    def score(self, batch: RewardBatch) -> RewardResult:
        """Score every sample once; raises RewardError rather than answering fewer or non-finite
        rewards.
        """
        ...


def finite_column(values: object, *, name: str, batch: RewardBatch, source: str) -> Tensor:
    """One finite float32 per sample, (B,), from a tensor, an array or a list; RewardError names the
    bad sample.
    """
    numbers = _as_list(values, name=name, source=source)
    if len(numbers) != len(batch):
        raise RewardError(
            f"{source}: {name} has {len(numbers)} values for {len(batch)} samples. "
            "Return exactly one per sample."
        )
    for index, value in enumerate(numbers):
        if not _is_number(value):
            raise RewardError(
                f"{source}: {name} of {batch.name_of(index)} is {value!r}, not a number"
            )
    column = torch.tensor([_to_float(value) for value in numbers], dtype=torch.float32)
    for index in (~torch.isfinite(column)).nonzero().flatten().tolist():
        raise RewardError(
            f"{source}: {name} of {batch.name_of(index)} is {numbers[index]!r}, not a finite "
            "float32"
        )
    return column


def result_from_answer(
    answer: Mapping[str, object], *, batch: RewardBatch, source: str
) -> RewardResult:
    """Check an answer of the form {rewards, scores?, extra_logs?}; raises RewardError."""
    if "rewards" not in answer:
        raise RewardError(f"{source}: the answer has no 'rewards'; it has {sorted(answer)}")
    scores = answer.get("scores")
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise RewardError(f"{source}: extra_logs is a {type(logs).__name__}, not a dict")
    return RewardResult(
        rewards=finite_column(answer["rewards"], name="rewards", batch=batch, source=source),
        scores=None
        if scores is None
        else finite_column(scores, name="scores", batch=batch, source=source),
        extra_logs={
            str(name): _log_column(values, name=str(name), batch=batch, source=source)
            for name, values in logs.items()
        },
    )


def concat_results(results: Sequence[RewardResult], *, source: str) -> RewardResult:
    """The results of consecutive slices as one; raises RewardError when they do not carry the same
    parts.
    """
    if not results:
        return RewardResult(torch.zeros(0))
    parts = {(r.scores is not None, *sorted(r.extra_logs)) for r in results}
    if len(parts) > 1:
        raise RewardError(
            f"{source}: scores or extra_logs are there for some batches and not for others"
        )
    scores = [r.scores for r in results if r.scores is not None]
    return RewardResult(
        rewards=torch.cat([r.rewards for r in results]),
        scores=torch.cat(scores) if scores else None,
        extra_logs={
            name: torch.cat([r.extra_logs[name] for r in results]) for name in results[0].extra_logs
        },
    )


def _log_column(values: object, *, name: str, batch: RewardBatch, source: str) -> Tensor:
    """A logged value per sample, (B,); a scalar counts for every sample."""
    is_scalar = _is_number(values) or getattr(values, "shape", None) == ()
    spread = [values] * len(batch) if is_scalar else values
    return finite_column(spread, name=f"extra_logs[{name!r}]", batch=batch, source=source)


def _as_list(values: object, *, name: str, source: str) -> list[object]:
    shape = getattr(values, "shape", None)
    if shape is not None and len(shape) != 1:
        raise RewardError(f"{source}: {name} has shape {tuple(shape)}. Return one dimension, (B,).")
    if shape is not None:
        return values.tolist()  # type: ignore[attr-defined]
    if isinstance(values, (list, tuple)):
        return [value.item() if getattr(value, "shape", None) == () else value for value in values]
    raise RewardError(
        f"{source}: {name} is a {type(values).__name__}. Return a list, an array or a tensor."
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float))


def _to_float(value: bool | int | float) -> float:
    """The number as a float; an integer that no float32 can hold becomes infinite, and is then
    refused.
    """
    return math.inf if isinstance(value, int) and abs(value) > 1e39 else float(value)
