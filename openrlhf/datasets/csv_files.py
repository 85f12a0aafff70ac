"""Reading CSV files strictly, as what they are: text in columns.

Nothing is made a number or a date that the file does not call one, so 007 stays 007 and 1 does not
become 1.0; what needs numbers reads them with `number_of`. An empty cell is no value, "" is a text
without letters.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from openrlhf.datasets.problems import Problems
from openrlhf.errors import DataError

MAX_LINE_MIB = 64
MAX_CELL = 2**31 - 1  # characters; lines have their limit already
_WORDS = {"true": 1.0, "false": 0.0}


def number_of(value: object) -> float | None:
    """A number or truth value, or one that is spelled out as in a CSV file; None for all else."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    if not isinstance(value, str):
        return None
    word = value.strip().lower()
    try:
        return _WORDS[word] if word in _WORDS else float(word)
    except ValueError:
        return None


def text_note(names: Iterable[str]) -> str:
    """A sentence for where files of other kinds do not go with CSV files; else nothing."""
    kinds = {name.endswith(".csv") for name in names}
    return " Columns of a csv file are text; write them as jsonl." if len(kinds) == 2 else ""


def read_csv_table(path: Path) -> pa.Table:
    """The rows of a CSV file, every column as text; raises DataError that lists bad lines."""
    problems = Problems()
    num_quotes = _scan(path, problems)
    problems.raise_if_any(str(path), "Repair or remove them.")
    names = _header(path)
    if not names:
        return pa.table({})
    if num_quotes % 2:
        _refuse_open_quote(path)
    table = _parse(path, names, problems)
    problems.raise_if_any(str(path), "Repair or remove them.")
    return table


def _scan(path: Path, problems: Problems) -> int:
    """Note the lines that are no text; answers the number of quotes."""
    limit, num_quotes, offset, number = MAX_LINE_MIB * 2**20, 0, 0, 1
    with path.open("rb") as file:
        while line := file.readline(limit + 1):
            if len(line) > limit:
                problems.add(f"{path}:{number}", f"a line of over {MAX_LINE_MIB} MiB")
                return 0
            if b"\0" in line:
                told = "holds zero bytes, as after a power loss or a full disk"
                problems.add(f"{path}:{number}", told)
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                told = f"not UTF-8: byte 0x{line[error.start]:02x} at byte {offset + error.start}"
                problems.add(f"{path}:{number}", told)
            num_quotes += line.count(b'"')
            offset += len(line)
            number += 1
    return num_quotes


def _header(path: Path) -> list[str]:
    """Names of the columns, from the first line that is not empty; raises DataError."""
    csv.field_size_limit(MAX_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        names = next(filter(None, csv.reader(file)), [])
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"{path}: duplicate column {', '.join(map(repr, twice))}. Name each column once."
        )
    return names


def _refuse_open_quote(path: Path) -> None:
    """Raise DataError for a quote that nothing closes, as in a file that was cut."""
    csv.field_size_limit(MAX_CELL)
    start = 1
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            for _ in reader:
                start = reader.line_num + 1
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise DataError(
                    f"{path}:{start}: cut record: a quote that is not closed. Write the file again."
                ) from error


def _parse(path: Path, names: list[str], problems: Problems) -> pa.Table:
    def note(row: pa.csv.InvalidRow) -> str:
        told = f"{row.actual_columns} cells in {row.expected_columns} columns"
        problems.add(f"{path}: row {row.number - 1}", f"{told}: {row.text[:40]}")
        return "skip"

    block = min(max(path.stat().st_size, 1), MAX_LINE_MIB * 2**20)
    try:
        return pa.csv.read_csv(
            path,
            read_options=pa.csv.ReadOptions(use_threads=False, block_size=block),
            parse_options=pa.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=note),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid as error:
        if "straddling" not in str(error):
            raise
        raise DataError(
            f"{path}: a record of over {MAX_LINE_MIB} MiB. Repair or remove it."
        ) from error
