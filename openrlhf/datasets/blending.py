"""Several data sets as one: one after the other, or drawn with probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import datasets
import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor

from openrlhf.datasets.csv_files import text_note
from openrlhf.datasets.problems import Files, files_of, remember_blend, remember_files
from openrlhf.errors import ConfigError, DataError, first_line


def parse_probs(probs: str | Sequence[float] | None, names: list[str]) -> list[float] | None:
    """Blending probabilities that sum to 1, or None for one data set after the other."""
    if probs is None or probs == "":
        return None
    items = probs.split(",") if isinstance(probs, str) else list(probs)
    try:
        weights = [float(item) for item in items]
    except ValueError as error:
        raise ConfigError(f"probabilities {probs!r} are not numbers. Give e.g. 0.7,0.3.") from error
    if len(weights) != len(names):
        raise ConfigError(
            f"{len(weights)} probabilities for {len(names)} data sets. Give one for each data set."
        )
    if min(weights) <= 0 or abs(sum(weights) - 1) > 1e-3:
        raise ConfigError(
            f"probabilities {weights} sum to {sum(weights):g}. Give positive numbers that sum to 1."
        )
    return [weight / sum(weights) for weight in weights]


def blend(
    parts: list[Dataset], names: list[str], weights: list[float] | None, seed: int
) -> Dataset:
    """All rows of the parts, or rows drawn from them until one part is used up."""
    if len(parts) == 1:
        return parts[0]
    try:
        rows = datasets.concatenate_datasets(parts)
    except (ValueError, TypeError, pa.ArrowException) as error:
        note = text_note(name for part in parts for name, _ in files_of(part))
        raise DataError(
            f"data sets {', '.join(names)} do not fit together: {first_line(error)} "
            f"Give their common columns the same types.{note}"
        ) from error
    files = [files_within(part) for part in parts]
    if weights is None:
        return remember_files(rows, [file for part in files for file in part])
    part_of, place_of = drawn(list(map(len, parts)), weights, seed)
    starts = torch.tensor([0, *accumulate(map(len, parts))])[part_of]
    return remember_blend(rows.select((starts + place_of).tolist()), files, part_of)


def drawn(sizes: list[int], weights: list[float], seed: int) -> tuple[Tensor, Tensor]:
    """Which part each row of a blend is drawn from, and which row of that part it is, (rows,)
    int64 each.
    """
    marks = [
        Dataset.from_dict({"part": [number] * size, "place": list(range(size))})
        for number, size in enumerate(sizes)
    ]
    order = datasets.interleave_datasets(marks, probabilities=weights, seed=seed)
    columns = order.with_format("torch")[:]
    return columns["part"], columns["place"]


def files_within(rows: Dataset) -> Files:
    """The files of rows that may have been capped, with the rows that are left of each."""
    left = len(rows)
    files = []
    for name, count in files_of(rows):
        files.append((name, min(count, left)))
        left -= files[-1][1]
    return files
