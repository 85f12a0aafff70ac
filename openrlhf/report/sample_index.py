"""All samples of a run for a server: DuckDB sorts, filters and searches what a table shows; tokens
are read from the file of the one sample that is looked at.
"""

import re
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow
import pyarrow.parquet

from openrlhf.errors import ConfigError, first_line
from openrlhf.report.samples import COLUMNS, Row, plain, sample_of
from openrlhf.utils.run_folder import ROLLOUTS

SEARCHED = ("prompt", "response", "label")
# A condition in a search, the same as in report.js; the rest of the search is text.
CONDITION = re.compile(
    r"(?:^|\s)(reward|score|advantage|length)\s*([<>]=?|=)\s*"
    r"(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?)(?=\s|$)",
    re.IGNORECASE,
)
ARROW = {"VARCHAR": pyarrow.string(), "BIGINT": pyarrow.int64(), "DOUBLE": pyarrow.float64()}
READ_AT_ONCE = 256  # samples, to find one
MAX_QUERIES = 8  # whose order is remembered
MAX_PREVIEW = 300  # characters of a text in a table
GROUP_COLUMNS = {
    "prompt": f"left(any_value(prompt), {MAX_PREVIEW})",
    "label": "any_value(label)",
    "datasource": "any_value(datasource)",
    "num_samples": "count(*)",
    "reward": "avg(reward)",
    "reward_std": "stddev_samp(reward)",
    "reward_min": "min(reward)",
    "reward_max": "max(reward)",
    "num_actions": "avg(num_actions)",
}
SHOWN = "samples JOIN (SELECT unnest(?) AS shown_rowid) ON rowid = shown_rowid"


@dataclass(frozen=True)
class Query:
    """A page of the table of samples: of one file, or of all files if `file` is None.

    Example: `Query(search="reward<0.5 sqrt", page=2)`: samples 51 to 100 of those with "sqrt" in a
    text and a reward below 0.5.
    """

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
        self.folder = run_dir / ROLLOUTS
        self._spill = tempfile.TemporaryDirectory(prefix="openrlhf-report-")
        self._lock = threading.Lock()
        self._known: set[tuple[str, int]] = set()  # files and their times
        self._found: dict[tuple[object, ...], list[Any]] = {}  # by query, in order
        self._db = duckdb.connect(config={"temp_directory": self._spill.name})
        columns = "".join(f", {name} {kind}" for name, kind in COLUMNS.items())
        self._db.execute(f"CREATE TABLE samples (file VARCHAR, number BIGINT{columns})")

    def refresh(self) -> None:
        """Read the files that are new, and forget those that are gone."""
        with self._lock:
            paths = self.folder.glob("*step_*.parquet")
            now = {(path.name, path.stat().st_mtime_ns) for path in paths}
            gone, new = (
                sorted({name for name, _ in part})
                for part in (self._known - now, now - self._known)
            )
            read = [_read(self.folder / name) for name in new]
            self._db.execute("DELETE FROM samples WHERE list_contains(?, file)", [gone])
            if read:
                self._insert(pyarrow.concat_tables(read))
            self._known, self._found = now, {}

    def _insert(self, rows: pyarrow.Table) -> None:
        chosen = {name: name for name in COLUMNS} | {"group_id": "coalesce(group_id, row)"}
        values = ", ".join(_as(kind, chosen[name]) for name, kind in COLUMNS.items())
        self._db.register("found", rows)
        self._db.execute(f"INSERT INTO samples SELECT file, number, {values} FROM found")
        self._db.unregister("found")

    def samples(self, query: Query) -> Row:
        """Return a page of samples and how many there are in all."""
        where, values = _condition(query)
        order = _order(query, ("file", "number", *COLUMNS), "file, number")
        rowids = self._rowids(f"SELECT rowid FROM samples{where}{order}", values)
        chosen = ", ".join(
            f"left({name}, {MAX_PREVIEW}) AS {name}" if name in SEARCHED else name
            for name in ("file", "number", *COLUMNS)
        )
        rows = self._rows(f"SELECT {chosen} FROM {SHOWN}{order}", [_page(rowids, query)])
        return {"total": len(rowids), "rows": rows}

    def groups(self, query: Query) -> Row:
        """Return a page of prompts with what their samples have in common, and how many prompts
        there are in all.
        """
        where, values = _condition(query)
        chosen = ", ".join(f"{what} AS {name}" for name, what in GROUP_COLUMNS.items())
        order = _order(query, ("file", "group_id", *GROUP_COLUMNS), "file, group_id")
        grouped = f"(SELECT file, group_id, list(rowid) AS rowids, {chosen} FROM {{}} GROUP BY ALL)"
        rowids = self._rowids(
            f"SELECT rowids FROM {grouped.format(f'samples{where}')}{order}", values
        )
        shown = [rowid for members in _page(rowids, query) for rowid in members.tolist()]
        source = grouped.format(SHOWN)
        rows = self._rows(f"SELECT * EXCLUDE rowids FROM {source}{order}", [shown])
        return {"total": len(rowids), "rows": rows}

    def _rowids(self, sql: str, values: Sequence[object]) -> list[Any]:
        """Return the rowids of the samples or groups of a query, in its order; those of the last
        queries are kept, so that a page turns without a search.
        """
        key = (sql, *values)
        if key not in self._found:
            [found] = self._db.cursor().execute(sql, values).fetchnumpy().values()
            self._found = dict(list(self._found.items())[1 - MAX_QUERIES :]) | {key: found.tolist()}
        return self._found[key]

    def sample(self, file: str, number: int) -> Row | None:
        """Return one sample with its tokens; None if there is no such file or row."""
        if file not in {name for name, _ in self._known}:
            return None
        seen = 0
        for batch in pyarrow.parquet.ParquetFile(self.folder / file).iter_batches(READ_AT_ONCE):
            if number < seen + batch.num_rows:
                [row] = batch.slice(number - seen, 1).to_pylist()
                return sample_of(row, file, number, self.folder.parent)
            seen += batch.num_rows
        return None

    def _rows(self, sql: str, values: Sequence[object]) -> list[Row]:
        """Run a query on a connection of its own: a server has several threads."""
        found = self._db.cursor().execute(sql, values)
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, map(plain, row), strict=True)) for row in found.fetchall()]


