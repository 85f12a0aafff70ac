"""All samples of a run for a server: DuckDB sorts, filters and searches what a table shows; tokens
are read from the file of the one sample that is looked at.
"""

import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import duckdb

from openrlhf.errors import ConfigError, first_line
from openrlhf.report.samples import COLUMNS, Row, plain, sample_of

SEARCHED = ("prompt", "response", "label")
MAX_QUERIES = 8  # whose order is remembered
MAX_PREVIEW = 300  # characters of a text in a table
GROUP_COLUMNS = {
    "prompt": "any_value(prompt)",
    "label": "any_value(label)",
    "datasource": "any_value(datasource)",
    "num_samples": "count(*)",
    "reward": "avg(reward)",
    "reward_std": "stddev_samp(reward)",
    "reward_min": "min(reward)",
    "reward_max": "max(reward)",
    "num_actions": "avg(num_actions)",
}
# What the files lack is null; tokens are left out.
READ_FILES = """
    INSERT INTO samples BY NAME SELECT parse_filename(filename) AS file, file_row_number AS number,
    COLUMNS(lambda name: list_contains(?, name))
    FROM read_parquet(?, union_by_name=true, filename=true, file_row_number=true)
"""


@dataclass(frozen=True)
class Query:
    """A page of the table of samples: of one file, or of all files if `file` is None."""

    file: str | None = None
    group_id: int | None = None
    search: str = ""
    sort: str | None = None
    is_descending: bool = False
    page: int = 1
    size: int = 50


class SampleIndex:
    """The samples in `run_dir`, as they are at the last `refresh`."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "rollouts"
        self._files: dict[str, int] | None = None  # that were read, and their times
        self._lock = threading.Lock()
        self._db = duckdb.connect(config={"temp_directory": tempfile.gettempdir()})

    def refresh(self) -> None:
        """Read the files again if they are not those of before."""
        with self._lock:
            paths = sorted(self.folder.glob("*step_*.parquet"))
            files = {path.name: path.stat().st_mtime_ns for path in paths}
            if files == self._files:
                return
            columns = "".join(f", {name} {kind}" for name, kind in COLUMNS.items())
            self._db.execute(
                f"CREATE OR REPLACE TABLE samples (file VARCHAR, number BIGINT{columns})"
            )
            try:
                if paths:
                    self._db.execute(READ_FILES, [list(COLUMNS), list(map(str, paths))])
            except duckdb.Error as error:
                raise ConfigError(
                    f"the samples in {self.folder} cannot be read: {first_line(error)}. Move the "
                    "file that is damaged to another folder."
                ) from error
            self._db.execute("UPDATE samples SET group_id = row_id WHERE group_id IS NULL")
            self._files = files
            # Orders are kept, so that a page turns without a search.
            self._places = lru_cache(MAX_QUERIES)(self._find)

    def samples(self, query: Query) -> Row:
        """Return a page of samples and how many there are in all."""
        where, values = _condition(query)
        names = ("file", "number", *COLUMNS)
        order = _order(query, names, "file, number")
        chosen = ", ".join(
            f"left({name}, {MAX_PREVIEW}) AS {name}" if name in SEARCHED else name for name in names
        )
        places = self._places(f"{where}{order}", *values)
        start, source = (query.page - 1) * query.size, "samples JOIN (SELECT unnest(?) AS place)"
        shown = [places[start : start + query.size]]
        rows = self._rows(f"SELECT {chosen} FROM {source} ON rowid = place{order}", shown)
        return {"total": len(places), "rows": rows}

    def _find(self, condition: str, *values: object) -> list[int]:
        """Return where the samples of a query are, in its order."""
        sql = f"SELECT rowid FROM samples{condition}"
        found: list[int] = self._db.cursor().execute(sql, values).fetchnumpy()["rowid"].tolist()
        return found

    def groups(self, query: Query) -> Row:
        """Return a page of prompts with what their samples have in common, and how many prompts
        there are in all.
        """
        where, values = _condition(query)
        chosen = ", ".join(f"{what} AS {name}" for name, what in GROUP_COLUMNS.items())
        order = _order(query, ("file", "group_id", *GROUP_COLUMNS), "file, group_id")
        grouped = f"SELECT file, group_id, {chosen} FROM samples{where} GROUP BY file, group_id"
        rows = self._rows(
            f"SELECT *, count(*) OVER () AS total FROM ({grouped}){order} LIMIT ? OFFSET ?",
            [*values, query.size, (query.page - 1) * query.size],
        )
        return {"total": rows[0]["total"] if rows else 0, "rows": rows}

    def sample(self, file: str, number: int) -> Row | None:
        """Return one sample with its tokens; None if there is no such file or row."""
        if file not in (self._files or {}):
            return None
        rows = self._rows(
            "SELECT * EXCLUDE file_row_number FROM read_parquet(?, file_row_number=true) "
            "WHERE file_row_number = ?",
            [str(self.folder / file), number],
        )
        return sample_of(rows[0], file, number) if rows else None

    def _rows(self, sql: str, values: Sequence[object]) -> list[Row]:
        """Run a query on a connection of its own: a server has several threads."""
        found = self._db.cursor().execute(sql, values)
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, map(plain, row), strict=True)) for row in found.fetchall()]


def _condition(query: Query) -> tuple[str, list[object]]:
    """Return the WHERE of a query, and the values in it."""
    conditions: dict[str, list[object]] = {}
    if query.file is not None:
        conditions["file = ?"] = [query.file]
    if query.group_id is not None:
        conditions["group_id = ?"] = [query.group_id]
    if query.search:
        parts = " OR ".join(f"contains(lower({name}), ?)" for name in SEARCHED)
        conditions[f"({parts})"] = [query.search.lower()] * len(SEARCHED)
    where = " WHERE " + " AND ".join(conditions) if conditions else ""
    return where, [value for values in conditions.values() for value in values]


def _order(query: Query, columns: Sequence[str], fallback: str) -> str:
    """Return ORDER BY of a query; labels that are numbers are in the order of numbers."""
    terms = []
    if query.sort in columns:
        way = "DESC" if query.is_descending else "ASC"
        if query.sort == "label":
            terms.append(f"TRY_CAST(label AS DOUBLE) {way} NULLS LAST")
        terms.append(f"{query.sort} {way} NULLS LAST")
    return f" ORDER BY {', '.join([*terms, fallback])}"
