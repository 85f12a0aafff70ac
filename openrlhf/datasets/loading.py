"""From what a user types (files, folders, saved data sets, hub names, comma lists) to one table of
rows.

Everything that can be wrong with files is found here, before any model is loaded. Knows no column
but `id`: what else a row must hold is the business of the data set classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import datasets
import pyarrow as pa
from datasets import Dataset
from datasets.data_files import (
    SPLIT_KEYWORDS,
    DataFilesDict,
    EmptyDatasetError,
    get_data_patterns,
)
from datasets.exceptions import DatasetGenerationError, DatasetsError

from openrlhf.config.local_paths import DATA_SUFFIXES, looks_local
from openrlhf.datasets.data_files import check_text, read_file
from openrlhf.datasets.problems import Gathered, Problems, files_of, remember_files, row_place
from openrlhf.errors import ConfigError, DataError, first_line
from openrlhf.utils.hub import looking_up
from openrlhf.utils.progress import are_drawn

T = TypeVar("T")


def load_rows(
    spec: str,
    *,
    split: str = "train",
    probs: str | Sequence[float] | None = None,
    max_samples: int | None = None,
    seed: int = 42,
    expect_rows: str | None = None,
    expect_sha256: str | None = None,
    duplicate_ids: str = "error",
) -> Dataset:
    """Return the rows that a comma list of data sets names, blended by `probs` or else one after
    the other.

    `max_samples` limits each data set and the blend; `expect_rows` and `expect_sha256` have a value
    for each data set. Raise ConfigError or DataError with a one-line remedy for each data set that
    cannot be used.
    """
    parts = [spec] if _exists(Path(spec).expanduser()) else spec.split(",")
    names = [name.strip() for name in parts if name.strip()]
    if not names:
        raise ConfigError(
            "no data set is named. Give files, folders or hub names, separated by commas."
        )
    weights = parse_probs(probs, names)
    counts = _one_for_each(expect_rows, names, "--expect_rows")
    hashes = _one_for_each(expect_sha256, names, "--expect_sha256")
    if not are_drawn():
        datasets.disable_progress_bars()
    gathered, found = Gathered(), []
    for name, count, digest in zip(names, counts, hashes, strict=True):
        rows = gathered.attempt(partial(_load_one, name, split, count, digest))
        if rows is not None and duplicate_ids == "error":
            gathered.attempt(partial(_refuse_repeated_ids, rows))
        found.append(rows)
    gathered.raise_if_any()
    capped = [_capped(rows, max_samples) for rows in found if rows is not None]
    return _capped(_blend(capped, ", ".join(names), weights, seed), max_samples)


def parse_probs(probs: str | Sequence[float] | None, names: list[str]) -> list[float] | None:
    """Return blending probabilities that sum to 1, or None for one data set after the other."""
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


def _one_for_each(facts: str | None, names: Sequence[str], flag: str) -> Sequence[str | None]:
    if not facts:
        return [None] * len(names)
    each = [fact.strip() for fact in facts.split(",")]
    if len(each) != len(names):
        raise ConfigError(
            f"{flag} {facts} is of {len(each)} data sets, and {len(names)} are named. Give one for "
            "each."
        )
    return each


def _blend(parts: list[Dataset], names: str, weights: list[float] | None, seed: int) -> Dataset:
    """Return all rows of the parts, or rows drawn from them until one part is used up; raise
    DataError if their columns differ in type.
    """
    if len(parts) == 1:
        return parts[0]
    try:
        rows = datasets.concatenate_datasets(parts)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DataError(
            f"data sets {names} do not fit together: {first_line(error)} "
            "Give their common columns the same types; columns of a csv file are text."
        ) from error
    files = [file for part in parts for file in _files_within(part)]
    if weights is not None:
        rows = datasets.interleave_datasets(parts, probabilities=weights, seed=seed)
    return remember_files(rows, files)


def _files_within(rows: Dataset) -> list[tuple[str, int]]:
    """Return the files of rows that may have been capped, with the rows that are left of each."""
    left, files = len(rows), []
    for name, count in files_of(rows):
        files.append((name, min(count, left)))
        left -= files[-1][1]
    return files


def _capped(rows: Dataset, max_samples: int | None) -> Dataset:
    if max_samples is None or len(rows) <= max_samples:
        return rows
    return remember_files(rows.select(range(int(max_samples))), files_of(rows))


def _load_one(name: str, split: str, num_rows: str | None, sha256: str | None) -> Dataset:
    path = _local_path(name)
    is_local = _is_local(name, path)
    if sha256:
        _check_hash(name, path, sha256.lower())
    rows = _with_plain_text(_load_local(path, name, split) if is_local else _from_hub(name, split))
    if len(rows) == 0:
        raise DataError(f"data set {name} has 0 rows in split '{split}'. Give one that has rows.")
    if not files_of(rows):
        check_text(rows, name)
        remember_files(rows, [(name, len(rows))])
    if num_rows and num_rows != str(len(rows)):
        raise DataError(
            f"data set {name} has {len(rows)} rows, not {num_rows}. Fetch it again, or "
            "correct --expect_rows."
        )
    return rows


def _refuse_repeated_ids(rows: Dataset) -> None:
    """Raise DataError that lists rows whose `id` another row of the same data set has."""
    if "id" not in rows.column_names or "finish_reason" in rows.column_names:
        return  # responses of `batch_inference` have the id of their prompt
    first_rows: dict[object, int] = {}
    problems = Problems()
    for index, value in enumerate(rows["id"]):
        if not isinstance(value, (str, int)):
            continue
        if (first := first_rows.setdefault(value, index)) != index:
            told = f"id {value!r} is that of {row_place(rows, first)}, too"
            problems.add(row_place(rows, index), told)
    problems.raise_if_any(
        "repeated ids", "Give each row its own, or type --duplicate_ids keep if that is meant."
    )


def _with_plain_text(rows: Dataset) -> Dataset:
    """Return rows with text and lists as they are elsewhere: pandas and polars write them as types
    of their own, which do not go together with the usual ones.
    """
    features = datasets.Features({name: _plain(kind) for name, kind in rows.features.items()})
    if features == rows.features:
        return rows
    return remember_files(rows.cast(features), files_of(rows))


def _plain(kind: Any) -> Any:
    if isinstance(kind, dict):
        return {name: _plain(part) for name, part in kind.items()}
    if isinstance(kind, (datasets.List, datasets.LargeList)):
        return datasets.List(_plain(kind.feature), length=getattr(kind, "length", -1))
    is_text = isinstance(kind, datasets.Value) and kind.dtype in ("large_string", "string_view")
    return datasets.Value("string") if is_text else kind


def _check_hash(name: str, path: Path, expected: str) -> None:
    if not path.is_file():
        raise ConfigError(
            f"--expect_sha256 is of a file, and data set {name} is none. Leave it out, or name the "
            "file."
        )
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    if (found := digest.hexdigest()) != expected:
        raise DataError(
            f"{path} has the SHA-256 {found}, not {expected}. Fetch the file again, or "
            "correct --expect_sha256."
        )


def _is_local(name: str, path: Path) -> bool:
    """Return True for a path; raise ConfigError for one that does not exist, a script or a URL."""
    if name.endswith(".py"):
        raise ConfigError(
            f"data set {name} is a Python script, which is never run. "
            "Give its data as jsonl, csv or parquet."
        )
    if "://" in name:
        raise ConfigError(
            f"data set {name} is a URL, which is not fetched. Download it, then give the path."
        )
    if not _exists(path) and looks_local(name):
        raise ConfigError(
            f"data set {name} does not exist. Give a file ({', '.join(DATA_SUFFIXES)}), a folder "
            "of them, or a hub name."
        )
    return _exists(path)


def _exists(path: Path) -> bool:
    """Return True for a file or folder; raise DataError where that may not be seen."""
    try:
        return path.exists()
    except PermissionError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except OSError:  # longer than any name, as a list of many names is
        return False


def _local_path(name: str) -> Path:
    """Return the path of `path` or `folder@subfolder`."""
    path = Path(name).expanduser()
    if not _exists(path) and "@" in name:
        folder, _, subset = name.rpartition("@")
        if Path(folder).expanduser().is_dir():
            return Path(folder).expanduser() / subset
    return path


def _load_local(path: Path, name: str, split: str) -> Dataset:
    if path.is_file():
        return _read_files([path])  # a file has no splits: it is what was asked for
    if not any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
        return _read_files(_pick(_files_by_split(path), name, split))
    try:
        saved = datasets.load_from_disk(str(path))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path} is a damaged saved data set: {first_line(error)} Save it again."
        ) from error
    if isinstance(saved, Dataset):
        return saved if saved.split is None else _pick({str(saved.split): saved}, name, split)
    return _pick(saved, name, split)


def _pick(by_split: Mapping[str, T], name: str, split: str) -> T:
    """Return what is of a split, or of one that a usual other name such as `dev` stands for."""
    kinds = {word: str(kind) for kind, words in SPLIT_KEYWORDS.items() for word in words}
    for found in (split, kinds.get(split)):
        if found in by_split:
            return by_split[found]
    raise ConfigError(
        f"data set {name} has no split '{split}'; splits found: {', '.join(sorted(by_split))}. "
        "Name one of them."
    )


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    """Return data files by the split that their name or folder says, as the library finds them; all
    are `train` where none says one.
    """
    try:
        found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    except (EmptyDatasetError, FileNotFoundError):
        found = {}
    files = {
        str(split): sorted(Path(path) for path in paths if path.endswith(DATA_SUFFIXES))
        for split, paths in found.items()
    }
    if not any(files.values()):
        raise ConfigError(
            f"folder {folder} has no data files. Put {', '.join(DATA_SUFFIXES)} files into it."
        )
    return {split: paths for split, paths in files.items() if paths}


def _read_files(paths: list[Path]) -> Dataset:
    """Return the rows of files, one after the other; raise DataError with all their problems."""
    gathered, parts = Gathered(), []
    for path in paths:
        rows = gathered.attempt(partial(read_file, path))
        if rows is not None:
            parts.append(remember_files(_with_plain_text(rows), [(str(path), len(rows))]))
    gathered.raise_if_any()
    return _blend(parts, ", ".join(map(str, paths)), None, 0)


def _from_hub(name: str, split: str) -> Dataset:
    """Return a hub data set `name` or `name@subset`: a configuration, or a folder of data files."""
    repository, _, subset = name.partition("@")
    try:
        with looking_up("data set", name):
            if subset and subset not in datasets.get_dataset_config_names(repository):
                return datasets.load_dataset(repository, data_dir=subset, split=split)
            return datasets.load_dataset(repository, subset or None, split=split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = error.__cause__ if isinstance(error, DatasetGenerationError) else None
        raise ConfigError(
            f"data set {name} cannot be loaded from the hub (split '{split}'): "
            f"{first_line(reason or error)} "
            "Check the name and the split, or give a local path."
        ) from error
