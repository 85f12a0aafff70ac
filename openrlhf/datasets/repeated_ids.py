"""Rows that share an id with an earlier row of their data set, in the column `id`."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from openrlhf.datasets.problems import Problems, row_place

ID_COLUMN = "id"


def refuse_repeats(rows: Dataset) -> None:
    """Raise DataError that lists the rows whose id is an earlier one's; a row without an id repeats
    none.
    """
    if ID_COLUMN not in rows.column_names or "finish_reason" in rows.column_names:
        return  # answers of `batch_inference` have the id of their prompt
    column = rows.with_format("arrow").select_columns([ID_COLUMN])[:].column(0)
    if pa.types.is_nested(column.type) or len(present := column.drop_null()) == 0:
        return
    if len(pc.unique(present)) == len(present):
        return
    first_of: dict[object, int] = {}
    problems = Problems()
    for index, value in enumerate(column.to_pylist()):
        if value is not None and (first := first_of.setdefault(value, index)) != index:
            told = f"id {value!r} is that of {row_place(rows, first)}, too"
            problems.add(row_place(rows, index), told)
    problems.raise_if_any(
        "repeated ids", "Give each row its own, or type --duplicate_ids keep if that is meant."
    )
