"""Reading JSON and JSON-lines files strictly: a damaged record is an error with its file, line and
byte.

Byte order marks, CRLF and blank lines are harmless and accepted. Rows go into Arrow chunk by chunk,
and lines have a limit, so memory is bounded by the table, not by Python objects.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from openrlhf.datasets.problems import Problems
from openrlhf.errors import DataError

CHUNK_ROWS = 10_000
MAX_LINE_MIB = 64
DAMAGED_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)
_BOM = b"\xef\xbb\xbf"
Row = dict[str, object]


class _BadRecord(ValueError):
    """A record that parses as no JSON object we accept; the message says why, `line` where it is in
    the text, counted from 1.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def read_json_table(path: Path) -> pa.Table:
    """The rows of a .json or .jsonl file (optionally .gz) as one table; raises DataError."""
    problems = Problems()
    chunks: list[pa.Table] = []
    rows: list[Row] = []
    lines: list[int] = []
    for line, row in _records(path, problems):
        rows.append(row)
        lines.append(line)
        if len(rows) == CHUNK_ROWS:
            chunks.append(_to_table(path, rows, lines))
            rows, lines = [], []
    problems.raise_if_any(str(path), "Repair or remove them.")
    if rows:
        chunks.append(_to_table(path, rows, lines))
    return join_tables(chunks, str(path))


def join_tables(tables: list[pa.Table], place: str, note: str = "") -> pa.Table:
    """Tables one below the other; a column missing in one is empty there, mixed types raise
    DataError, with a note at its end.
    """
    if not tables:
        return pa.table({})
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise DataError(
            f"{place}: a column mixes types: {error}. Use one type per column.{note}"
        ) from error


def _records(path: Path, problems: Problems) -> Iterator[tuple[int, Row]]:
    """(line number from 1, row) of every good record; bad ones go to `problems`."""
    if _is_array(path):
        yield from _array_records(path, problems)
        return
    offset = 0
    with _open(path) as file:
        for number, raw in enumerate(_lines(file, path, problems), start=1):
            content = raw.removeprefix(_BOM) if number == 1 else raw
            if content.strip():
                try:
                    yield number, _parse(content.decode("utf-8"))
                except _BadRecord as error:
                    problems.add(f"{path}:{number}", f"{error} (record at byte {offset})")
                except UnicodeDecodeError as error:
                    where = offset + error.start
                    problems.add(
                        f"{path}:{number}",
                        f"not UTF-8: byte 0x{raw[error.start]:02x} at byte {where}",
                    )
            offset += len(raw)


def _lines(file: BinaryIO, path: Path, problems: Problems) -> Iterator[bytes]:
    """The lines up to one that is too long, or damaged."""
    limit, number = MAX_LINE_MIB * 2**20, 1
    try:
        while line := file.readline(limit + 1):
            if len(line) > limit:
                problems.add(f"{path}:{number}", f"a line of over {MAX_LINE_MIB} MiB")
                return
            yield line
            number += 1
    except DAMAGED_GZIP as error:
        problems.add(str(path), f"the compressed file is cut or damaged ({error})")


def _array_records(path: Path, problems: Problems) -> Iterator[tuple[int, Row]]:
    """Rows of a file that is one JSON array; the number is the record's, from 1."""
    try:
        with _open(path) as file:
            records = _loads(file.read().removeprefix(_BOM).decode("utf-8"))
    except _BadRecord as error:
        problems.add(str(path) if error.line is None else f"{path}:{error.line}", str(error))
        return
    except (UnicodeDecodeError, *DAMAGED_GZIP) as error:
        problems.add(str(path), str(error))
        return
    assert isinstance(records, list), "an array was announced"
    for number, record in enumerate(records, start=1):
        if isinstance(record, dict):
            yield number, record
        else:
            problems.add(f"{path}: row {number}", f"{type(record).__name__} instead of an object")


def _is_array(path: Path) -> bool:
    """Whether a .json file begins with a bracket; .jsonl is always read line by line."""
    if ".jsonl" in path.name:
        return False
    with _open(path) as file:
        return file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _parse(text: str) -> Row:
    if "\0" in text:
        raise _BadRecord("holds zero bytes, as after a power loss or a full disk")
    record = _loads(text)
    if not isinstance(record, dict):
        raise _BadRecord(f"{type(record).__name__} instead of an object")
    return record


def _loads(text: str) -> object:
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        told = f"{'cut record' if is_cut else 'not JSON'}: {error.msg}"
        raise _BadRecord(told, error.lineno) from error
    except RecursionError as error:
        raise _BadRecord("nested too deeply") from error
    except _BadRecord:
        raise
    except ValueError as error:  # Python reads no integer of thousands of digits
        raise _BadRecord(f"not JSON: {error}") from error
    if "\\ud" in text.lower():
        _refuse_lone_surrogates(value)
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _BadRecord(f"the number {text} is too large")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise _BadRecord(f"duplicate key {', '.join(twice)}")
    return row


def _refuse_constant(name: str) -> object:
    raise _BadRecord(f"{name} is not a number that can be trained on")


def _refuse_lone_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRecord("a lone surrogate (half a character) in a string") from error


def _to_table(path: Path, rows: list[Row], lines: list[int]) -> pa.Table:
    """A chunk of rows as a table; pyarrow takes the columns of the first row only, so they are
    gathered here.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return pa.table(
        {name: _to_array(path, name, values, lines) for name, values in columns.items()}
    )


def _to_array(path: Path, name: str, values: list[object], lines: list[int]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        line = lines[_first_misfit(values)]
        raise DataError(
            f"{path}:{line}: column '{name}' mixes types: {error}. Use one type."
        ) from error


def _first_misfit(values: list[object]) -> int:
    """Index of the first value that does not go with those before it."""

    def num_misfits(length: int) -> int:
        try:
            pa.array(values[:length])
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            return 1
        return 0

    return bisect_left(range(1, len(values)), 1, key=num_misfits)
