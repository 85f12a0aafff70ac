"""Data sets, rows and loaded models that a Python program gives where a command takes a path: they
are written to files, whose names say their content, and the files are read.

Nothing here knows the libraries that made them.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from openrlhf.errors import ConfigError, first_line
from openrlhf.utils.images import PictureError, read_picture

NUM_DIGITS = 12  # of a digest, in a name


def is_object(value: object) -> bool:
    """Return True if a setting is no text: an object, or a list with one or with nothing."""
    if isinstance(value, list | tuple):
        return not value or any(map(is_object, value))
    return not isinstance(value, str | os.PathLike | bool | int | float | None)


def as_paths(name: str, value: Any, folder: Path) -> Any:
    """Return the setting `name` with the path of a file in `folder` for each object in it; raise
    ConfigError for one that cannot be written.
    """
    if not is_object(value):
        return value
    is_list = isinstance(value, list | tuple)
    if is_list and not value:
        raise ConfigError(f"{name} has no rows. Give one that has some.")
    if is_list and all(isinstance(row, Mapping) for row in value):
        return _written(name, ".jsonl", folder, lambda path: _write_rows(value, path))
    if is_list and len(value) == 2 and all(hasattr(part, "save_pretrained") for part in value):
        if any(getattr(part, "peft_config", None) for part in value):  # it would be saved alone
            raise ConfigError(
                f"{name} has an adapter on a model in memory. Give the model with the adapter "
                "merged (merge_and_unload), or the adapter's folder."
            )
        return _written(name, "", folder, lambda path: [p.save_pretrained(path) for p in value])
    if is_list:
        return [as_paths(name, part, folder) for part in value]
    if hasattr(value, "to_parquet") and not isinstance(value, Mapping):
        form = getattr(value, "format", None)  # of a data set
        if isinstance(form, Mapping) and form.get("type") == "custom":
            raise ConfigError(f"{name} has a transform, which no file keeps. Give it with map.")
        if not hasattr(value, "__len__"):
            raise ConfigError(
                f"{name} is a stream, which may have no end. Give "
                "datasets.Dataset.from_list(list(stream.take(1000))) or a path or hub id."
            )
        if hasattr(value, "reset_index"):  # pandas would write the index of a filtered frame
            value = value.reset_index(drop=True)
        return _written(name, ".parquet", folder, value.to_parquet)
    kind, remedy = type(value).__name__, "a path or hub id, a datasets.Dataset, or a list of rows"
    if hasattr(value, "save_pretrained"):
        remedy = "(model, tokenizer), or a path or hub id"
    elif isinstance(value, Mapping) and all(isinstance(part, list) for part in value.values()):
        remedy = "datasets.Dataset.from_dict of it"
    elif isinstance(value, Mapping):
        remedy = f"one of its parts ({', '.join(map(str, value))})"
    raise ConfigError(f"{name} cannot be a {kind}. Give {remedy}.")


def _write_rows(rows: list[Mapping[str, object]], path: str) -> None:
    with Path(path).open("w") as file:
        for number, row in enumerate(rows, start=1):
            try:
                cells = [
                    f"{json.dumps(str(key))}: {_cell(key, value)}" for key, value in row.items()
                ]
            except (TypeError, ValueError) as error:
                raise ValueError(f"row {number}, {error}") from error
            file.write(f"{{{', '.join(cells)}}}\n")


def _cell(key: object, value: object) -> str:
    try:
        return json.dumps(value, default=_as_text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {key!r}: {error}") from error


def _as_text(value: Any) -> object:
    """Return a number of numpy or torch, a path or an image as rows of a file have it; raise
    TypeError for another object.
    """
    if hasattr(value, "tolist") and getattr(value, "ndim", None) == 0:
        return value.tolist()
    if isinstance(value, os.PathLike):
        return str(value)
    try:
        return read_picture(value).data_url()
    except PictureError as error:
        raise TypeError(f"neither JSON nor an image: {error}") from error


def _written(name: str, suffix: str, folder: Path, write: Any) -> str:
    """Return the path of what `write` writes. Ranks that write the same leave one copy."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.rpartition(".")[2]
    temporary = folder / f".{stem}-{os.getpid()}{suffix}"
    try:
        write(str(temporary))
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"{name} cannot be written to {folder}: {first_line(error)}. Give a path instead."
        ) from error
    final = folder / f"{stem}-{_digest(temporary)}{suffix}"
    with suppress(OSError):  # a folder of another rank may be there
        temporary.rename(final)
    shutil.rmtree(temporary, ignore_errors=True)
    return str(final)


def _digest(path: Path) -> str:
    """Return the first digits of the sum of a file, or of all files of a folder."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    sums = hashlib.sha256()
    for file in filter(Path.is_file, files):
        with file.open("rb") as content:
            sums.update(hashlib.file_digest(content, "sha256").digest())
    return sums.hexdigest()[:NUM_DIGITS]
