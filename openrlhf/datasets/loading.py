"""From what a user types (files, folders, saved data sets, hub names, comma lists) to one table of
rows.

Everything that can be wrong with files is found here, before any model is loaded. Knows no column
but `id`: what else a row must hold is the business of the data set classes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetGenerationError, DatasetsError

from openrlhf.config.common import TextDataConfig
from openrlhf.config.local_paths import DATA_SUFFIXES, looks_local
from openrlhf.datasets.data_files import check_text, read_file
from openrlhf.datasets.problems import (
    Gathered,
    Problems,
    files_of,
    remember_files,
    row_place,
    unread_of,
)
from openrlhf.errors import ConfigError, DataError, first_line
from openrlhf.utils.hub import looking_up
from openrlhf.utils.progress import are_drawn

_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}


@dataclass(frozen=True)
class Expectations:
    """Facts of one data set known before it is read, or comma lists with one for each of several:
    a file cut at the end of a line looks whole.
    """

    num_rows: str | None = None
    sha256: str | None = None  # of its file, in hexadecimal
    duplicate_ids: str = "error"  # error | keep

    @classmethod
    def of(cls, data: TextDataConfig) -> Expectations:
        """Return what a command's `data.*` says."""
        return cls(data.expect_rows, data.expect_sha256, data.duplicate_ids)

    def of_each(self, names: Sequence[str]) -> list[Expectations]:
        """Return the facts of each data set; raise ConfigError when they are more or fewer."""
        counts = _one_for_each(self.num_rows, names, "--expect_rows")
        for count in counts:
            if count is not None and not count.isdecimal():
                raise ConfigError(
                    f"--expect_rows {self.num_rows} is no number of rows. Type e.g. 1000."
                )
        hashes = _one_for_each(self.sha256, names, "--expect_sha256")
        pairs = zip(counts, hashes, strict=True)
        return [replace(self, num_rows=count, sha256=digest) for count, digest in pairs]


def load_rows(
    spec: str,
    *,
    split: str = "train",
    probs: str | Sequence[float] | None = None,
    max_samples: int | None = None,
    seed: int = 42,
    expected: Expectations = Expectations(),
) -> Dataset:
    """The rows that a comma list of data sets names, blended by `probs` or else one after the
    other.

    `max_samples` caps each data set and the blend. Raises ConfigError or DataError with a one-line
    remedy for each data set that cannot be used.
    """
    names = (
        [spec] if _exists(Path(spec).expanduser()) else [name.strip() for name in spec.split(",")]
    )
    names = [name for name in names if name]
    if not names:
        raise ConfigError(
            "no data set is named. Give files, folders or hub names, separated by commas."
        )
    weights = parse_probs(probs, names)
    if not are_drawn():
        datasets.disable_progress_bars()
    gathered = Gathered()
    found = [
        gathered.attempt(partial(_load_one, name, split, facts))
        for name, facts in zip(names, expected.of_each(names), strict=True)
    ]
    gathered.raise_if_any()
    parts = [_capped(rows, max_samples) for rows in found if rows is not None]
    return _capped(_blend(parts, names, weights, seed), max_samples)


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


def _blend(
    parts: list[Dataset], names: list[str], weights: list[float] | None, seed: int
) -> Dataset:
    """Return all rows of the parts, or rows drawn from them until one part is used up."""
    if len(parts) == 1:
        return parts[0]
    rows = _joined(parts, ", ".join(names))
    if weights is None:
        return rows
    drawn = datasets.interleave_datasets(parts, probabilities=weights, seed=seed)
    return remember_files(drawn, files_of(rows), unread_of(rows))


def _joined(parts: list[Dataset], names: str) -> Dataset:
    """Return the rows of all parts, one part after the other; raise DataError if they differ."""
    try:
        rows = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DataError(
            f"data sets {names} do not fit together: {first_line(error)} "
            "Give their common columns the same types; columns of a csv file are text."
        ) from error
    files = [file for part in parts for file in _files_within(part)]
    return remember_files(rows, files, [name for part in parts for name in unread_of(part)])


def _files_within(rows: Dataset) -> list[tuple[str, int]]:
    """Return the files of rows that may have been capped, with the rows that are left of each."""
    left, files = len(rows), []
    for name, count in files_of(rows):
        files.append((name, min(count, left)))
        left -= files[-1][1]
    return files


def _load_one(name: str, split: str, expected: Expectations) -> Dataset:
    is_local = _is_local(name)
    if expected.sha256:
        _check_hash(name, expected.sha256)
    rows = _with_plain_text(_load_local(name, split) if is_local else _load_from_hub(name, split))
    if len(rows) == 0:
        raise DataError(f"data set {name} has 0 rows in split '{split}'. Give one that has rows.")
    if not files_of(rows):
        check_text(rows, name)
        remember_files(rows, [(name, len(rows))])
    if expected.num_rows and int(expected.num_rows) != len(rows):
        raise DataError(
            f"data set {name} has {len(rows)} rows, not {expected.num_rows}. Fetch it again, or "
            "correct --expect_rows."
        )
    if expected.duplicate_ids == "error":
        _refuse_repeated_ids(rows)
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
    files, unread = files_of(rows), unread_of(rows)
    return remember_files(rows.cast(features), files, unread)


