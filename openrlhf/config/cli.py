"""From a command line to a finished config: read, build, check, and say all problems at once.

Environment, `--config` files and flags give values to leaves by their names; each later source
wins. A name of several leaves is read before those of one, and two names of one leaf must agree.
The tree can be written as YAML and read back with `--config`; secrets are in neither.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import yaml
from pydantic import ValidationError

from openrlhf.config.base import Caution, Meanings, Option, is_given, value_at, walk, with_value
from openrlhf.config.common import CommandConfig
from openrlhf.config.local_paths import LISTS
from openrlhf.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=CommandConfig)
# The leaves that a name sets, and how the words after the name are translated for each.
Targets: TypeAlias = tuple[tuple[Option, Meanings | None], ...]
Setting: TypeAlias = tuple[str, str, list[str]]  # name with `_` for `-`, as typed, words after it

SWITCH_WORDS = dict.fromkeys(("true", "1", "yes", "on"), "true")
SWITCH_WORDS |= dict.fromkeys(("false", "0", "no", "off"), "false")
# Settings that the columns of the data decide where nobody types them.
RECOGNISED = (
    *("data.input_key", "data.output_key", "data.prompt_key", "data.label_key"),
    *("data.apply_chat_template", "model.pretrain_mode_enable"),
)
LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


class Given(NamedTuple):
    """A raw value for one leaf, and the name under which the user gave it."""

    raw: Any
    source: str  # "--max_len", "run.yaml: data.max_len" or "OPENRLHF_ASYNC_QUEUE_SIZE"


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


@cache
def flag_table(config_class: type[CommandConfig]) -> Mapping[str, Targets]:
    """Return every name of this config class and what it sets."""
    table: dict[str, Targets] = {}
    for option in walk(config_class):
        for name, meanings in dict(option.names).items():
            table[name] = (*table.get(name, ()), (option, meanings))
    return table


@dataclass
class Reading:
    """Everything read so far, by leaf path."""

    config_class: type[CommandConfig]
    values: dict[str, Given] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def take_all(self, settings: Iterable[Setting]) -> None:
        """Take the settings of one source; of the same name the last one counts."""
        table = flag_table(self.config_class)
        last = {setting[0]: setting for setting in settings}
        said: dict[frozenset[str], tuple[str, dict[str, Any]]] = {}
        for name, source, words in sorted(last.values(), key=lambda s: -len(table.get(s[0], "?"))):
            targets = table.get(name, ())
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
        """Note a name that sets nothing, with the known name that ends in it or is most like it."""
        dead = self.config_class.dead_flags
        if name in dead:
            self.notices.append(f"{source} has no effect; it is accepted for old commands.")
            return
        known = [*flag_table(self.config_class), *dead, "config", "debug", "help"]
        leaves = [path for path in known if path.endswith(f".{name}")]
        near = leaves or get_close_matches(name, known, n=1)
        remedy = f"Did you mean --{near[0]}?" if near else "--help lists all of them."
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
            yield (
                name,
                f"{path.name}: {name}",
                _words(value, flag_table(reading.config_class).get(name, ())),
            )
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
        plain = SWITCH_WORDS.get(word.lower(), word.lower())
        known = dict.fromkeys(key for _, meanings in targets for key in meanings or {})
        if plain not in (*known, "false", "none"):
            off = "false" if "true" in known else "none"
            choices = ", ".join([*(key for key in known if key != "false"), off])
            raise ConfigError(f"{source} is unknown: {word}. Type one of {choices}.")
        for option, meanings in targets:
            if plain in (meanings or {}):
                found[option.path] = (meanings or {})[plain]
    return found


def _is_same(one: object, other: object) -> bool:
    """Return True if two raw values mean the same: `1e-6` and `0.000001`, `True` and `true`."""
    try:
        return float(str(one)) == float(str(other))
    except ValueError:
        return str(one).lower() == str(other).lower()


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


def save_resolved(config: CommandConfig, path: Path) -> None:
    """Write the tree as YAML; `--config` on it gives the same tree again.

    Leaves out secrets, the local rank, which belongs to a process and not to a run, and what the
    columns of the data decide again where nobody typed it.
    """
    public, _ = take_secrets(config)
    left_out = {"local_rank", *(path for path in RECOGNISED if not is_given(config, path))}
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


def settings_of(config: CommandConfig) -> dict[str, Any]:
    """Return what a start from a checkpoint is compared with: dotted path -> value, as JSON has it.

    `at_resume` beside a field says which. Data and seed are compared elsewhere, the ZeRO stage
    where shards are read.
    """
    leaves = (option.path for option in walk(type(config)) if option.info.at_resume)
    return {path: _as_yaml(value_at(config, path)) for path in leaves}


def check_settings(config: CommandConfig, saved: Mapping[str, Any], *, path: object) -> list[str]:
    """Return a line for each setting that goes on as it was in the checkpoint at `path`, whatever
    was typed. Raise ConfigError that lists the changes which cannot be.
    """
    now, refused, kept = settings_of(config), [], []
    for option in walk(type(config)):
        new = now.get(option.path)
        old = saved.get(option.path, new)  # a setting the checkpoint does not know is younger
        is_model = option.path.endswith("model_name_or_path")
        if old == new or (is_model and _is_one_folder(old, new)):
            continue
        flag, typed = option.flag, _typed(old)
        if option.info.at_resume == "refused":
            refused.append(
                f"{flag} {_typed(new)}: {path} was written with {typed}. Type {flag} {typed}, or "
                "leave --load_checkpoint out."
            )
        else:
            kept.append(
                f"{flag} {_typed(new)} has no effect: {typed} goes on with the checkpoint. "
                "Start anew to change it."
            )
    if refused:
        raise ConfigError(list(dict.fromkeys(refused)))  # one flag may be two models' setting
    return list(dict.fromkeys(kept))


def _is_one_folder(old: str | None, new: str | None) -> bool:
    """Return True if two paths lead to the same folder."""
    if old is None or new is None or not Path(new).expanduser().is_dir():
        return False
    return Path(old).expanduser().resolve() == Path(new).expanduser().resolve()


def _typed(value: Any) -> str:
    """Return a value as it stands on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
