"""Metrics that know how they combine: a mean carries its weight, so merging over micro-batches and
ranks is exact.

`timed` is the one clock of the package; names follow the logged names of the documentation.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

STDERR = "_stderr"  # behind a metric's name: the standard error of its mean
Values = Mapping[str, float]
Reduction = Literal["mean", "sum", "max", "min"]
COMBINE: dict[Reduction, Callable[[list[float]], float]] = {
    "mean": sum,
    "sum": sum,
    "max": max,
    "min": min,
}


@dataclass
class Metrics:
    """Named numbers with their reductions; picklable, so that ranks can send theirs to the
    controller.

    A tensor is read when somebody looks, all of them in one copy to the host: a device need not be
    waited for between two micro-batches.

    Example: `metrics.add("reward", 0.5, weight=8)`, then `metrics.values() == {"reward": 0.5}`
    """

    known: dict[str, list[Any]] = field(default_factory=dict)
    waiting: list[tuple[str, Tensor, float, Reduction]] = field(default_factory=list)

    def add(
        self,
        name: str,
        value: float | Tensor,
        *,
        weight: float = 1.0,
        reduction: Reduction = "mean",
    ) -> None:
        """Add one value, a number or a tensor (); `weight` counts only for means (say, the tokens
        it is a mean of).
        """
        if isinstance(value, Tensor):
            self.waiting.append((name, value.detach(), weight, reduction))
            return
        total = value * weight if reduction == "mean" else value
        self._absorb(name, float(total), float(weight), reduction)

    @property
    def cells(self) -> dict[str, list[Any]]:
        """Return [total, weight, reduction] by name, as JSON has it."""
        self.read()
        return self.known

    def read(self) -> None:
        """Read the tensors that were added; waits for their device."""
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            numbers = torch.stack([value.double() for _, value, _, _ in waiting]).tolist()
            for (name, _, weight, reduction), number in zip(waiting, numbers, strict=True):
                self.add(name, number, weight=weight, reduction=reduction)

    def __getstate__(self) -> dict[str, Any]:
        return {"known": self.cells, "waiting": []}

    def merge(self, other: "Metrics") -> "Metrics":
        """Merge another set into this one; return this one."""
        for name, cell in other.cells.items():
            self._absorb(name, *cell)
        return self

    def as_means(self, names: Iterable[str], weight: float = 1.0) -> "Metrics":
        """Turn sums over `weight` whole steps into means over steps; return the same metrics."""
        for name in names:
            if name in self.cells and self.known[name][2] == "sum":
                self.known[name][1:] = [weight, "mean"]
        return self

    def values(self) -> dict[str, float]:
        """Return the reduced number of every metric."""
        return {name: self[name] for name in self.cells}

    def __getitem__(self, name: str) -> float:
        total, weight, reduction = self.cells[name]
        if reduction == "mean":
            return total / weight if weight else 0.0
        return total

    def __contains__(self, name: str) -> bool:
        return name in self.cells

    def _absorb(self, name: str, total: float, weight: float, reduction: Reduction) -> None:
        if name in self.known:
            before, weight_before, reduction_before = self.known[name]
            assert reduction == reduction_before, "one metric, two reductions"
            weight += weight_before
            total = COMBINE[reduction]([before, total])
        self.known[name] = [total, weight, reduction]


def merged(parts: Iterable[Metrics]) -> Metrics:
    """Return the metrics of all parts together."""
    whole = Metrics()
    for part in parts:
        whole.merge(part)
    return whole


def standard_errors(parts: Sequence[Metrics]) -> dict[str, float]:
    """Return the standard error of every mean that several parts know, such as micro-batches: that
    of a ratio of sums over parts drawn at random (Cochran, Sampling Techniques, section 6.4).
    """
    errors = {}
    for name, (total, weight, reduction) in merged(parts).cells.items():
        cells = [part.cells[name] for part in parts if name in part.cells]
        if reduction != "mean" or len(cells) < 2 or not weight:
            continue
        squares = sum((own - total / weight * size) ** 2 for own, size, _ in cells)
        errors[name + STDERR] = math.sqrt(squares * len(cells) / (len(cells) - 1)) / weight
    return errors


@contextmanager
def timed(phase: str, metrics: Metrics) -> Iterator[None]:
    """Add the seconds spent inside to `timing/<phase>`."""
    start = time.monotonic()
    yield
    metrics.add(f"timing/{phase}", time.monotonic() - start, reduction="sum")
