"""One data file as rows: a strict look at its lines, then `datasets.load_dataset`.

The library loads some damaged files as if they were whole (a byte that is not UTF-8, NaN, mixed
types); what is wrong is found here and named by file and line, counted from 1.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import pyarrow as pa
from datasets import Dataset, Features, Value
from datasets.exceptions import DatasetsError

from openrlhf.datasets.problems import Problems
from openrlhf.errors import DataError, first_line

MAX_LINE_MIB = 64
ZERO_BYTES = "holds zero bytes, as after a power loss or a full disk"
_BUILDERS = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}  # all others hold JSON
_DAMAGED_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)
_DAMAGED = (DatasetsError, pa.ArrowException, ValueError, TypeError)
_BOM = b"\xef\xbb\xbf"
_WORDS = {"true": 1.0, "false": 0.0}


class _BadRecordError(ValueError):
    """A text that is no JSON to train on: why, and the line of the text, counted from 1."""

    def __init__(self, message: str, line: int = 1) -> None:
        super().__init__(message)
        self.line = line


def read_file(path: Path) -> Dataset:
    """Return the rows of a data file; raise DataError that lists its bad lines."""
    try:
        before = path.stat()
        if before.st_size == 0:
            raise DataError(f"{path} is empty: 0 rows. Give a file that has rows.")
        with path.open("rb"):
            rows = _load(path)
        after = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"{path} changed while it was read. Start again once it is written.")
    return rows


def check_text(rows: Dataset, name: str) -> None:
    """Raise DataError for text that is not UTF-8, which would be noticed when its row is read."""
    table = rows.data.table
    for column, values in zip(table.column_names, table.columns, strict=True):
        try:
            values.validate(full=True)
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{name} is damaged: column '{column}': {first_line(error)}. Write it again."
            ) from error


def number_of(value: object) -> float | None:
    """Return a number or truth value, also one spelled out as in a CSV file; else None."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    if not isinstance(value, str):
        return None
    word = value.strip().lower()
    try:
        return _WORDS[word] if word in _WORDS else float(word)
    except ValueError:
        return None


def _load(path: Path) -> Dataset:
    kind = _BUILDERS.get(path.suffix, "json")
    options: dict[str, Any] = {}
    problems = Problems()
    if kind == "csv":
        options = _csv_options(path, problems)
    elif kind == "json":
        num_records = sum(1 for _ in json_records(path, problems))
        options = {"parse_agent_traces": False} if num_records else {}
    problems.raise_if_any(str(path), "Repair or remove them.")
    if kind in ("csv", "json") and not options:
        return Dataset.from_dict({})
    try:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", **options)
        check_text(rows, str(path))
    except _DAMAGED as error:
        if "corresponds to no data" in str(error):
            return Dataset.from_dict({})
        if kind == "json":  # whose records are all right
            return _from_records(path)
        reason = first_line(error.__cause__ or error)
        raise DataError(f"{path} is damaged: {reason}. Write it again.") from error
    is_dated = kind == "json" and "timestamp" in str(rows.features)
    return _from_records(path) if is_dated else rows


def _from_records(path: Path) -> Dataset:
    """Return JSON rows that the library does not read as they stand: it makes times of dates."""
    try:
        return Dataset.from_list(list(json_records(path, Problems())))
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(
            f"{path}: a column mixes types: {first_line(error)}. Use one type per column."
        ) from error


def json_records(path: Path, problems: Problems) -> Iterator[dict[str, Any]]:
    """Yield the records of JSON lines or of one JSON array; note bad ones, and a column whose
    values are of several types.
    """
    kinds: dict[str, str] = {}
    for place, record in _json_values(path, problems):
        if not isinstance(record, dict):
            problems.add(place, f"{type(record).__name__} instead of an object")
        elif misfit := _misfit(record, kinds):
            problems.add(place, misfit)
        else:
            yield record


