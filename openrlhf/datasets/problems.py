"""Collecting what is wrong with the rows of a data set, so that one message shows it all."""

from __future__ import annotations

from collections.abc import Sequence

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
