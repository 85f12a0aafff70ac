"""Reward sources: anything that scores texts with one finite float per sample, or a typed error."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from openrlhf.errors import RewardError
from openrlhf.rewards.answers import CheckedAnswer, RewardBatch, checked_answer

__all__ = [
    "RewardBatch",
    "RewardResult",
    "RewardSource",
    "SaysRoom",
    "StreamingSource",
    "concat_results",
    "handed_to",
    "joined",
    "result_from_answer",
]


@dataclass(frozen=True)
class RewardResult:
    """The scores of B samples."""

    rewards: Tensor  # (B,) float32, finite
    scores: Tensor | None = None  # (B,) float32: raw 0-1 task scores, where the source gives them
    extra_logs: dict[str, Tensor] = field(default_factory=dict)  # (B,) float32 each; nan: none
    extra_columns: dict[str, list[object]] = field(default_factory=dict)  # B each


class RewardSource(Protocol):
    """Anything that scores texts: a function, a server, a pool of processes."""

    def score(self, batch: RewardBatch) -> RewardResult:
        """Score every sample once; raises RewardError rather than answering fewer or non-finite
        rewards.
        """
        ...


class StreamingSource(RewardSource, Protocol):
    """A source that scores several batches at the same time, beside whatever its caller does."""

    def submit(self, batch: RewardBatch) -> Future[RewardResult]:
        """Start scoring; the future has what `score` answers or raises."""
        ...

    def close(self) -> None:
        """Give up what is not answered, end processes and connections."""
        ...


@runtime_checkable
class SaysRoom(Protocol):
    """A source that knows whether it would begin with a batch at once."""

    @property
    def has_room(self) -> bool:
        """Whether some of it has nothing to do: then waiting for more samples gains nothing."""
        ...


def result_from_answer(answer: object, *, batch: RewardBatch, source: str) -> RewardResult:
    """Check an answer of the form {rewards, scores?, extra_logs?}, or bare rewards; raises
    RewardError.
    """
    return _as_tensors(checked_answer(answer, batch=batch, source=source))


def concat_results(results: Sequence[RewardResult], *, source: str) -> RewardResult:
    """The results of consecutive slices as one, B in all; raises RewardError where some have scores
    and others not.
    """
    if not results:
        return RewardResult(torch.zeros(0))
    scores = [r.scores for r in results if r.scores is not None]
    if scores and len(scores) < len(results):
        raise RewardError(f"{source}: scores are there for some batches and not for others")
    logs = dict.fromkeys(name for r in results for name in r.extra_logs)
    columns = dict.fromkeys(name for r in results for name in r.extra_columns)
    missing = [torch.full_like(r.rewards, torch.nan) for r in results]
    return RewardResult(
        rewards=torch.cat([r.rewards for r in results]),
        scores=torch.cat(scores) if scores else None,
        extra_logs={
            name: torch.cat(
                [r.extra_logs.get(name, nan) for r, nan in zip(results, missing, strict=True)]
            )
            for name in logs
        },
        extra_columns={
            name: [v for r in results for v in r.extra_columns.get(name, [None] * len(r.rewards))]
            for name in columns
        },
    )


def joined(futures: Sequence[Future[RewardResult]], *, source: str) -> Future[RewardResult]:
    """The results of consecutive slices as one future; of several errors it has the first one's in
    order.
    """
    whole: Future[RewardResult] = Future()
    lock, num_open = threading.Lock(), len(futures)

    def finish() -> None:
        with handed_to(whole):
            whole.set_result(concat_results([f.result() for f in futures], source=source))

    def count(_: Future[RewardResult]) -> None:
        nonlocal num_open
        with lock:
            num_open -= 1
            is_last = num_open == 0
        if is_last:
            finish()

    for future in futures:
        future.add_done_callback(count)
    if not futures:
        finish()
    return whole


@dataclass(frozen=True)
class handed_to:
    """A block whose error, if any, becomes that of a future instead of ending the thread."""

    future: Future[Any]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.future.set_exception(error)
        return True


def _as_tensors(answer: CheckedAnswer) -> RewardResult:
    return RewardResult(
        rewards=torch.tensor(answer.rewards, dtype=torch.float32),
        scores=None if answer.scores is None else torch.tensor(answer.scores, dtype=torch.float32),
        extra_logs={
            name: torch.tensor([math.nan if v is None else v for v in values], dtype=torch.float32)
            for name, values in answer.extra_logs.items()
        },
        extra_columns=answer.extra_columns,
    )
