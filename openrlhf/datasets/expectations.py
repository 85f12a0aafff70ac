"""What a data set is known to be before it is read: a file cut at the end of a line looks whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import Self

from openrlhf.config.common import CheckedDataConfig
from openrlhf.errors import ConfigError, DataError

PIECE = 2**20  # bytes that are read at a time


@dataclass(frozen=True)
class Expectations:
    """Facts of one data set, or comma lists with one for each of several."""

    num_rows: str | None = None
    sha256: str | None = None  # of its file, in hexadecimal
    duplicate_ids: str = "error"  # error | keep

    @classmethod
    def of(cls, data: CheckedDataConfig) -> Self:
        """As a command's `data.*` says."""
        return cls(data.expect_rows, data.expect_sha256, data.duplicate_ids)

    def of_each(self, names: Sequence[str]) -> list[Expectations]:
        """The facts of each data set; raises ConfigError when they are more or fewer."""
        counts = _split(self.num_rows, names, "--expect_rows")
        hashes = _split(self.sha256, names, "--expect_sha256")
        pairs = zip(counts, hashes, strict=True)
        return [replace(self, num_rows=count, sha256=digest) for count, digest in pairs]

    def check_count(self, name: str, num_rows: int) -> None:
        """Raise DataError when a data set has another number of rows."""
        if self.num_rows and int(self.num_rows) != num_rows:
            raise DataError(
                f"data set {name} has {num_rows} rows, not {self.num_rows}. Fetch it again, or "
                "correct --expect_rows."
            )


UNCHECKED = Expectations()


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes, as `sha256sum` prints it; raises DataError."""
    try:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


def _split(facts: str | None, names: Sequence[str], flag: str) -> list[str | None]:
    if not facts:
        return [None] * len(names)
    each = [fact.strip() for fact in facts.split(",")]
    if len(each) != len(names):
        raise ConfigError(
            f"{flag} {facts} is of {len(each)} data sets, and {len(names)} are named. Give one for "
            "each."
        )
    if flag == "--expect_rows" and not all(fact.isdecimal() for fact in each):
        raise ConfigError(f"--expect_rows {facts} is no number of rows. Type e.g. 1000.")
    return list(each)
