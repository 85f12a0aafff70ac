"""From what a user types (files, folders, saved data sets, hub names, comma lists) to one table of
rows.

Everything that can be wrong with files is found here, before any model is loaded. Knows no columns:
what a row must hold is the business of the data set classes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from datasets import Dataset, DatasetDict

from openrlhf.datasets.json_files import DAMAGED_GZIP, join_tables, read_json_table
from openrlhf.datasets.problems import files_of, remember_files
from openrlhf.errors import ConfigError, DataError

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".csv", ".parquet", ".arrow")
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
) -> Dataset:
    """The rows that a comma list of data sets names, blended by `probs` or else one after the
    other.

    `max_samples` caps each data set and the blend. Raises ConfigError or DataError with a one-line
    remedy.
    """
    names = (
        [spec] if _exists(Path(spec).expanduser()) else [name.strip() for name in spec.split(",")]
    )
    names = [name for name in names if name]
    if not names:
        raise ConfigError(
            "no data set is named. Give files, folders or hub names, separated by commas."
        )
    weights = _parse_probs(probs, names)
    parts = [_capped(_load_one(name, split), max_samples) for name in names]
    return _capped(_blend(parts, names, weights, seed), max_samples)


def _load_one(name: str, split: str) -> Dataset:
    rows = _load_local(name, split) if _is_local(name) else _load_from_hub(name, split)
    if len(rows) == 0:
        raise DataError(f"data set {name} has 0 rows in split '{split}'. Give one that has rows.")
    return rows if files_of(rows) else remember_files(rows, [(name, len(rows))])


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
    repository = name.partition("@")[0]
    looks_local = name.startswith(("/", ".", "~")) or name.endswith(SUFFIXES)
    if looks_local or repository.count("/") > 1:
        raise ConfigError(
            f"data set {name} does not exist. Give a file ({', '.join(SUFFIXES)}), a folder of "
            "them, or a hub name."
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
    by_split = _files_by_split(path)
    if not by_split:
        raise ConfigError(
            f"folder {name} has no data files. Put {', '.join(SUFFIXES)} files into it."
        )
    wanted = _SPLIT_WORDS.get(split, split)
    if wanted not in by_split:
        raise _missing_split(name, split, sorted(by_split))
    return _read_files(by_split[wanted])


def _is_saved_dataset(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _read_saved(path: Path) -> Dataset | DatasetDict:
    try:
        return datasets.load_from_disk(str(path))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path} is a damaged saved data set: {_first_line(error)} Save it again."
        ) from error


def _pick_saved(saved: Dataset | DatasetDict, name: str, split: str) -> Dataset:
    by_split = saved if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved}
    if split not in by_split:
        raise _missing_split(name, split, sorted(by_split))
    return by_split[split]


def _missing_split(name: str, split: str, found: list[str]) -> ConfigError:
    return ConfigError(
        f"data set {name} has no split '{split}'; splits found: {', '.join(found)}. "
        "Name one of them."
    )


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    """Data files by the split that their name or folder says; files that say none are `train` if
    none does.
    """
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.name.endswith(SUFFIXES)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    by_split: dict[str, list[Path]] = {}
    for path in files:
        said = _split_of(path.relative_to(folder))
        if said is not None:
            by_split.setdefault(said, []).append(path)
    return by_split or ({"train": files} if files else {})


def _split_of(relative: Path) -> str | None:
    for part in reversed(relative.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return None


def _read_files(paths: list[Path]) -> Dataset:
    place = str(paths[0] if len(paths) == 1 else paths[0].parent)
    if all(path.suffix == ".arrow" for path in paths):
        parts = [_read_arrow(path) for path in paths]
        rows, counts = datasets.concatenate_datasets(parts), list(map(len, parts))
    else:
        tables = [_read_table(path) for path in paths]
        table, counts = join_tables(tables, place), [table.num_rows for table in tables]
        rows = Dataset(table) if table.num_columns else Dataset.from_dict({})
    return remember_files(rows, list(zip(map(str, paths), counts, strict=True)))


def _read_arrow(path: Path) -> Dataset:
    try:
        return Dataset.from_file(str(path))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a readable Arrow file: {_first_line(error)}") from error


def _read_table(path: Path) -> pa.Table:
    """All rows of a file that stays as it is meanwhile."""
    try:
        before = path.stat()
        if before.st_size == 0:
            raise DataError(f"{path} is empty: 0 rows. Give a file that has rows.")
        table = _read_by_suffix(path)
        after = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {_first_line(error)}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"{path} changed while it was read. Start again once it is written.")
    return table


def _read_by_suffix(path: Path) -> pa.Table:
    try:
        if path.suffix == ".csv":
            return _read_csv(path)
        if path.suffix == ".parquet":
            return pa.parquet.read_table(path)
        if path.suffix == ".arrow":
            return _read_arrow(path).data.table
        return read_json_table(path)
    except (pa.ArrowException, *DAMAGED_GZIP) as error:
        raise DataError(f"{path} is damaged: {_first_line(error)}. Write it again.") from error


def _read_csv(path: Path) -> pa.Table:
    """A CSV file with quoted line breaks allowed; what looks like a date stays text."""
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    table = pa.csv.read_csv(path, parse_options=parse)
    dates = {field.name: pa.string() for field in table.schema if pa.types.is_temporal(field.type)}
    if not dates:
        return table
    convert = pa.csv.ConvertOptions(column_types=dates)
    return pa.csv.read_csv(path, parse_options=parse, convert_options=convert)


def _load_from_hub(name: str, split: str) -> Dataset:
    """A hub data set `name` or `name@subset`, the subset being a configuration or a folder of data
    files.
    """
    repository, _, subset = name.partition("@")
    try:
        if subset and subset not in datasets.get_dataset_config_names(repository):
            return datasets.load_dataset(repository, data_dir=subset, split=split)
        return datasets.load_dataset(repository, subset or None, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"data set {name} cannot be loaded from the hub (split '{split}'): "
            f"{_first_line(error)} "
            "Check the name and the split, or give a local path."
        ) from error


def _parse_probs(probs: str | Sequence[float] | None, names: list[str]) -> list[float] | None:
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


def _blend(
    parts: list[Dataset], names: list[str], weights: list[float] | None, seed: int
) -> Dataset:
    if len(parts) == 1:
        return parts[0]
    try:
        if weights is None:
            files = [item for part in parts for item in _files_within(part)]
            return remember_files(datasets.concatenate_datasets(parts), files)
        rows = datasets.interleave_datasets(parts, probabilities=weights, seed=seed)
        return remember_files(rows, [])  # a blended row has no simple place
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DataError(
            f"data sets {', '.join(names)} do not fit together: {_first_line(error)} "
            "Give their common columns the same types."
        ) from error


def _files_within(rows: Dataset) -> list[tuple[str, int]]:
    """The files of rows that may have been capped, with the rows that are left of each."""
    left = len(rows)
    files = []
    for name, count in files_of(rows):
        files.append((name, min(count, left)))
        left -= files[-1][1]
    return files


def _capped(rows: Dataset, max_samples: int | None) -> Dataset:
    if max_samples is None or len(rows) <= max_samples:
        return rows
    return rows.select(range(int(max_samples)))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
