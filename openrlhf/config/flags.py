"""All names of a config class, and the values that environment, YAML files and command line give
them; each later source wins.

A leaf has a dotted path, a flat flag, Hugging Face aliases. Every unknown name and every senseless
value is collected instead of stopping at the first. A name of several leaves is read before those
of one, and two names of one leaf must agree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import yaml

from openrlhf.config.base import Meanings, Option, walk
from openrlhf.config.common import CommandConfig
from openrlhf.config.local_paths import LISTS
from openrlhf.errors import ConfigError

TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")

# The leaves that a name sets, and how the words after the name are translated for each.
Targets: TypeAlias = tuple[tuple[Option, Meanings | None], ...]
Setting: TypeAlias = tuple[str, str, list[str]]  # name with `_` for `-`, as typed, words after it


@cache
def flag_table(config_class: type[CommandConfig]) -> Mapping[str, Targets]:
    """Return every name of this config class and what it sets."""
    table: dict[str, Targets] = {}
    for option in walk(config_class):
        for name, meanings in dict(option.names).items():
            table[name] = (*table.get(name, ()), (option, meanings))
    return table


def nearest_name(name: str, config_class: type[CommandConfig]) -> str | None:
    """Return the known name that ends in this one, else the one most like it, if any is."""
    known = [*flag_table(config_class), *config_class.dead_flags, "config", "debug", "help"]
    leaves = [path for path in known if path.endswith(f".{name}")]
    return next(iter(leaves or get_close_matches(name, known, n=1)), None)


def raw_values(source: str, words: Sequence[str], targets: Targets) -> dict[str, Any]:
    """Return what these words set, by leaf path; raise ConfigError if they make no sense."""
    if targets[0][1] is not None:
        return _translated(source, words, targets)
    return {option.path: _raw_value(source, words, option) for option, _ in targets}


def _raw_value(source: str, words: Sequence[str], option: Option) -> Any:
    bare = True if option.is_switch else option.info.bare
    if not words or (option.info.bare and list(words) == [""]):
        if bare is None:
            raise ConfigError(f"{source} stands without a value. Type a value after it.")
        return bare
    if NoneType in option.kinds and [word.lower() for word in words] in (["none"], ["null"]):
        return None
    if option.members:
        return tuple(part for word in words for part in word.split(",") if part)
    if len(words) > 1:
        seen = "***" if option.info.secret_env else " ".join(words)
        raise ConfigError(
            f"{source} takes one value: {seen}. Put quotes around a text with spaces."
        )
    word, plain = words[0], words[0].lower()
    if option.info.bare and plain in ("true", "false"):
        return bare if plain == "true" else None
    if option.is_whole and re.fullmatch(r"-?[\d.]+(e\+?\d+)?", plain) and float(word).is_integer():
        return int(float(word))  # `1e8`, and `3` of a `Literal`
    return word


def _translated(source: str, words: Sequence[str], targets: Targets) -> dict[str, Any]:
    found = {}
    for word in words or ("true",):
        plain = word.lower()
        plain = "true" if plain in TRUE_WORDS else "false" if plain in FALSE_WORDS else plain
        known = dict.fromkeys(key for _, meanings in targets for key in meanings or {})
        if plain not in (*known, "false", "none"):
            off = "false" if "true" in known else "none"
            choices = ", ".join([*(key for key in known if key != "false"), off])
            raise ConfigError(f"{source} is unknown: {word}. Type one of {choices}.")
        for option, meanings in targets:
            if plain in (meanings or {}):
                found[option.path] = (meanings or {})[plain]
    return found


class Given(NamedTuple):
    """A raw value for one leaf, and the name under which the user gave it."""

    raw: Any
    source: str  # "--max_len", "run.yaml: data.max_len" or "OPENRLHF_ASYNC_QUEUE_SIZE"


class Reading:
    """Everything read so far, by leaf path."""

    def __init__(self, config_class: type[CommandConfig]) -> None:
        self.config_class = config_class
        self.table = flag_table(config_class)
        self.values: dict[str, Given] = {}
        self.problems: list[str] = []
        self.notices: list[str] = []

    def take_all(self, settings: Iterable[Setting]) -> None:
        """Take the settings of one source; of the same name the last one counts."""
        last = {name: (name, source, words) for name, source, words in settings}
        said: dict[frozenset[str], tuple[str, dict[str, Any]]] = {}
        for name, source, words in sorted(
            last.values(), key=lambda setting: -len(self.table.get(setting[0], "?"))
        ):
            targets = self.table.get(name, ())
            if not targets:
                self._note_unknown(name, source)
                continue
            try:
                found = raw_values(source, words, targets)
            except ConfigError as error:
                self.problems += error.problems
                continue
            is_secret = any(option.info.secret_env for option, _ in targets)
            typed = source if is_secret else " ".join([source, *words])
            paths = frozenset(option.path for option, _ in targets)
            first, before = said.setdefault(paths, (typed, found))
            if any(not _is_same(raw, before.get(path, raw)) for path, raw in found.items()):
                both = f"{typed} contradicts {first}: both set {', '.join(sorted(paths))}"
                self.problems.append(f"{both}. Leave one of them out.")
            self.values |= {path: Given(raw, source) for path, raw in found.items()}

    def _note_unknown(self, name: str, source: str) -> None:
        if name in self.config_class.dead_flags:
            self.notices.append(f"{source} has no effect; it is accepted for old commands.")
            return
        near = nearest_name(name, self.config_class)
        remedy = f"Did you mean --{near}?" if near else "--help lists all of them."
        self.problems.append(f"{source} is not a known name. {remedy}")


def read_all(config_class: type[CommandConfig], argv: Sequence[str]) -> Reading:
    """Read the environment, then each `--config` file, then the flags."""
    reading = Reading(config_class)
    environment = {
        option.path: Given(os.environ[option.info.env], option.info.env)
        for option in walk(config_class)
        if option.info.env and os.environ.get(option.info.env)
    }
    reading.values |= environment
    flags = list(split_flags(argv, reading))
    for _, _, words in (flag for flag in flags if flag[0] == "config"):
        if len(words) == 1:
            reading.take_all(file_settings(Path(words[0]), reading))
        else:
            reading.problems.append("--config takes one YAML file. Type --config FILE.yaml.")
    reading.take_all(flag for flag in flags if flag[0] != "config")
    for option in walk(config_class):  # a flag typed bare means what the environment says
        if option.path in environment and reading.values[option.path].raw == option.info.bare:
            reading.values[option.path] = environment[option.path]
    return reading


def _is_same(one: object, other: object) -> bool:
    """Return True if two raw values mean the same: `1e-6` and `0.000001`, `True` and `true`."""
    try:
        return float(str(one)) == float(str(other))
    except ValueError:
        return str(one).lower() == str(other).lower()


def split_flags(argv: Sequence[str], reading: Reading) -> Iterator[Setting]:
    """Yield each flag of a command line with the words after it."""
    current: Setting | None = None
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


def file_settings(path: Path, reading: Reading) -> Iterator[Setting]:
    """Yield what a YAML file sets; its keys are the nested tree, dotted names or flat names."""
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
    if isinstance(tree, Mapping):
        for name, value in _leaves(tree):
            yield name, f"{path.name}: {name}", _words(value, reading.table.get(name, ()))
    elif tree is not None:
        reading.problems.append(f"--config has no keys at its top: {path}. Write `name: value`.")


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every key that is no section."""
    for key, value in tree.items():
        name = prefix + str(key).replace("-", "_")
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _words(value: object, targets: Targets) -> list[str]:
    """Return a YAML value as words of a command line; a list is joined where commas may stand."""
    words = [str(part) for part in value] if isinstance(value, list) else [str(value)]
    is_list = any(o.info.opens in LISTS or o.path.endswith("_probs") for o, _ in targets)
    return [",".join(words)] if is_list else words
