"""From a command line to a finished config: read, build, check, and say all problems at once.

Environment, `--config` files and flags give values to leaves by their names; each later source
wins. A name of several leaves is read before those of one, and two names of one leaf must agree.
The tree can be written as YAML and read back with `--config`; secrets are in neither.
"""

import json
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Generic, TypeAlias, TypeVar

import yaml
from pydantic import ValidationError

from openrlhf.config.base import (
    Caution,
    CommandConfig,
    Meanings,
    Option,
    OwnFunction,
    is_given,
    value_at,
    walk,
    with_value,
)
from openrlhf.config.common import TrainingRunConfig
from openrlhf.config.from_trl import HERE
from openrlhf.config.local_paths import LISTS
from openrlhf.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=CommandConfig)
# The leaves that a name sets, and how the words after the name are translated for each.
Targets: TypeAlias = tuple[tuple[Option, Meanings | None], ...]
Setting: TypeAlias = tuple[str, str, list[str]]  # name with `_` for `-`, as typed, words after it

# Flags of old commands that nothing reads, by the last part of their names: every command takes
# them, and says so.
WITHOUT_EFFECT = (
    *("actor_init_on_gpu", "perf", "train_split", "disable_fast_tokenizer"),
    *("dataloader_num_workers", "compute_fp32_loss", "compute_fp32_loss_enable"),
    *("ns_steps", "nesterov", "no_nesterov"),
)
SWITCH_WORDS = dict.fromkeys(("true", "1", "yes", "on"), "true")
SWITCH_WORDS |= dict.fromkeys(("false", "0", "no", "off"), "false")
NO = ("none", "null")
TYPED = "typed"  # in a written config: the settings that are no defaults
# Settings that the columns of the data decide where nobody types them.
RECOGNISED = (
    *("data.input_key", "data.output_key", "data.prompt_key", "data.label_key"),
    *("data.apply_chat_template", "model.pretrain_mode_enable"),
)
DASHES = "-\u2010\u2013\u2014"  # some programs put a hyphen or dash in place of two hyphens
MIN_LIKENESS = 0.8  # of a name that is suggested for an unknown one
MAX_FOREIGN = 10  # unknown names of a file that are named one by one
LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def parse_config(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    settings: Mapping[str, object] | None = None,
    more_problems: Callable[[CommandConfig], Iterable[str]] = lambda _: (),
) -> "Reading[ConfigT]":
    """Read a command line (without the program's name); raise ConfigError that lists every problem.

    `settings` are flags of Python callers: names and values, also of sections. Those problems that
    `more_problems` finds are among the others.
    """
    reading = read_config(config_class, argv, settings=settings, more_problems=more_problems)
    if reading.problems:
        raise ConfigError(reading.problems)
    return reading


def read_config(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    settings: Mapping[str, object] | None = None,
    more_problems: Callable[[CommandConfig], Iterable[str]] = lambda _: (),
) -> "Reading[ConfigT]":
    """Read a command line as `parse_config` does, problems or not."""
    reading = Reading(config_class)
    reading.take_all(argv, settings)
    config = reading.config = reading.build()
    problems = [*reading.problems, *config.problems(), *more_problems(config)]
    reading.problems = list(dict.fromkeys(problems))
    reading.notices += config.notices()
    reading.take_secrets()
    return reading


@cache
def flag_table(config_class: type[CommandConfig]) -> Mapping[str, Targets]:
    """Return every name of this config class and what it sets."""
    table: dict[str, Targets] = {}
    for option in walk(config_class):
        for name, meanings in dict(option.names).items():
            table[name] = (*table.get(name, ()), (option, meanings))
    return table


def nearest(config_class: type[CommandConfig], name: str) -> list[str]:
    """Return the known names that end in `name`, or else the only one that begins with it, or else
    the one that is most like it, if any.
    """
    known = [*flag_table(config_class), *WITHOUT_EFFECT, "config", "debug", "help"]
    leaves = [path for path in known if path.endswith(f".{name}")]
    begun = [path for path in known if path.startswith(name)]
    near = get_close_matches(name, known, n=1, cutoff=MIN_LIKENESS)
    return leaves or (begun if len(begun) == 1 else near)