def _plain(kind: Any) -> Any:
    if isinstance(kind, dict):
        return {name: _plain(part) for name, part in kind.items()}
    if isinstance(kind, (datasets.List, datasets.LargeList)):
        return datasets.List(_plain(kind.feature), length=getattr(kind, "length", -1))
    is_text = isinstance(kind, datasets.Value) and kind.dtype in ("large_string", "string_view")
    return datasets.Value("string") if is_text else kind


def _check_hash(name: str, expected: str) -> None:
    path = _local_path(name)
    if not path.is_file():
        raise ConfigError(
            f"--expect_sha256 is of a file, and data set {name} is none. Leave it out, or name the "
            "file."
        )
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while piece := file.read(2**20):
                digest.update(piece)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    if (found := digest.hexdigest()) != expected.lower():
        raise DataError(
            f"{path} has the SHA-256 {found}, not {expected.lower()}. Fetch the file again, or "
            "correct --expect_sha256."
        )


def _is_local(name: str) -> bool:
    """Whether a name is a path; a path that does not exist is refused, and so is code."""
    path = _local_path(name)
    if name.endswith(".py") or (path.is_file() and path.suffix == ".py"):
        raise ConfigError(
            f"data set {name} is a Python script, which is never run. "
            "Give its data as jsonl, csv or parquet."
        )
    if "://" in name:
        raise ConfigError(
            f"data set {name} is a URL, which is not fetched. Download it, then give the path."
        )
    if _exists(path):
        return True
    if path.is_symlink():
        raise ConfigError(
            f"data set {name} is a link to {path.readlink()}, which does not exist. "
            "Give the file itself."
        )
    if looks_local(name):
        raise ConfigError(
            f"data set {name} does not exist. Give a file ({', '.join(DATA_SUFFIXES)}), a folder "
            "of them, or a hub name."
        )
    return False


def _exists(path: Path) -> bool:
    """Whether a file or folder is there; raises DataError where that may not be seen."""
    try:
        return path.exists()
    except PermissionError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except OSError:  # longer than any name, as a list of many names is
        return False


def _local_path(name: str) -> Path:
    """The path of `path` or `folder@subfolder`."""
    path = Path(name).expanduser()
    if not _exists(path) and "@" in name:
        folder, _, subset = name.rpartition("@")
        if Path(folder).expanduser().is_dir():
            return Path(folder).expanduser() / subset
    return path


def _load_local(name: str, split: str) -> Dataset:
    path = _local_path(name)
    if _is_saved_dataset(path):
        return _pick_saved(_read_saved(path), name, split)
    if path.is_file():
        return _read_files([path])  # a file has no splits: it is what was asked for
    by_split, unread = _files_by_split(path)
    if not by_split:
        raise ConfigError(
            f"folder {name} has no data files. Put {', '.join(DATA_SUFFIXES)} files into it."
        )
    wanted = _SPLIT_WORDS.get(split, split)
    if wanted not in by_split:
        raise _missing_split(name, split, sorted(by_split))
    rows = _read_files(by_split[wanted])
    return remember_files(rows, files_of(rows), list(map(str, unread)))


def _read_files(paths: list[Path]) -> Dataset:
    """Return the rows of files, one after the other; raise DataError with all their problems."""
    gathered = Gathered()
    found = [gathered.attempt(partial(read_file, path)) for path in paths]
    gathered.raise_if_any()
    parts = [_with_plain_text(rows) for rows in found if rows is not None]
    for rows, path in zip(parts, paths, strict=True):
        remember_files(rows, [(str(path), len(rows))])
    return _joined(parts, ", ".join(map(str, paths)))


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _read_saved(path: Path) -> Dataset | DatasetDict:
    try:
        return datasets.load_from_disk(str(path))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path} is a damaged saved data set: {first_line(error)} Save it again."
        ) from error


def _pick_saved(saved: Dataset | DatasetDict, name: str, split: str) -> Dataset:
    if not isinstance(saved, DatasetDict) and saved.split is None:
        return saved  # it has no splits: it is what was asked for
    by_split = saved if isinstance(saved, DatasetDict) else {str(saved.split): saved}
    if split not in by_split:
        raise _missing_split(name, split, sorted(by_split))
    return by_split[split]


def _missing_split(name: str, split: str, found: list[str]) -> ConfigError:
    return ConfigError(
        f"data set {name} has no split '{split}'; splits found: {', '.join(found)}. "
        "Name one of them."
    )


def _files_by_split(folder: Path) -> tuple[dict[str, list[Path]], list[Path]]:
    """Data files by the split that their name or folder says, and those of no split; files that say
    none are `train` if none does.
    """
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.name.endswith(DATA_SUFFIXES)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    by_split: dict[str, list[Path]] = {}
    unread = []
    for path in files:
        said = _split_of(path.relative_to(folder))
        if said is not None:
            by_split.setdefault(said, []).append(path)
        else:
            unread.append(path)
    if by_split or not files:
        return by_split, unread
    return {"train": files}, []


def _split_of(relative: Path) -> str | None:
    for part in reversed(relative.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return None


def _load_from_hub(name: str, split: str) -> Dataset:
    """A hub data set `name` or `name@subset`, the subset being a configuration or a folder of data
    files.
    """
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


def _capped(rows: Dataset, max_samples: int | None) -> Dataset:
    if max_samples is None or len(rows) <= max_samples:
        return rows
    capped = rows.select(range(int(max_samples)))
    return remember_files(capped, files_of(rows), unread_of(rows))
