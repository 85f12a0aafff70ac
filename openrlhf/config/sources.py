"""Where values come from: environment, YAML file, command line; each later one wins.

Collects every unknown name and every senseless value instead of stopping at the first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from openrlhf.config.base import walk
from openrlhf.config.flags import flag_table, nearest_name, raw_values, yaml_words
from openrlhf.config.run import CommandConfig
from openrlhf.errors import ConfigError


@dataclass(frozen=True)
class Given:
    """A raw value for one leaf, and the name under which the user gave it."""

    raw: Any
    source: str  # "--max_len", "run.yaml: data.max_len" or "OPENRLHF_ASYNC_QUEUE_SIZE"


@dataclass
class Reading:
    """Everything read so far, by leaf path; filled by the `read_...` functions in turn."""

    config_class: type[CommandConfig]
    values: dict[str, Given] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def take(self, name: str, source: str, words: Sequence[str]) -> None:
        """Note what a name with these words sets."""
        targets = flag_table(self.config_class).get(name)
        if targets is not None:
            try:
                found = raw_values(source, words, targets)
            except ConfigError as error:
                self.problems += error.problems
            else:
                self.values |= {path: Given(raw, source) for path, raw in found.items()}
        elif name in self.config_class.dead_flags:
            self.notices.append(f"{source} has no effect; it is accepted for old commands.")
        else:
            near = nearest_name(name, self.config_class)
            remedy = f"Did you mean --{near}?" if near else "--help lists all of them."
            self.problems.append(f"{source} is not a known name. {remedy}")


def read_all(config_class: type[CommandConfig], argv: Sequence[str]) -> Reading:
    """Environment, then each `--config` file, then flags."""
    reading = Reading(config_class)
    read_environment(reading)
    flags = list(split_flags(argv, reading))
    for name, _, words in flags:
        if name == "config":
            if len(words) != 1:
                reading.problems.append("--config takes one YAML file. Type --config FILE.yaml.")
            else:
                read_yaml(reading, Path(words[0]))
    for name, source, words in flags:
        if name != "config":
            reading.take(name, source, words)
    read_environment(reading, is_after=True)
    return reading


def read_environment(reading: Reading, *, is_after: bool = False) -> None:
    """Defaults from the variables that fields name; `is_after` flags, for those typed bare."""
    for option in walk(reading.config_class):
        variable, bare = option.info.env, option.info.bare
        if not variable or not os.environ.get(variable):
            continue
        given = reading.values.get(option.path)
        is_bare = given is not None and bare is not None and str(given.raw).lower() == bare
        if is_bare or not is_after:
            reading.values[option.path] = Given(os.environ[variable], variable)


def split_flags(argv: Sequence[str], reading: Reading) -> Iterator[tuple[str, str, list[str]]]:
    """Each flag of a command line: name with `_` for `-`, as typed, the words after it."""
    current: tuple[str, str, list[str]] | None = None
    for token in argv:
        if token.startswith("--") and token[2:3].isalpha():
            if current is not None:
                yield current
            typed, has_value, value = token.partition("=")
            name = typed[2:].replace("-", "_")
            current = (name, f"--{name}", [value] if has_value else [])
        elif current is not None:
            current[2].append(token)
        else:
            reading.problems.append(f"{token} stands before any flag. Type --NAME before a value.")
    if current is not None:
        yield current


def read_yaml(reading: Reading, path: Path) -> None:
    """Values of a YAML file whose keys are the nested tree, dotted names or flat names."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        reading.problems.append(f"--config cannot be read: {path} ({reason}). Type a YAML file.")
        return
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        reading.problems.append(f"--config is not valid YAML: {path} ({where}). Mend the file.")
        return
    if tree is None:
        return
    if not isinstance(tree, Mapping):
        reading.problems.append(f"--config has no keys at its top: {path}. Write `name: value`.")
        return
    _read_section(reading, tree, "", path.name)


def _read_section(reading: Reading, tree: Mapping[Any, Any], prefix: str, file_name: str) -> None:
    table = flag_table(reading.config_class)
    for key, value in tree.items():
        name = prefix + str(key).replace("-", "_")
        is_section = any(known.startswith(f"{name}.") for known in table)
        if isinstance(value, Mapping) and is_section:
            _read_section(reading, value, f"{name}.", file_name)
            continue
        source = f"{file_name}: {name}"
        words = yaml_words(value)
        if name in table and words is None and table[name][0].meanings is None:
            given = Given(tuple(value) if isinstance(value, list) else value, source)
            reading.values |= {target.option.path: given for target in table[name]}
        else:
            reading.take(name, source, words if words is not None else [str(value)])
