"""Collecting what is wrong with rows and data sets, so that one message shows it all, each problem
with its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

from datasets import Dataset

from openrlhf.errors import ConfigError, DataError

MAX_SHOWN = 20
T = TypeVar("T")
Files = list[tuple[str, int]]  # (file, number of its rows), one behind the other


class Problems:
    """Counts every problem and keeps the first twenty in full."""

    def __init__(self) -> None:
        self.num_found = 0
        self.shown: list[str] = []

    def add(self, place: str, what: str) -> None:
        """Note a problem at a place such as `train.jsonl:17` or `row 17`."""
        self.num_found += 1
        if len(self.shown) < MAX_SHOWN:
            self.shown.append(f"{place}: {what}")

    def raise_if_any(self, subject: str, remedy: str) -> None:
        """Raise one DataError that lists the first problems and says how many there are in all."""
        if not self.num_found:
            return
        head = f"{subject}: {self.num_found} bad rows. {remedy}"
        hidden = self.num_found - len(self.shown)
        tail = [f"... and {hidden} more"] if hidden else []
        raise DataError([head, *self.shown, *tail])


def missing_column(needed: str, found: Sequence[str], *, flag: str) -> DataError:
    """Return the error for a column that is not there: which is needed, which were found, what to
    type.
    """
    columns = ", ".join(found) or "none"
    return DataError(
        f"column '{needed}' is not in the data set; columns found: {columns}. "
        f"Give the right one with {flag}."
    )


class Gathered:
    """Several things that are read one by one, all of whose problems are said together."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def attempt(self, read: Callable[[], T], *, about: str = "") -> T | None:
        """Return what is read, or None and note its problems; `about` says whose they are."""
        try:
            return read()
        except ConfigError as error:
            first, *others = error.problems
            is_said = not others and first in self.problems
            self.problems += [] if is_said else [about + first, *others]
        return None

    def raise_if_any(self) -> None:
        """Raise DataError with everything that was noted."""
        if self.problems:
            raise DataError(list(dict.fromkeys(self.problems)))


def remember_files(rows: Dataset, files: Sequence[tuple[str, int]]) -> Dataset:
    """Note the files that rows were read from, one (file, number of rows) after the other."""
    rows.info.description = json.dumps({"files": list(files)})
    return rows


@lru_cache(maxsize=8)
def _files(description: str | None) -> Files:
    try:
        return [(str(name), int(count)) for name, count in json.loads(description or "")["files"]]
    except (ValueError, TypeError, KeyError):  # none, or one that a person wrote
        return []


def files_of(rows: Dataset) -> Files:
    """Return what `remember_files` noted; empty for rows that come from elsewhere."""
    return _files(rows.info.description)


def row_place(rows: Dataset, index: int) -> str:
    """Return `train.jsonl: row 17`, counted from 1 in its file; `row 17` for an unknown file."""
    drawn = rows._indices  # rows of a blend are picked from the data sets one after the other
    place = index if drawn is None else drawn.column(0)[index].as_py()
    for name, count in files_of(rows):
        if place < count:
            return f"{name}: row {place + 1}"
        place -= count
    return f"row {index + 1}"