def _json_values(path: Path, problems: Problems) -> Iterator[tuple[str, object]]:
    """Yield (place, value) of every line that is not blank, or of every item of an array."""
    lines = text_lines(path, problems)
    try:
        if ".jsonl" not in path.name and _begins_with_bracket(path):
            text = "".join(line for _, _, line in lines)
            values = [] if problems.num_found else _loads(text)
            assert isinstance(values, list), "a text that begins with a bracket"
            yield from ((f"{path}: row {i}", value) for i, value in enumerate(values, start=1))
    except _BadRecordError as error:
        problems.add(f"{path}:{error.line}", str(error))
    for number, offset, line in lines:
        try:
            if line.strip():
                yield f"{path}:{number}", _loads(line)
        except _BadRecordError as error:
            problems.add(f"{path}:{number}", f"{error} (record at byte {offset})")


def _misfit(record: dict[str, Any], kinds: dict[str, str]) -> str | None:
    """Say which column of a record is of another type than before; note types seen first."""
    for name, value in record.items():
        kind = "number" if type(value) in (int, float) else type(value).__name__
        if value is not None and kinds.setdefault(name, kind) != kind:
            return f"column '{name}' mixes types: {kind} after {kinds[name]}. Use one type"
    return None


def _loads(text: str) -> object:
    if "\0" in text:
        raise _BadRecordError(ZERO_BYTES)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        told = f"{'cut record' if is_cut else 'not JSON'}: {error.msg}"
        raise _BadRecordError(told, error.lineno) from error
    except RecursionError as error:
        raise _BadRecordError("nested too deeply") from error
    except UnicodeEncodeError as error:
        raise _BadRecordError("a lone surrogate (half a character) in a string") from error
    except _BadRecordError:
        raise
    except ValueError as error:  # Python reads no integer of thousands of digits
        raise _BadRecordError(f"not JSON: {error}") from error
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise _BadRecordError(f"duplicate key {', '.join(twice)}")
    return row


def _refuse_constant(name: str) -> object:
    raise _BadRecordError(f"{name} is not a number that can be trained on")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _BadRecordError(f"the number {text} is too large")
    return value


def text_lines(path: Path, problems: Problems) -> Iterator[tuple[int, int, str]]:
    """Yield (number from 1, offset in bytes, line) of a text file; note what is too long or no
    text.
    """
    limit, offset, number = MAX_LINE_MIB * 2**20, 0, 1
    try:
        with _open(path) as file:
            while line := file.readline(limit + 1):
                if len(line) > limit:
                    problems.add(f"{path}:{number}", f"a line of over {MAX_LINE_MIB} MiB")
                    return
                text = _decode(line, offset, f"{path}:{number}", problems)
                if text is not None:
                    yield number, offset, text.removeprefix("\ufeff") if number == 1 else text
                offset += len(line)
                number += 1
    except _DAMAGED_GZIP as error:
        problems.add(str(path), f"the compressed file is cut or damaged ({error})")


def _decode(line: bytes, offset: int, place: str, problems: Problems) -> str | None:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        where = offset + error.start
        problems.add(place, f"not UTF-8: byte 0x{line[error.start]:02x} at byte {where}")
        return None


def _begins_with_bracket(path: Path) -> bool:
    try:
        with _open(path) as file:
            return file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")
    except _DAMAGED_GZIP:  # noted when its lines are read
        return False


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _csv_options(path: Path, problems: Problems) -> dict[str, Any]:
    """Return how a CSV file is read: every cell as the text it is, an empty one as no value; empty
    for a file without a header.
    """
    for number, _, line in text_lines(path, problems):
        if "\0" in line:
            problems.add(f"{path}:{number}", ZERO_BYTES)
    if problems.num_found:
        return {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = next(filter(None, csv.reader(file)), [])
    except csv.Error as error:
        raise DataError(f"{path}:1: cut record: {error}. Write the file again.") from error
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"{path}: duplicate column {', '.join(map(repr, twice))}. Name each column once."
        )
    features = Features({name: Value("string") for name in names})
    return {"features": features, "keep_default_na": False, "na_values": [""]} if names else {}