def instead_of(config_class: type[CommandConfig], name: str) -> str:
    """Return the remedy for an unknown name: TRL's by what this command has for it."""
    here = HERE.get(name, "").replace("`", "")
    flags = re.findall(r"--(\w+)", here)
    known = [f"--{flag}" for flag in flags if flag in flag_table(config_class)]
    if name in flags:  # of other commands
        here = " or ".join(known)
    if here and (known or not flags):
        return f"It is TRL's; here: {here}."
    near = nearest(config_class, name)
    return f"Did you mean --{near[0]}?" if near else "--help all lists all of them."


@dataclass
class Reading(Generic[ConfigT]):
    """Everything read so far: values by leaf path, and under which name the user gave each; at the
    end the config, what to tell the user, and the secrets to put into the environment.

    Example: after `--actor_learning_rate 1e-6`: `values` {"actor.adam.lr": "1e-6"}, `sources`
    {"actor.adam.lr": "--actor_learning_rate"}.
    """

    config_class: type[ConfigT]
    config: ConfigT = field(init=False)
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def take_all(self, argv: Sequence[str], settings: Mapping[str, object] | None = None) -> None:
        """Read the environment, then each `--config` file, then the flags and settings."""
        variables = [(o.path, o.env, os.environ.get(o.env or "")) for o in walk(self.config_class)]
        self._take((path, name, [value]) for path, name, value in variables if name and value)
        flags = [*self._flags(argv), *self._settings(settings or {})]
        for _, _, words in (flag for flag in flags if flag[0] == "config"):
            if len(words) == 1:
                self._take_file(Path(words[0]))
            else:
                self.problems.append("--config takes one YAML file. Type --config FILE.yaml.")
        self._take(flag for flag in flags if flag[0] != "config")

    def _flags(self, argv: Sequence[str]) -> Iterator[Setting]:
        """Yield each flag of a command line with the words after it."""
        words: list[str] | None = None
        if self.config_class.operands and argv and not argv[0].startswith("-"):
            argv = [f"--{self.config_class.operands}", *argv]
        table = flag_table(self.config_class)
        for token in argv:
            dashed = token.partition("=")[0]  # what is behind may be a secret
            bare = dashed.lstrip(DASHES).replace("-", "_")
            if token.startswith("--") and token[2:3].isalpha():
                typed, has_value, value = token.partition("=")
                name, words = typed[2:].replace("-", "_"), [value] if has_value else []
                yield name, f"--{name}", words
            elif token[:1] in DASHES and bare in table:
                self.problems.append(f"{dashed} does not begin with two hyphens. Type --{bare}.")
                words = []  # those behind it are not of the flag before
            elif words is not None:
                words.append(token)
            else:
                self.problems.append(f"{token} stands before any flag. Type --NAME before a value.")

    def _file(self, path: Path) -> Iterator[Setting]:
        """Yield the settings of a YAML file; its keys are the nested tree, dotted names or flat
        names.
        """
        try:
            tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys) or {}
            if not isinstance(tree, dict):
                raise ValueError("it has no keys at its top")
        except (OSError, ValueError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            self.problems.append(
                f"--config cannot be read: {path} ({reason}). Type a YAML file of `name: value`."
            )
            return
        typed = tree.pop(TYPED, None)
        settings = list(self._settings(tree, f"{path.name}: "))
        yield from settings if typed is None else self._without_defaults(settings, typed)

    def _without_defaults(
        self, settings: Sequence[Setting], typed: Container[str]
    ) -> Iterator[Setting]:
        """Yield the settings of a written config that were `typed`, and of the others those that do
        not follow from them any more: what follows is a default again.
        """
        alone = Reading(self.config_class)
        alone._take(setting for setting in settings if setting[0] in typed)
        config = alone.build()
        tree = nested({o.path: value_at(config, o.path) for o in walk(self.config_class)})
        defaults = {name: words for name, _, words in self._settings(tree)}
        for setting in settings:
            if setting[0] in typed or setting[2] != defaults.get(setting[0]):
                yield setting

    def _take_file(self, path: Path) -> None:
        """Take a YAML file; many names that are not this command's are one problem."""
        settings, table = list(self._file(path)), flag_table(self.config_class)
        foreign = [n for n, *_ in settings if n not in table and not _is_without_effect(n)]
        if len(foreign) > MAX_FOREIGN:
            few = ", ".join(foreign[:3])
            self.problems.append(
                f"--config {path} has {len(foreign)} names that this command does not know: {few} "
                "and others. It was written by or for another command. Type the settings that both "
                "share as flags, or put them into a file of their own."
            )
            settings = [setting for setting in settings if setting[0] not in foreign]
        self._take(settings)

    def _settings(self, tree: Mapping[str, object], about: str = "") -> Iterator[Setting]:
        """Yield the settings of a tree of names and values; `about` says whose they are."""
        table = flag_table(self.config_class)
        for name, value in leaves(tree, whole=table):
            if isinstance(value, Mapping):  # a setting in JSON
                value = json.dumps(value)
            words = [str(p) for p in value] if isinstance(value, list | tuple) else [str(value)]
            targets = table.get(name, ())
            has_none = any(NoneType in o.kinds or o.is_switch or o.bare for o, _ in targets)
            if value is None and not has_none:
                words = []
            if any(o.opens in LISTS or o.path.endswith("_probs") for o, _ in targets):
                words = [",".join(words)]
            yield name, about + name, words

    def _take(self, settings: Iterable[Setting]) -> None:
        """Take the settings of one source; of the same name the last one counts."""
        table, last = flag_table(self.config_class), dict[str, Setting]()
        for name, source, words in settings:
            _, _, earlier = last.get(name, (name, source, words))
            if earlier != words and not _is_secret(table.get(name, ())):
                both = f"{' '.join(earlier)} and {' '.join(words)}"
                self.notices.append(Caution(f"{source} is given twice: {both}. The last counts."))
            last[name] = (name, source, words)
        said: dict[frozenset[str], tuple[str, dict[str, Any]]] = {}
        off: list[tuple[str, Option, tuple[object, ...]]] = []
        own: set[str] = set()  # paths that this source sets
        for name, source, words in sorted(last.values(), key=lambda s: -len(table.get(s[0], "?"))):
            targets = table.get(name, ())
            if not targets:
                self._note_unknown(name, source)
                continue
            typed = source if _is_secret(targets) else " ".join([source, *words])
            try:
                if targets[0][1] is not None:
                    found = _translated(source, words, targets)
                else:
                    found = {o.path: _raw_value(source, words, o) for o, _ in targets}
            except ConfigError as error:
                self.problems += error.problems
                self._note_refused(source, words, [option for option, _ in targets])
                continue
            unnamed = [(o, m) for o, m in targets if m is not None and o.path not in found]
            off += [(typed, option, tuple(meanings.values())) for option, meanings in unnamed]
            paths = frozenset(option.path for option, _ in targets)
            first, before = said.setdefault(paths, (typed, found))
            if any(_as_read(raw) != _as_read(before.get(path, raw)) for path, raw in found.items()):
                both = f"{typed} contradicts {first}: both set {', '.join(sorted(paths))}"
                self.problems.append(f"{both}. Leave one of them out.")
            self.values |= found
            self.sources |= dict.fromkeys(found, source)
            own |= found.keys()
        self._switch_off(off, own)

    def _switch_off(
        self, off: Iterable[tuple[str, Option, tuple[object, ...]]], own: Container[str]
    ) -> None:
        """Undo what earlier sources have switched on, where a flag of this one has other words:
        `--bf16 false`, `--report_to none`. `own` are the paths that this source sets.
        """
        for typed, option, meant in off:
            path = option.path
            is_on = path in self.values and (option.bare or self.values[path] in meant)
            if is_on and path not in own:
                del self.values[path]
            elif is_on and _says_off(typed.split()[-1]):
                flag = self.sources[path]
                both = f"{typed} contradicts {flag}: both set {path}"
                self.problems.append(f"{both}. Leave one of them out.")

    def _note_refused(self, source: str, words: Sequence[str], options: Iterable[Option]) -> None:
        """Join the words after a flag that takes one: it is refused already, and must not be said
        to be missing, too.
        """
        for option in options if len(words) > 1 else ():
            if str in option.kinds and not option.secret_env:
                self.values[option.path] = " ".join(words)
                self.sources[option.path] = source

    def _note_unknown(self, name: str, source: str) -> None:
        """Note a name that sets nothing, with the known name that ends in it or is most like it."""
        if _is_without_effect(name):
            self.notices.append(f"{source} has no effect; it is accepted for old commands.")
            return
        remedy = instead_of(self.config_class, name)
        self.problems.append(f"{source} is not a known name. {remedy}")

    def build(self) -> ConfigT:
        """Return the tree, with defaults where a value does not fit, which is noted."""
        try:
            return self.config_class.model_validate(nested(self.values))
        except ValidationError as error:
            wrong: dict[str, str] = {}
            for detail in error.errors():
                path = ".".join(map(str, detail["loc"])) + "."
                leaf = next(o for o in walk(self.config_class) if path.startswith(f"{o.path}."))
                source, raw = self.sources[leaf.path], self.values[leaf.path]
                wrong.setdefault(leaf.path, describe(leaf, source, raw, detail))
            self.problems += wrong.values()
            rest = {path: raw for path, raw in self.values.items() if path not in wrong}
            return self.config_class.model_validate(nested(rest))

    def take_secrets(self) -> None:
        """Move secrets from the config into the environment of the run, and say so."""
        for option in walk(self.config_class):
            name, value = option.secret_env, value_at(self.config, option.path)
            if name and value not in (None, option.bare):
                self.environment[name] = value
                self.config = with_value(self.config, option.path, option.bare)
                said = (
                    f"The secret typed on the command line was moved to {name}; other users of "
                    f"this machine can see command lines. Set {name} instead."
                )
                self.notices.append(Caution(said))


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice, of which only the last would count."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for key, _ in reversed(node.value):
            if names.count(key.value) > 1:
                raise yaml.YAMLError(f"{key.value} stands twice{key.start_mark}")
        return super().construct_mapping(node, deep)


def _is_secret(targets: Targets) -> bool:
    """Return True if the words after a flag may be a secret."""
    return any(option.secret_env and meanings is None for option, meanings in targets)


def _is_without_effect(name: str) -> bool:
    return name.rpartition(".")[2] in WITHOUT_EFFECT


def leaves(
    tree: Mapping[Any, Any], prefix: str = "", *, whole: Container[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every key that is no section; names in `whole` are
    none.
    """
    for key, value in tree.items():
        name = prefix + str(key).replace("-", "_")
        if isinstance(value, Mapping) and name not in whole:
            yield from leaves(value, f"{name}.", whole=whole)
        else:
            yield name, value


def _raw_value(source: str, words: Sequence[str], option: Option) -> Any:
    bare = "true" if option.is_switch else option.bare
    if not words or (option.bare and list(words) == [""]):
        if bare is None:
            value = f": {option.forms}" if option.forms else "."
            raise ConfigError(f"{source} stands without a value. Type a value after it{value}")
        return bare
    word, plain = words[0], words[0].lower()
    nothing = (*NO, "false") if str in option.kinds else NO
    if NoneType in option.kinds and not option.bare and len(words) == 1 and plain in nothing:
        return None
    if option.members:
        parts = [word.split(",") if option.splits else [word] for word in words]
        return tuple(part for word in parts for part in word if part)
    if option.opens == "runs":
        return ",".join(map(os.path.expanduser, words))
    if len(words) > 1:
        seen = "***" if option.secret_env else " ".join(words)
        remedy = "Put quotes around a text with spaces"
        if option.opens in LISTS:
            remedy = "Type commas between several, and quotes around a text with spaces"
        raise ConfigError(f"{source} takes one value: {seen}. {remedy}.")
    if option.bare and (switched := SWITCH_WORDS.get(plain, "false" if plain in NO else "")):
        off = None if NoneType in option.kinds else "none"
        return bare if switched == "true" else off
    is_number = re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e\+?\d+)?", plain)
    if option.is_whole and is_number and float(word).is_integer():
        return int(float(word))  # `1e8`, and `3` of a `Literal`
    if option.opens:  # no shell has seen the `~` in a file, in quotes or behind a comma
        return ",".join(map(os.path.expanduser, word.split(",")))
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


def _says_off(word: str) -> bool:
    return SWITCH_WORDS.get(word.lower(), word.lower()) in ("false", "none")


def _as_read(raw: object) -> object:
    """Return a value in the form in which two names of a setting are compared: 1e-6 is 0.000001."""
    try:
        return float(str(raw))
    except ValueError:
        return str(raw)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"ds.zero_stage": 3}` as `{"ds": {"zero_stage": 3}}`."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, leaf = path.split(".")
        part = tree
        for section in sections:
            part = part.setdefault(section, {})
        part[leaf] = value
    return tree


def describe(option: Option, source: str, raw: object, detail: Mapping[str, Any]) -> str:
    """Return one line for a value that does not fit: what must be, what was seen, what to type."""
    bounds = detail.get("ctx", {})
    seen = " ".join(map(str, raw)) if isinstance(raw, tuple) else str(raw)
    if option.forms:
        return f"{source} cannot be {seen}: it is not known. Type {option.forms}."
    for key in bounds.keys() & LIMITS.keys():
        bound = f"{LIMITS[key]} {bounds[key]}"
        return f"{source} must be {bound}: {seen}. Type a value {bound}."
    if option.choices:
        choices = [str(choice) for choice in option.choices]
        near = next(iter(get_close_matches(seen.lower(), choices, n=1)), "one of them")
        near = option.known_as.get(seen.lower(), near)
        own = ", or file.py:name of your own" if OwnFunction in option.kinds else ""
        return f"{source} must be one of {', '.join(choices)}: {seen}. Type {near}{own}."
    if option.members:
        many = Ellipsis in option.members
        size = bounds.get("min_length", "one") if many else len(option.members)
        size = f"{size} or more values" if many else f"{size} values"
        return f"{source} takes {size}: {seen}. Type them with spaces between."
    kind = "a whole number" if option.is_whole else "a number"
    kind = "true or false" if option.is_switch else "a text" if str in option.kinds else kind
    return f"{source} must be {kind}: {seen}. Type {kind}."


def save_resolved(config: CommandConfig, path: Path) -> None:
    """Write the tree as YAML, and which settings were typed; `--config` on it gives the same tree
    again.

    A parsed config has no secrets. Leaves out the local rank, which belongs to a process and not
    to a run, and what the columns of the data decide again where nobody typed it.
    """
    left_out = {"local_rank", *(path for path in RECOGNISED if not is_given(config, path))}
    paths = (option.path for option in walk(type(config)) if option.path not in left_out)
    values = {path: value_at(config, path) for path in paths}
    values[TYPED] = [path for path in values if is_given(config, path)]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(nested(values), sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def read_resolved(path: Path) -> dict[str, Any]:
    """Return the settings that `save_resolved` wrote, by dotted path."""
    found = dict(leaves(yaml.safe_load(path.read_text(encoding="utf-8"))))
    return {name: value for name, value in found.items() if name != TYPED}


def settings_of(config: CommandConfig) -> dict[str, Any]:
    """Return the settings that a resumed run is compared by: dotted path -> value, as JSON has it.

    `at_resume` beside a field says which. Data and seed are compared elsewhere, the ZeRO stage
    where shards are read.
    """
    found = {o.path: value_at(config, o.path) for o in walk(type(config)) if o.at_resume}
    return {path: list(v) if isinstance(v, tuple) else v for path, v in found.items()}


def check_settings(
    config: CommandConfig, saved: Mapping[str, Any], *, path: object
) -> dict[str, str]:
    """Return a line for each setting, by its dotted path, that goes on as it was in the checkpoint
    at `path`, whatever was typed. Raise ConfigError that lists the changes which cannot be.
    """
    now, refused, kept = settings_of(config), [], {}
    for option in walk(type(config)):
        new = now.get(option.path)
        old = saved.get(option.path, new)  # a setting the checkpoint does not know is younger
        if old == new or (option.opens and _resolved(old) == _resolved(new)):
            continue
        flag, typed = option.flag, typed_value(old)
        is_reset = isinstance(config, TrainingRunConfig) and config.ckpt.reset_lr
        if option.at_resume == "kept" and is_reset:
            continue
        if option.at_resume == "refused":
            refused.append(
                f"{flag} {typed_value(new)}: {path} was written with {typed}. Type {flag} {typed}, "
                "or leave --load_checkpoint out."
            )
        else:
            kept[option.path] = (
                f"{flag} {typed_value(new)} has no effect: {typed} goes on with the checkpoint. "
                "Add --reset_lr to change it."
            )
    if refused:
        raise ConfigError(list(dict.fromkeys(refused)))  # one flag may be two models' setting
    return kept


def _resolved(name: object) -> Path:
    """Return the path that a model or a file is at, if it is on this machine."""
    return Path(str(name)).expanduser().resolve()


def typed_value(value: Any) -> str:
    """Return a value as it stands on a command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if text and text == text.strip() else repr(text)
