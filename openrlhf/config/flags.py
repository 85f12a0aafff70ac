"""All names of a config class, and the values that environment, YAML files and command line give
them; each later source wins.

A leaf has a dotted path, a flat flag, Hugging Face aliases. Every unknown name and every senseless
value is collected instead of stopping at the first. On a command line a name of several leaves is
read before those of one, and two names of one leaf must agree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from openrlhf.config.base import Option, walk
from openrlhf.config.local_paths import LISTS
from openrlhf.config.run import CommandConfig
from openrlhf.errors import ConfigError

TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off", "none")


@dataclass(frozen=True)
class Target:
    """One leaf that a name sets, and how the words after the name are translated for it."""

    option: Option
    meanings: Mapping[str, object] | None = None


@cache
def flag_table(config_class: type[CommandConfig]) -> Mapping[str, tuple[Target, ...]]:
    """Every name of this config class, with `_` for `-`."""
    table: dict[str, tuple[Target, ...]] = {}
    for option in walk(config_class):
        for name, meanings in [(option.path, None), *option.other_names]:
            if all(target.option.path != option.path for target in table.get(name, ())):
                table[name] = (*table.get(name, ()), Target(option, meanings))
    return table


def names_of(config_class: type[CommandConfig], path: str) -> Iterator[str]:
    """Every name that sets this leaf."""
    for name, targets in flag_table(config_class).items():
        if any(target.option.path == path for target in targets):
            yield name


def nearest_name(name: str, config_class: type[CommandConfig]) -> str | None:
    """The known name that ends in this one, else the one that looks most like it, if any does."""
    known = [*flag_table(config_class), *config_class.dead_flags, "config", "debug", "help"]
    leaves = [path for path in known if path.endswith(f".{name}")]
    return next(iter(leaves or get_close_matches(name, known, n=1)), None)


def raw_values(source: str, words: Sequence[str], targets: Sequence[Target]) -> dict[str, Any]:
    """What these words set: leaf path -> raw value; ConfigError if they make no sense."""
    if targets[0].meanings is not None:
        return dict(_translated(source, words, targets))
    return {target.option.path: _raw_value(source, words, target.option) for target in targets}


def _raw_value(source: str, words: Sequence[str], option: Option) -> Any:
    if not words or (option.info.bare and list(words) == [""]):
        if option.is_switch:
            return True
        if option.info.bare is None:
            raise ConfigError(f"{source} stands without a value. Type a value after it.")
        return option.info.bare
    if is_sequence(option):
        parts = [part for word in words for part in word.split(",") if part]
        return tuple(as_number(part, option) for part in parts)
    if len(words) > 1:
        seen = "***" if option.info.secret_env else " ".join(words)
        raise ConfigError(
            f"{source} takes one value: {seen}. Put quotes around a text with spaces."
        )
    word = words[0]
    if NoneType in leaf_types(option) and (
        word.lower() in ("none", "null") or (option.info.bare and word.lower() == "false")
    ):
        return None
    return as_number(word, option)


def _translated(
    source: str, words: Sequence[str], targets: Sequence[Target]
) -> Iterator[tuple[str, Any]]:
    for word in words or ("true",):
        plain = word.lower()
        plain = "true" if plain in TRUE_WORDS else "false" if plain in ("0", "no", "off") else plain
        meanings = [target.meanings or {} for target in targets]
        if plain not in FALSE_WORDS and not any(plain in meaning for meaning in meanings):
            known = [key for key in dict.fromkeys(k for m in meanings for k in m) if key != "false"]
            choices = ", ".join([*known, "false" if "true" in known else "none"])
            raise ConfigError(f"{source} is unknown: {word}. Type one of {choices}.")
        for target, meaning in zip(targets, meanings, strict=True):
            if plain in meaning:
                yield target.option.path, meaning[plain]


def yaml_words(value: object) -> list[str] | None:
    """A YAML value as words of a command line; None when it must be taken as it is."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return list(value)
    return None


def is_sequence(option: Option) -> bool:
    """Whether the leaf holds several values."""
    annotation = option.field.annotation
    return any(get_origin(kind) is tuple for kind in (annotation, *get_args(annotation)))


def leaf_types(option: Option) -> set[type]:
    """The plain types of this leaf: of `Literal` those of its values, of a tuple its members'."""

    def flatten(annotation: Any) -> Iterator[type]:
        if get_origin(annotation) is Literal:
            yield from (type(value) for value in get_args(annotation))
        elif get_args(annotation):
            for part in get_args(annotation):
                yield from flatten(part)
        elif isinstance(annotation, type):
            yield annotation

    return set(flatten(option.field.annotation))


def as_number(word: str, option: Option) -> str | int:
    """The word, as an int where the leaf holds ints (`1e8` and `3` in a `Literal` included)."""
    if not leaf_types(option) <= {int, NoneType}:
        return word
    try:
        number = float(word)
    except ValueError:
        return word
    return int(number) if number.is_integer() else word


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
