"""From a command line to a finished config: read, build, check, and say all problems at once.

The tree can be written as YAML and read back with `--config`; secrets are in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError

from openrlhf.config.base import Caution, Option, value_at, walk, with_value
from openrlhf.config.flags import Given, leaf_types, names_of, read_all
from openrlhf.config.run import CommandConfig
from openrlhf.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=CommandConfig)


@dataclass(frozen=True)
class Parsed(Generic[ConfigT]):
    """A finished config, what to tell the user, and the secrets to put into the environment."""

    config: ConfigT
    notices: tuple[str, ...]
    environment: Mapping[str, str]


def parse_config(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    more_problems: Callable[[CommandConfig], Iterable[str]] = lambda _: (),
    data_problems: Callable[[CommandConfig], Iterable[str]] = lambda _: (),
) -> Parsed[ConfigT]:
    """Read a command line (without the program's name); ConfigError lists every problem.

    Those that `more_problems` finds are among them. Where flags are understood and something else
    is wrong with them, those of `data_problems`, which takes seconds, are listed too.
    """
    reading = read_all(config_class, argv)
    config, wrong = build(config_class, reading.values)
    mentioned = {f"--{name}" for path in wrong for name in names_of(config_class, path)}
    contradictions = [
        line for line in config.problems() if not mentioned & {*line.replace(".", " ").split()}
    ]
    problems = [*reading.problems, *wrong.values(), *contradictions, *more_problems(config)]
    is_understood = not (reading.problems or wrong)
    if problems and is_understood:
        problems += data_problems(config)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    config, environment = take_secrets(config)
    notices = [*reading.notices, *config.notices()]
    notices += [
        Caution(
            f"The secret typed on the command line was moved to {name}; other users of this "
            f"machine can see command lines. Set {name} instead."
        )
        for name in environment
    ]
    return Parsed(config, tuple(notices), environment)


def build(
    config_class: type[ConfigT], values: Mapping[str, Given]
) -> tuple[ConfigT, dict[str, str]]:
    """The tree, with defaults where a value does not fit; leaf path -> problem for those."""
    try:
        return config_class.model_validate(nested(values)), {}
    except ValidationError as error:
        options = {option.path: option for option in walk(config_class)}
        wrong: dict[str, str] = {}
        for detail in error.errors():
            parts = [str(part) for part in detail["loc"]]
            starts = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            path = next(start for start in starts if start in options)
            wrong.setdefault(path, describe(options[path], values[path], detail))
        rest = {path: given for path, given in values.items() if path not in wrong}
        return config_class.model_validate(nested(rest)), wrong


def nested(values: Mapping[str, Given]) -> dict[str, Any]:
    """`{"ds.zero_stage": 3}` as `{"ds": {"zero_stage": 3}}`."""
    tree: dict[str, Any] = {}
    for path, given in values.items():
        *sections, leaf = path.split(".")
        part = tree
        for section in sections:
            part = part.setdefault(section, {})
        part[leaf] = given.raw
    return tree


def describe(option: Option, given: Given, detail: Mapping[str, Any]) -> str:
    """One line for a value that does not fit: what must be, what was seen, what to type."""
    limits = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    bounds = [
        f"{word} {detail['ctx'][key]}"
        for key, word in limits.items()
        if key in detail.get("ctx", {})
    ]
    raw = given.raw
    seen = " ".join(map(str, raw)) if isinstance(raw, (list, tuple)) else raw
    choices = literal_choices(option.field.annotation)
    if detail["type"] == "value_error":  # of a rule beside the field
        return f"{given.source} cannot be {seen}: {detail['ctx']['error']}."
    if bounds:
        must, remedy = f"must be {bounds[0]}", f"Type a value {bounds[0]}"
    elif choices:
        near = next(iter(get_close_matches(str(seen).lower(), choices, n=1)), "one of them")
        near = (option.info.known_as or {}).get(str(seen).lower(), near)
        must, remedy = f"must be one of {', '.join(choices)}", f"Type {near}"
    elif option.is_switch:
        must, remedy = "must be true or false", "Type true or false"
    elif detail["type"] in ("missing", "too_long", "too_short", "tuple_type"):
        must, remedy = f"takes {sequence_size(option)}", "Type them with spaces between"
    else:
        kind = "a whole number" if int in leaf_types(option) else "a number"
        kind = "a text" if str in leaf_types(option) else kind
        must, remedy = f"must be {kind}", f"Type {kind}"
    return f"{given.source} {must}: {seen}. {remedy}."


def literal_choices(annotation: Any) -> list[str]:
    """The words a `Literal` (or an optional one) allows."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in literal_choices(part)]


def sequence_size(option: Option) -> str:
    """`2 values` of a pair, `one or more values` of an open tuple."""
    kinds = (option.field.annotation, *get_args(option.field.annotation))
    members = next(get_args(kind) for kind in kinds if get_origin(kind) is tuple)
    return "one or more values" if Ellipsis in members else f"{len(members)} values"


def take_secrets(config: ConfigT) -> tuple[ConfigT, dict[str, str]]:
    """The config without its secrets, and the environment that holds them from now on."""
    environment = {}
    for option in walk(type(config)):
        value = value_at(config, option.path)
        if option.info.secret_env and value not in (None, option.info.bare):
            environment[option.info.secret_env] = value
            config = with_value(config, option.path, option.info.bare)
    return config, environment


def save_resolved(config: CommandConfig, path: Path, *, without: Iterable[str] = ()) -> None:
    """Write the whole tree as YAML; `--config` on it gives the same tree again.

    Leaves out secrets, the local rank, which belongs to a process and not to a run, and the leaves
    `without`, dotted.
    """
    public, _ = take_secrets(config)
    tree = public.model_dump(mode="python", exclude={"local_rank"})
    for leaf in without:
        *sections, name = leaf.split(".")
        reduce(getitem, sections, tree).pop(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(_with_lists(tree), sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(part) for key, part in value.items()}
    return list(value) if isinstance(value, tuple) else value
