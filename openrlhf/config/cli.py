"""From a command line to a finished config: read, build, check, and say all problems at once.

The tree can be written as YAML and read back with `--config`; secrets are in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import ValidationError

from openrlhf.config.base import Caution, Option, value_at, walk, with_value
from openrlhf.config.common import CommandConfig
from openrlhf.config.flags import Given, read_all
from openrlhf.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=CommandConfig)
LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


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
    """Read a command line (without the program's name); raise ConfigError that lists every problem.

    Those that `more_problems` finds are among them. Where flags are understood and something else
    is wrong with them, those of `data_problems`, which takes seconds, are listed too.
    """
    reading = read_all(config_class, argv)
    config, wrong = build(config_class, reading.values)
    mentioned = {
        f"--{name}" for leaf in walk(config_class) if leaf.path in wrong for name, _ in leaf.names
    }
    contradictions = [
        line for line in config.problems() if not mentioned & {*line.replace(".", " ").split()}
    ]
    problems = [*reading.problems, *wrong.values(), *contradictions, *more_problems(config)]
    if problems and not (reading.problems or wrong):
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
    """Return the tree, with defaults where a value does not fit; leaf path -> problem for those."""
    try:
        return config_class.model_validate(nested(values)), {}
    except ValidationError as error:
        wrong: dict[str, str] = {}
        for detail in error.errors():
            place = ".".join(map(str, detail["loc"]))
            leaf = next(o for o in walk(config_class) if f"{place}.".startswith(f"{o.path}."))
            wrong.setdefault(leaf.path, describe(leaf, values[leaf.path], detail))
        rest = {path: given for path, given in values.items() if path not in wrong}
        return config_class.model_validate(nested(rest)), wrong


def nested(values: Mapping[str, Given]) -> dict[str, Any]:
    """Return `{"ds.zero_stage": 3}` as `{"ds": {"zero_stage": 3}}`."""
    tree: dict[str, Any] = {}
    for path, given in values.items():
        *sections, leaf = path.split(".")
        part = tree
        for section in sections:
            part = part.setdefault(section, {})
        part[leaf] = given.raw
    return tree


def describe(option: Option, given: Given, detail: Mapping[str, Any]) -> str:
    """Return one line for a value that does not fit: what must be, what was seen, what to type."""
    raw, bounds = given.raw, detail.get("ctx", {})
    seen = " ".join(map(str, raw)) if isinstance(raw, tuple) else str(raw)
    if detail["type"] == "value_error":  # of a rule beside the field
        return f"{given.source} cannot be {seen}: {bounds['error']}."
    for key in bounds.keys() & LIMITS.keys():
        bound = f"{LIMITS[key]} {bounds[key]}"
        return f"{given.source} must be {bound}: {seen}. Type a value {bound}."
    if option.choices:
        choices = [str(choice) for choice in option.choices]
        near = next(iter(get_close_matches(seen.lower(), choices, n=1)), "one of them")
        near = (option.info.known_as or {}).get(seen.lower(), near)
        return f"{given.source} must be one of {', '.join(choices)}: {seen}. Type {near}."
    if option.members:
        many = Ellipsis in option.members
        size = bounds.get("min_length", "one") if many else len(option.members)
        size = f"{size} or more values" if many else f"{size} values"
        return f"{given.source} takes {size}: {seen}. Type them with spaces between."
    kind = "a whole number" if option.is_whole else "a number"
    kind = "true or false" if option.is_switch else "a text" if str in option.kinds else kind
    return f"{given.source} must be {kind}: {seen}. Type {kind}."


def take_secrets(config: ConfigT) -> tuple[ConfigT, dict[str, str]]:
    """Return the config without its secrets, and the environment that holds them from now on."""
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
    left_out = {"local_rank", *without}
    values = {
        option.path: Given(_as_yaml(value_at(public, option.path)), "")
        for option in walk(type(config))
        if option.path not in left_out
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(nested(values), sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def _as_yaml(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
