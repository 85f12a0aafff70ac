"""Files and folders that a command line names: those that are not there are said before a run.

What a field opens stands beside it in its declaration. A name that may be one of the hub is left to
the hub; what is in a file is the business of whoever reads it.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from openrlhf.config.base import (
    DATA_SUFFIXES,
    REMEDIES,
    SCHEME,
    Caution,
    CommandConfig,
    Option,
    is_blank,
    is_given,
    value_at,
    walk,
)
from openrlhf.config.common import TrainingRunConfig

MODEL_FILES = ("config.json", "adapter_config.json")
LISTS = ("models", "runs", "data", "code")  # with commas between
OUTPUTS = ("output", "output_file")


def named_things(config: CommandConfig) -> Iterator[tuple[Option, str, list[str]]]:
    """Yield every leaf that names files, folders or ids; what they are, of REMEDIES; the names."""
    for option in walk(type(config)):
        if option.opens and not is_blank(value := value_at(config, option.path)):
            yield option, option.opens, names_in(option.opens, value)


def path_problems(config: CommandConfig) -> Iterator[str]:
    """Yield a line for every file or folder that is named and not there, with its flag."""
    # The root of checkpoints matters if it is named, or written to without being named.
    is_written = isinstance(config, TrainingRunConfig) and config.ckpt.save_steps > 0
    for option, opens, names in named_things(config):
        if option.path == "ckpt.path" and not (is_written or is_given(config, "ckpt.path")):
            continue
        find = _output_problems if opens in OUTPUTS else _problems
        for name in names:
            yield from find(opens, name, f"{option.flag} {name}")


def path_notices(config: CommandConfig) -> Iterator[str]:
    """Yield a warning for each output folder that is a model which the command reads."""
    read = [
        (option.flag, path.resolve())
        for option, opens, names in named_things(config)
        for path in (path_of(opens, name) for name in names)
        if opens in ("model", "models") and path is not None
    ]
    for option, opens, names in named_things(config):
        folder = Path(names[0]).resolve() if opens == "output" else None
        flags = list(dict.fromkeys(flag for flag, path in read if path == folder))
        if flags:
            yield Caution(
                f"{option.flag} {names[0]} is the model of {' and '.join(flags)}: what the command "
                f"writes replaces it. Type another {option.flag} to keep it."
            )


def reads_from(config: CommandConfig, folder: Path) -> bool:
    """Return True if a model, data set or other input of this config lies in a folder."""
    inputs = [thing for thing in named_things(config) if thing[1] not in OUTPUTS]
    paths = [path_of(opens, name) for _, opens, names in inputs for name in names]
    return any(path.resolve().is_relative_to(folder.resolve()) for path in paths if path)


def looks_local(name: str) -> bool:
    """Return True if a name can only be that of a file or folder: no hub id is like it."""
    if name.startswith(("/", ".", "~")) or name.endswith((*DATA_SUFFIXES, ".py")):
        return True
    return "\\" in name or name.partition("@")[0].count("/") > 1


def is_hub_id(opens: str, name: str) -> bool:
    """Return True for the name of a model or data set that is not on this machine."""
    is_fetched = opens in ("model", "models", "runs", "data")
    return is_fetched and "://" not in name and path_of(opens, name) is None


def is_template_text(template: str) -> bool:
    """Return True if a chat template is given as Jinja text, not as the path of a file."""
    return len(template) >= 1024 or "\n" in template or "{" in template


def names_in(opens: str, value: str) -> list[str]:
    """Return the parts of a comma list, unless the whole is a path that exists."""
    if opens not in LISTS or os.path.exists(_expanded(value)):
        return [value]
    return [name.strip() for name in value.split(",") if name.strip()]


def _problems(opens: str, name: str, typed: str) -> Iterator[str]:
    """Yield the problem of one name, with a remedy; `typed` is the flag with it."""
    path = path_of(opens, name)
    if path is None:
        return
    problem = None
    if not os.path.exists(path):
        problem = "does not exist"
    elif opens in ("model", "models") and not any((path / file).is_file() for file in MODEL_FILES):
        problem = "holds no config.json"
    elif opens in ("code", "template", "file") and not path.is_file():
        problem = "is a folder"
    elif opens == "folder" and not path.is_dir():
        problem = "is a file"
    if problem:
        yield f"{typed} {problem}. Type {REMEDIES[opens]}."


def _output_problems(opens: str, name: str, typed: str) -> Iterator[str]:
    """Yield the reason why nothing could be written there; the config has expanded its `~`."""
    path, remedy = Path(name), REMEDIES[opens]
    if opens == "output_file" and path.is_dir():
        yield f"{typed} is a folder. Type {remedy}."
        return
    folder = path if opens == "output" else path.parent
    parent = next(part for part in (folder, *folder.absolute().parents) if os.path.lexists(part))
    try:  # rights alone say nothing of /proc, of a full disk or of what a server of files allows
        with tempfile.TemporaryDirectory(dir=parent):
            pass
    except OSError as error:
        yield f"{typed} cannot be written: {parent}: {error.strerror}. Type {remedy}."


def path_of(opens: str, name: str) -> Path | None:
    """Return the path a name stands for; None for a hub id, a URL, a module or a text."""
    path = _expanded(name)
    if opens in ("file", "folder"):
        return path
    if opens == "template":
        return None if is_template_text(name) else path
    if opens == "code":
        file, colon, _ = name.rpartition(":")  # `file.py:name` of a function
        typed = file if colon and file.endswith(".py") else name
        return _expanded(typed) if looks_local(typed) and not SCHEME.match(name) else None
    folder, at, subset = name.rpartition("@")
    if opens == "data" and at and os.path.isdir(_expanded(folder)):
        return path if os.path.exists(path) else _expanded(folder) / subset
    is_local = (looks_local(name) or os.path.lexists(path)) and "://" not in name
    return path if is_local else None


def _expanded(name: str) -> Path:
    """Return the path with its `~` expanded, which stays where nobody has that name."""
    return Path(os.path.expanduser(name))
