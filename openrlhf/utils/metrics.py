"""Metrics that know how they combine: a mean carries its weight, so merging over micro-batches and
ranks is exact.

`timed` is the one clock of the package; names follow the logged names of the documentation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass
class _Cell:
    total: float
    weight: float
    reduction: Reduction

    def absorb(self, other: _Cell) -> None:
        assert self.reduction == other.reduction, "one metric, two reductions"
        if self.reduction in ("mean", "sum"):
            self.total += other.total
            self.weight += other.weight
        else:
            self.total = (max if self.reduction == "max" else min)(self.total, other.total)

    @property
    def value(self) -> float:
        if self.reduction == "mean":
            return self.total / self.weight if self.weight else 0.0
        return self.total


@dataclass
class Metrics:
    """Named numbers with their reductions; picklable, so that ranks can send theirs to the
    controller.
    """

    cells: dict[str, _Cell] = field(default_factory=dict)

    def add(
        self, name: str, value: float, *, weight: float = 1.0, reduction: Reduction = "mean"
    ) -> None:
        """Note one value; `weight` counts only for means (say, the tokens it is a mean of)."""
        total = value * weight if reduction == "mean" else value
        self._absorb(name, _Cell(float(total), float(weight), reduction))

    def update(self, values: Mapping[str, float]) -> None:
        """Note several values as plain means of weight 1."""
        for name, value in values.items():
            self.add(name, value)

    def merge(self, other: Metrics) -> Metrics:
        """Fold another set in; return self."""
        for name, cell in other.cells.items():
            self._absorb(name, _Cell(cell.total, cell.weight, cell.reduction))
        return self

    def values(self) -> dict[str, float]:
        """Return the reduced number of every metric."""
        return {name: cell.value for name, cell in self.cells.items()}

    def state_dict(self) -> dict[str, list[Any]]:
        """Return everything as plain lists, for JSON."""
        return {n: [c.total, c.weight, c.reduction] for n, c in self.cells.items()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, list[Any]]) -> Metrics:
        """Return the metrics of a `state_dict`."""
        return cls({name: _Cell(*values) for name, values in state.items()})

    def __getitem__(self, name: str) -> float:
        return self.cells[name].value

    def __contains__(self, name: str) -> bool:
        return name in self.cells

    def _absorb(self, name: str, cell: _Cell) -> None:
        if name in self.cells:
            self.cells[name].absorb(cell)
        else:
            self.cells[name] = cell


@contextmanager
def timed(phase: str, metrics: Metrics) -> Iterator[None]:
    """Add the seconds spent inside to `timing/<phase>`."""
    start = time.monotonic()
    yield
    metrics.add(f"timing/{phase}", time.monotonic() - start, reduction="sum")