def _read(path: Path) -> pyarrow.Table:
    """Return the columns of the table in a file; raise ConfigError for one that is damaged. By
    pyarrow, since files may have columns that DuckDB would add itself, columns of the same name in
    other letters, and labels of any type.
    """
    try:
        file = pyarrow.parquet.ParquetFile(path)
        found = file.read([name for name in COLUMNS if name in file.schema_arrow.names])
        columns = dict(zip(found.column_names, found.columns, strict=True))
        if "label" in columns and not pyarrow.types.is_string(columns["label"].type):
            labels = map(plain, columns["label"].to_pylist())
            texts = [None if label is None else str(label) for label in labels]
            columns["label"] = pyarrow.array(texts, pyarrow.string())
        nothing = pyarrow.nulls(found.num_rows)
        kept = {n: columns.get(n, nothing).cast(ARROW[kind]) for n, kind in COLUMNS.items()}
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read: {first_line(error)}. Move it to another folder."
        ) from error
    kept["number"] = pyarrow.array(range(found.num_rows), pyarrow.int64())
    kept["file"] = pyarrow.repeat(path.name, found.num_rows)
    return pyarrow.table(kept)


def _as(kind: str, column: str) -> str:
    """Return the SQL of a column as a type, with numbers as `plain` has them: a search compares
    what the page shows.
    """
    if kind != "DOUBLE":
        return f"CAST({column} AS {kind})"
    return f"CASE WHEN isfinite({column}) THEN CAST(printf('%.6g', {column}) AS DOUBLE) END"


def _condition(query: Query) -> tuple[str, list[object]]:
    """Return the WHERE of a query, and the values in it."""
    conditions: list[str] = []
    values: list[object] = []
    for column, value in (("file", query.file), ("group_id", query.group_id)):
        if value is not None:
            conditions.append(f"{column} = ?")
            values.append(value)
    for name, operator, number in CONDITION.findall(query.search):
        column = name.lower().replace("length", "num_actions")
        conditions.append(f"{column} {operator} ?")
        values.append(float(number))
    if text := CONDITION.sub("", query.search).strip():
        # i: any case, l: the text itself, not a pattern; quicker than lower() of every sample.
        parts = " OR ".join(f"regexp_matches({name}, ?, 'il')" for name in SEARCHED)
        conditions.append(f"({parts})")
        values += [text] * len(SEARCHED)
    return " WHERE " + " AND ".join(conditions) if conditions else "", values


def _page(rowids: Sequence[Any], query: Query) -> Sequence[Any]:
    return rowids[(query.page - 1) * query.size : query.page * query.size]


def _order(query: Query, columns: Sequence[str], fallback: str) -> str:
    """Return ORDER BY of a query; labels that are numbers are in the order of numbers."""
    terms = []
    if query.sort in columns:
        way = "DESC" if query.is_descending else "ASC"
        if query.sort == "label":
            terms.append(f"TRY_CAST(label AS DOUBLE) {way} NULLS LAST")
        terms.append(f"{query.sort} {way} NULLS LAST")
    return f" ORDER BY {', '.join([*terms, fallback])}"
