"""From what a user types (files, folders, saved data sets, hub names, comma lists) to one table of
rows.

Everything that can be wrong with files is found here, before any model is loaded. Knows no column
but `id`: what else a row must hold is the business of the data set classes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetGenerationError, DatasetsError

from openrlhf.config.local_paths import DATA_SUFFIXES, looks_local
from openrlhf.datasets.blending import blend, parse_probs
from openrlhf.datasets.data_files import check_text, read_files, with_plain_text
from openrlhf.datasets.expectations import UNCHECKED, Expectations, sha256_of
from openrlhf.datasets.problems import (
    Gathered,
    files_of,
    remember_files,
    remember_unread,
    unread_of,
)
from openrlhf.datasets.repeated_ids import refuse_repeats
from openrlhf.errors import ConfigError, DataError, first_line
from openrlhf.utils.hub import looking_up

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


def load_rows(
    spec: str,
    *,
    split: str = "train",
    probs: str | Sequence[float] | None = None,
    max_samples: int | None = None,
    seed: int = 42,
    expected: Expectations = UNCHECKED,
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
    gathered = Gathered()
    found = [
        gathered.attempt(partial(_load_one, name, split, facts))
        for name, facts in zip(names, expected.of_each(names), strict=True)
    ]
    gathered.raise_if_any()
    parts = [_capped(rows, max_samples) for rows in found if rows is not None]
    rows = _capped(blend(parts, names, weights, seed), max_samples)
    unread = [file for part in parts for file in unread_of(part)]
    return remember_unread(rows, unread) if unread else rows


def _load_one(name: str, split: str, expected: Expectations) -> Dataset:
    is_local = _is_local(name)
    if expected.sha256:
        _check_hash(name, expected.sha256)
    rows = with_plain_text(_load_local(name, split) if is_local else _load_from_hub(name, split))
    if len(rows) == 0:
        raise DataError(f"data set {name} has 0 rows in split '{split}'. Give one that has rows.")
    if not files_of(rows):
        check_text(rows.data.table, name)
        remember_files(rows, [(name, len(rows))])
    expected.check_count(name, len(rows))
    if expected.duplicate_ids == "error":
        refuse_repeats(rows)
    return rows


def _check_hash(name: str, expected: str) -> None:
    path = _local_path(name)
    if not path.is_file():
        raise ConfigError(
            f"--expect_sha256 is of a file, and data set {name} is none. Leave it out, or name the "
            "file."
        )
    if (found := sha256_of(path)) != expected.lower():
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
        return read_files([path])  # a file has no splits: it is what was asked for
    by_split, unread = _files_by_split(path)
    if not by_split:
        raise ConfigError(
            f"folder {name} has no data files. Put {', '.join(DATA_SUFFIXES)} files into it."
        )
    wanted = _SPLIT_WORDS.get(split, split)
    if wanted not in by_split:
        raise _missing_split(name, split, sorted(by_split))
    rows = read_files(by_split[wanted])
    return remember_unread(rows, list(map(str, unread))) if unread else rows


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
    return rows.select(range(int(max_samples)))
