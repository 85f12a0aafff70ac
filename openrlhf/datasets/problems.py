"""Collecting what is wrong with the rows of a data set, so that one message shows it all."""

from __future__ import annotations

import json
from collections.abc import Sequence

from datasets import Dataset

from openrlhf.errors import DataError

MAX_SHOWN = 20


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

    def extend(self, other: Problems) -> None:
        """Note those of rows that follow."""
        self.num_found += other.num_found
        self.shown += other.shown[: MAX_SHOWN - len(self.shown)]

    def raise_if_any(self, subject: str, remedy: str) -> None:
        """Raise one DataError that lists the first problems and says how many there are in all."""
        if not self.num_found:
            return
        head = f"{subject}: {self.num_found} bad rows. {remedy}"
        hidden = self.num_found - len(self.shown)
        tail = [f"... and {hidden} more"] if hidden else []
        raise DataError([head, *self.shown, *tail])


def missing_column(needed: str, found: Sequence[str], *, flag: str) -> DataError:
    """The error for a column that is not there: which is needed, which were found, what to type."""
    columns = ", ".join(found) or "none"
    return DataError(
        f"column '{needed}' is not in the data set; columns found: {columns}. "
        f"Give the right one with {flag}."
    )


def remember_files(rows: Dataset, files: Sequence[tuple[str, int]]) -> Dataset:
    """Note where rows come from, one (file, number of rows) after the other, for `row_place`."""
    rows.info.description = json.dumps(list(files))
    return rows


def files_of(rows: Dataset) -> list[tuple[str, int]]:
    """What `remember_files` noted; empty for rows that come from elsewhere."""
    try:
        return [(str(name), int(count)) for name, count in json.loads(rows.info.description)]
    except (ValueError, TypeError):  # a description that a person wrote
        return []


def row_place(rows: Dataset, index: int) -> str:
    """`train.jsonl: row 17`, counted from 0 in its file; `row 17` where the file is not known."""
    start = 0
    for name, count in files_of(rows):
        if index < start + count:
            return f"{name}: row {index - start}"
        start += count
    return f"row {index}"
