"""The heads of a model's safetensors files: names and shapes of its weights, read before anything
is built from its config. Knows JSON alone.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from openrlhf.config.base import CommandConfig
from openrlhf.config.local_paths import named_things
from openrlhf.errors import ConfigError
from openrlhf.utils.adapter_folder import with_bases

KINDS = ("model", "models", "runs")  # of what a flag names
INDEX = "model.safetensors.index.json"
INDICES = (INDEX, "pytorch_model.bin.index.json")
WHOLE = ("model.safetensors", "adapter_model.safetensors")
POINTER = b"version https://git-lfs"
MAX_HEAD = 100_000_000  # bytes, the limit of the format
NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")  # names of families


def weight_problems(config: CommandConfig) -> Iterator[str]:
    """Yield a line for every named model, and base of an adapter, whose index leads out of its
    folder, whose files are torn or missing, or whose config has more layers than its files have
    tensors, which would take hours to build.
    """
    for option, opens, names in named_things(config):
        for folder in (Path(name).expanduser() for name in names if opens in KINDS):
            try:
                for part in map(Path, with_bases(str(folder))):
                    _check_index(part)
                    _check_layers(part)
                    _check_files(part)
            except ConfigError as error:
                yield f"{option.flag} {error}"


def _check_index(folder: Path) -> None:
    """Raise ConfigError for an index that names no files, or files outside of the folder."""
    for index in (folder / name for name in INDICES if (folder / name).is_file()):
        content = _read_json(index)
        named = content.get("weight_map") if isinstance(content, dict) else None
        named = named.values() if isinstance(named, dict) else [None]
        files = {file for file in named if isinstance(file, str)}
        if not all(isinstance(file, str) for file in named):
            raise ConfigError(f"{index} does not name a file for each weight. Copy it again.")
        for file in sorted(files):
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise ConfigError(
                    f"{index} names a file outside of its folder: {file}. Do not use this model; "
                    "take it from a source you trust."
                )


def _check_layers(folder: Path) -> None:
    shapes, config = tensor_shapes(folder), _read_json(folder / "config.json")
    if not shapes or not isinstance(config, dict):
        return  # whoever loads it says what is wrong
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for name in NUM_LAYERS:
            if isinstance(count := part.get(name), int) and count > len(shapes):
                raise ConfigError(
                    f"{folder}: config.json says {name} {count:,}, and the files hold "
                    f"{len(shapes):,} tensors. Copy the model again."
                )


def _check_files(folder: Path) -> None:
    """Raise ConfigError for a torn safetensors file, for one that the index names in vain, and for
    an index beside a file that it does not name: Transformers reads the file, vLLM the index.
    """
    shards = _indexed_files(folder)
    if shards and (folder / WHOLE[0]).is_file() and WHOLE[0] not in shards:
        raise ConfigError(
            f"{folder} holds two sets of weights: {WHOLE[0]}, and the files that {INDEX} names. "
            "Remove the older one."
        )
    for name in dict.fromkeys((*WHOLE, *shards)):
        if (path := folder / name).is_file():
            if problem := _file_problem(path):
                raise ConfigError(f"{path} {problem}")
        elif name in shards:
            raise ConfigError(
                f"{folder / INDEX} names {name}, which is missing. Copy the model again."
            )


def _file_problem(path: Path) -> str:
    """Return the problem with a safetensors file whose size is not what its head says."""
    if not os.access(path, os.R_OK):
        return ""  # whoever loads it says so
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            return "is a pointer of Git LFS, not weights. Type git lfs pull in its folder."
        file.seek(0)
        size = int.from_bytes(file.read(8), "little")
    head, length = _read_head(path), path.stat().st_size
    if not head:
        return "has no head that can be read. Copy the model again."
    expected = 8 + size + max(value["data_offsets"][1] for value in head.values())
    return f"has {length:,} bytes of {expected:,}. Copy it again." if length != expected else ""


def _indexed_files(folder: Path) -> list[str]:
    """Return the files that the index of a folder names, if it has one."""
    index = _read_json(folder / INDEX)
    named = index.get("weight_map") if isinstance(index, dict) else None
    files = named.values() if isinstance(named, dict) else ()
    return sorted({file for file in files if isinstance(file, str)})


def files_of(folder: Path) -> list[Path]:
    """Return the safetensors files of a model's folder. Raise ConfigError where the index leads out
    of the folder.
    """
    _check_index(folder)
    if (folder / WHOLE[0]).is_file():
        return [folder / WHOLE[0]]
    return [folder / file for file in _indexed_files(folder) if (folder / file).is_file()]


def tensor_shapes(folder: Path) -> Mapping[str, list[int]]:
    """Return the shape of every tensor by its name; none for files of another kind, or torn ones.
    Raise ConfigError where the index leads out of the folder.
    """
    heads = [_read_head(file) for file in files_of(folder)]
    return {name: value["shape"] for head in heads for name, value in head.items()}


def _read_head(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(size)) if size <= MAX_HEAD else {}
        tensors = {name: value for name, value in head.items() if name != "__metadata__"}
        ends = [value["data_offsets"][1] + len(value["shape"]) for value in tensors.values()]
    except (OSError, ValueError, AttributeError, LookupError, TypeError):  # of another form, too
        return {}
    return tensors if all(isinstance(end, int) for end in ends) else {}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
