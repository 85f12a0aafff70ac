"""Collecting what is wrong with rows and data sets, so that one message shows it all, each problem
with its place.
"""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

from datasets import Dataset

from openrlhf.errors import ConfigError, DataError

MAX_SHOWN = 20
T = TypeVar("T")


def raise_bad_rows(subject: str, problems: Sequence[str], remedy: str) -> None:
    """Raise one DataError that lists the first problems and says how many there are, if any."""
    if not problems:
        return
    head = f"{subject}: {len(problems)} bad rows. {remedy}"
    hidden = len(problems) - MAX_SHOWN
    tail = [f"... and {hidden} more"] if hidden > 0 else []
    raise DataError([head, *problems[:MAX_SHOWN], *tail])


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
    rows.info.description = json.dumps({"files": files})
    return rows


@lru_cache(maxsize=8)
def _files(description: str | None) -> list[tuple[str, int]]:
    is_ours = (description or "").startswith('{"files": ')
    return json.loads(description or "")["files"] if is_ours else []


def row_place(rows: Dataset, index: int) -> str:
    """Return `train.jsonl: row 17`, counted from 1 in its file; `row 17` for an unknown file."""
    drawn = rows._indices  # rows of a blend are picked from the data sets one after the other
    place = index if drawn is None else drawn.column(0)[index].as_py()
    for name, count in _files(rows.info.description):
        if place < count:
            return f"{name}: row {place + 1}"
        place -= count
    return f"row {index + 1}"
