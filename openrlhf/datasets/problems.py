"""Collecting what is wrong with rows and data sets, so that one message shows it all, each problem
with its place.
"""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

import torch
from datasets import Dataset
from torch import Tensor

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


class Gathered:
    """Several things that are read one by one, all of whose problems are said together."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def attempt(self, read: Callable[[], T], *, about: str = "") -> T | None:
        """What is read, or None when its problems were noted; `about` says whose they are."""
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


@dataclass(frozen=True)
class Origin:
    """Where the rows of a data set come from: its parts, and how they were blended."""

    parts: tuple[Files, ...]
    part_of: Tensor | None  # (rows,) index of each row's part; None: one part
    place_of: Tensor | None  # (rows,) index of each row in its part

    def place(self, index: int) -> str | None:
        """File and row, counted from 1 in the file; None beyond what is known."""
        part = 0
        if self.part_of is not None and self.place_of is not None:
            part, index = int(self.part_of[index]), int(self.place_of[index])
        files = self.parts[part] if self.parts else []
        ends = list(accumulate(count for _, count in files))
        number = bisect_right(ends, index)
        if number == len(files):
            return None
        name, count = files[number]
        return f"{name}: row {index - ends[number] + count + 1}"


def remember_files(rows: Dataset, files: Sequence[tuple[str, int]]) -> Dataset:
    """Note where rows come from, one (file, number of rows) after the other, for `row_place`."""
    rows.info.description = json.dumps({"parts": [list(files)]})
    return rows


def remember_unread(rows: Dataset, unread: Sequence[str]) -> Dataset:
    """Note files beside those of the rows that nobody reads, for `unread_of`."""
    noted = json.loads(rows.info.description) | {"unread": list(unread)}
    rows.info.description = json.dumps(noted)
    return rows


def unread_of(rows: Dataset) -> list[str]:
    """What `remember_unread` noted."""
    try:
        return list(json.loads(rows.info.description or "{}").get("unread", ()))
    except (ValueError, AttributeError):  # a description that a person wrote
        return []


def remember_blend(rows: Dataset, parts: Sequence[Files], part_of: Tensor) -> Dataset:
    """Note which of the parts each row, (rows,) indices, comes from; rows of a part keep their
    order.
    """
    packed = base64.b64encode(zlib.compress(array("i", part_of.tolist()).tobytes())).decode()
    rows.info.description = json.dumps({"parts": list(parts), "blend": packed})
    return rows


def files_of(rows: Dataset) -> Files:
    """What `remember_files` noted; empty for rows that come from elsewhere."""
    parts = _origin(rows.info.description or "").parts
    return parts[0] if len(parts) == 1 else []


def row_place(rows: Dataset, index: int) -> str:
    """`train.jsonl: row 17`, counted from 1 in its file; `row 17` where the file is not known."""
    return _origin(rows.info.description or "").place(index) or f"row {index + 1}"


@lru_cache(maxsize=8)
def _origin(description: str) -> Origin:
    try:
        noted = json.loads(description)
        parts = tuple([(str(name), int(count)) for name, count in part] for part in noted["parts"])
    except (ValueError, TypeError, KeyError):  # a description that a person wrote
        return Origin((), None, None)
    if "blend" not in noted:
        return Origin(parts, None, None)
    unpacked = bytearray(zlib.decompress(base64.b64decode(noted["blend"])))
    part_of = torch.frombuffer(unpacked, dtype=torch.int32)
    place_of = torch.zeros(len(part_of), dtype=torch.int64)
    for number in range(len(parts)):
        of_part = part_of == number
        place_of[of_part] = torch.arange(int(of_part.sum()))
    return Origin(parts, part_of, place_of)
