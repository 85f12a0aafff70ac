"""One data file, or several of one split, as a table; what is wrong with a file is one line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset

from openrlhf.datasets.csv_files import read_csv_table, text_note
from openrlhf.datasets.json_files import DAMAGED_GZIP, join_tables, read_json_table
from openrlhf.datasets.problems import Gathered, remember_files
from openrlhf.errors import DataError, first_line


def read_files(paths: list[Path]) -> Dataset:
    """The rows of files, one behind the other; raises DataError with the problems of all files."""
    place = str(paths[0] if len(paths) == 1 else paths[0].parent)
    gathered = Gathered()
    if all(path.suffix == ".arrow" for path in paths):
        found = [gathered.attempt(partial(_read_arrow, path)) for path in paths]
        gathered.raise_if_any()
        parts = [part for part in found if part is not None]
        rows, counts = datasets.concatenate_datasets(parts), list(map(len, parts))
    else:
        read = [gathered.attempt(partial(_read_table, path)) for path in paths]
        gathered.raise_if_any()
        tables = [table for table in read if table is not None]
        counts = [table.num_rows for table in tables]
        table = join_tables(tables, place, text_note(map(str, paths)))
        rows = Dataset(table) if table.num_columns else Dataset.from_dict({})
    return remember_files(rows, list(zip(map(str, paths), counts, strict=True)))


def check_text(table: pa.Table, name: str) -> None:
    """Raise DataError where text is not UTF-8, which would be noticed when its row is read."""
    for column, values in zip(table.column_names, table.columns, strict=True):
        try:
            values.validate(full=True)
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{name} is damaged: column '{column}': {first_line(error)}. Write it again."
            ) from error


def with_plain_text(rows: Dataset) -> Dataset:
    """The rows with text and lists as they are elsewhere: pandas and polars write them as types of
    their own, which do not go together with the usual ones.
    """
    features = datasets.Features({name: _plain(kind) for name, kind in rows.features.items()})
    return rows if features == rows.features else rows.cast(features)


def _plain(kind: Any) -> Any:
    if isinstance(kind, dict):
        return {name: _plain(part) for name, part in kind.items()}
    if isinstance(kind, datasets.LargeList):
        return datasets.List(_plain(kind.feature))
    if isinstance(kind, datasets.List):
        return datasets.List(_plain(kind.feature), length=kind.length)
    is_text = isinstance(kind, datasets.Value) and kind.dtype in ("large_string", "string_view")
    return datasets.Value("string") if is_text else kind


def _read_arrow(path: Path) -> Dataset:
    try:
        rows = Dataset.from_file(str(path))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a readable Arrow file: {first_line(error)}") from error
    check_text(rows.data.table, str(path))
    return rows


def _read_table(path: Path) -> pa.Table:
    """All rows of a file that stays as it is meanwhile."""
    try:
        before = path.stat()
        if before.st_size == 0:
            raise DataError(f"{path} is empty: 0 rows. Give a file that has rows.")
        table = _read_by_suffix(path)
        after = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"{path} changed while it was read. Start again once it is written.")
    return table


def _read_by_suffix(path: Path) -> pa.Table:
    try:
        if path.suffix == ".csv":
            return read_csv_table(path)
        if path.suffix == ".parquet":
            table = pa.parquet.read_table(path)
            check_text(table, str(path))
            return table
        if path.suffix == ".arrow":
            return _read_arrow(path).data.table
        return read_json_table(path)
    except (pa.ArrowException, *DAMAGED_GZIP) as error:
        raise DataError(f"{path} is damaged: {first_line(error)}. Write it again.") from error
