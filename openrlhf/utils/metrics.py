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

    Example: `metrics.add("reward", 0.5, weight=8)`, then `metrics.values() == {"reward": 0.5}`
    """

    # name -> [total, weight, reduction], as JSON has it
    cells: dict[str, list[Any]] = field(default_factory=dict)

    def add(
        self, name: str, value: float, *, weight: float = 1.0, reduction: Reduction = "mean"
    ) -> None:
        """Add one value; `weight` counts only for means (say, the tokens it is a mean of)."""
        total = value * weight if reduction == "mean" else value
        self._absorb(name, float(total), float(weight), reduction)

    def merge(self, other: "Metrics") -> "Metrics":
        """Merge another set into this one; return this one."""
        for name, cell in other.cells.items():
            self._absorb(name, *cell)
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
        if name in self.cells:
            before, weight_before, reduction_before = self.cells[name]
            assert reduction == reduction_before, "one metric, two reductions"
            weight += weight_before
            total = COMBINE[reduction]([before, total])
        self.cells[name] = [total, weight, reduction]


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
