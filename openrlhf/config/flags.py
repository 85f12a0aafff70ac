"""All names of a config class: dotted path, flat flag, Hugging Face alias, and what each sets.

Also turns what stands after a name (words of a command line, values of YAML) into raw values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from openrlhf.config.base import Option, walk
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
        parent = option.path.rpartition(".")[0]
        names: list[tuple[str, Mapping[str, object] | None]] = [(option.path, None)]
        for alias in option.info.aliases:
            is_sibling = alias.name.startswith(".")
            full = f"{parent}{alias.name}".lstrip(".") if is_sibling else alias.name
            names.append((full, alias.meanings))
        for name, meanings in names:
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
