"""Where values come from: environment, YAML file, command line; each later one wins.

Collects every unknown name and every senseless value instead of stopping at the first. On a command
line a name of several leaves is read before those of one, and two names of one leaf must agree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from openrlhf.config.base import walk
from openrlhf.config.flags import flag_table, is_sequence, nearest_name, raw_values, yaml_words
from openrlhf.config.local_paths import LISTS
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
    table = flag_table(config_class)
    settings = [flag for flag in flags if flag[0] != "config"]
    for name, source, words in sorted(settings, key=lambda flag: -len(table.get(flag[0], "?"))):
        reading.take(name, source, words)
    reading.problems += contradictions(config_class, settings)
    read_environment(reading, is_after=True)
    return reading


def contradictions(
    config_class: type[CommandConfig], flags: Sequence[tuple[str, str, list[str]]]
) -> Iterator[str]:
    """Two names of the same leaves with different values; of the same name the last one counts."""
    said: dict[frozenset[str], tuple[str, dict[str, Any]]] = {}
    for name, source, words in {flag[0]: flag for flag in flags}.values():
        targets = flag_table(config_class).get(name, ())
        try:
            found = raw_values(source, words, targets) if targets else {}
        except ConfigError:  # said already
            continue
        paths = frozenset(target.option.path for target in targets)
        is_secret = any(target.option.info.secret_env for target in targets)
        typed = source if is_secret else " ".join([source, *words])
        first, before = said.setdefault(paths, (typed, found))
        if any(not _is_same(raw, before.get(path, raw)) for path, raw in found.items()):
            both = f"{typed} contradicts {first}: both set {', '.join(sorted(paths))}"
            yield f"{both}. Leave one of them out."


def _is_same(one: object, other: object) -> bool:
    """Whether two raw values mean the same: `1e-6` and `0.000001`, `True` and `true`."""
    if str(one).lower() == str(other).lower():
        return True
    try:
        return float(str(one)) == float(str(other))
    except ValueError:
        return False


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
    is_lost = False  # what follows a flag that is written wrong is not looked at
    for token in argv:
        if meant := _one_dash_name(token, reading.config_class):
            name = token.partition("=")[0]  # what follows may be a secret
            reading.problems.append(f"{name} has one dash. Type --{meant}.")
            is_lost = True
        elif token.startswith("--") and token[2:3].isalpha():
            if current is not None:
                yield current
            typed, has_value, value = token.partition("=")
            name = typed[2:].replace("-", "_")
            current, is_lost = (name, f"--{name}", [value] if has_value else []), False
        elif is_lost:
            continue
        elif current is not None:
            current[2].append(token)
        else:
            reading.problems.append(f"{token} stands before any flag. Type --NAME before a value.")
    if current is not None:
        yield current


def _one_dash_name(token: str, config_class: type[CommandConfig]) -> str | None:
    """The known name that is meant by `-name`; None for numbers and other values."""
    is_word = re.fullmatch(r"-[A-Za-z][\w.-]*(=.*)?", token)
    if not is_word or token.lower() in ("-inf", "-infinity", "-nan"):
        return None
    name = token[1:].partition("=")[0].replace("-", "_")
    return name if name in flag_table(config_class) else nearest_name(name, config_class)


def read_yaml(reading: Reading, path: Path) -> None:
    """Values of a YAML file whose keys are the nested tree, dotted names or flat names."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
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
    table = flag_table(reading.config_class)
    said: dict[frozenset[str], str] = {}  # the key that set these leaves
    for name, value in _settings_in(tree, table):
        source, targets = f"{path.name}: {name}", table.get(name, ())
        paths = frozenset(target.option.path for target in targets)
        if paths and paths in said:
            first = said[paths]
            both = f"and {first} set the same" if first != name else "stands twice"
            reading.problems.append(f"{source} {both}. Leave one out.")
        said[paths] = name
        if not targets or targets[0].meanings is not None:
            words = yaml_words(value)
            reading.take(name, source, words if words is not None else [str(value)])
        else:
            _read_value(reading, name, source, value)


def _settings_in(
    tree: Mapping[Any, Any], known: Iterable[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every key that is no section."""
    for key, value in tree.items():
        name = prefix + str(key).replace("-", "_")
        is_section = any(path.startswith(f"{name}.") for path in known)
        if isinstance(value, Mapping) and is_section:
            yield from _settings_in(value, known, f"{name}.")
        else:
            yield name, value


def _read_value(reading: Reading, name: str, source: str, value: object) -> None:
    """Take what stands after a known key: as words where it is text, else as it is."""
    options = [target.option for target in flag_table(reading.config_class)[name]]
    option = options[0]
    if isinstance(value, list) and not is_sequence(option):
        if option.info.opens not in LISTS and not option.path.endswith("_probs"):
            seen = "***" if option.info.secret_env else ", ".join(map(str, value))
            reading.problems.append(f"{source} takes one value: {seen}. Write one.")
            return
        value = ",".join(map(str, value))
    if isinstance(value, bool) and option.info.bare:
        value = option.info.bare if value else None
    words = yaml_words(value)
    if words is not None:
        reading.take(name, source, words)
    else:
        raw = tuple(value) if isinstance(value, list) else value
        reading.values |= {option.path: Given(raw, source) for option in options}
