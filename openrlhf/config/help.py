"""The text of `--help`: where to start and the settings that matter; all of them; or those that
words are about.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from functools import partial
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from openrlhf.config.base import CommandConfig, Option, OwnFunction, walk
from openrlhf.config.cli import nearest, typed_value
from openrlhf.errors import ConfigError

ALL = "all"  # the word for every setting
NOTES = """\
Every flag has a dotted name and, after "Also", the names of older commands and of Hugging Face.
`-` and `_` are the same. A switch may stand alone or before true or false.

--config FILE.yaml  defaults from a file: the nested tree, dotted names or flat names; flags win
--debug             a traceback with every error
--version           the version of openrlhf
-h, --help          the settings that matter; --help all: this text; --help WORD: those about it
"""
TEXT_COLUMN = 28  # where help texts begin
MIN_WIDTH = 60


def help_text(
    config_class: type[CommandConfig], name: str, words: Sequence[str] = (), *, width: int = 80
) -> str:
    """Return the help of a command called `name`, in lines of `width` characters: what matters
    without `words`, every setting for the word `all`, else the settings that hold all words.

    Raise ConfigError where there are none.
    """
    leaves = list(walk(config_class))
    if not words and config_class.essentials:
        return _short_text(config_class, name, leaves, width=width)
    parser = _parser(config_class, name, f"{config_class.__doc__}\n\n{NOTES}", width=width)
    if words and [*words] != [ALL]:
        leaves = [leaf for leaf in leaves if _is_about(leaf, words)]
        parser.description = f"Settings of {name} about {' '.join(words)}:"
        if not leaves:
            raise ConfigError(f"{name} has no setting about {_asked(config_class, words)}")
    _add_groups(parser, leaves)
    return parser.format_help()


def _short_text(
    config_class: type[CommandConfig], name: str, leaves: Sequence[Option], *, width: int
) -> str:
    by_path, check = {leaf.path: leaf for leaf in leaves}, "openrlhf check " + name.split()[-1]
    start = config_class.example.replace(" --", " \\\n      --")
    about = f"{config_class.__doc__}\n\nStart here:\n  {name} {start}\n  {check} ...\n      "
    about += "with the same words: what would run, and all that is wrong with it"
    parser = _parser(config_class, name, about, width=width)
    group = parser.add_argument_group(f"the {len(config_class.essentials)} settings that matter")
    for path in config_class.essentials:
        leaf = by_path[path]
        kinds = [kind for kind in leaf.kinds if kind is not NoneType]
        _add(
            group,
            leaf,
            leaf.flag,
            "" if leaf.default in (None, False) else _default_text(leaf),
            kinds,
        )
    parser.epilog = (
        f"{name} --help all: all {len(leaves)} settings, with their dotted names.\n"
        f"{name} --help WORD: those with the word in their name or text, such as model."
    )
    return parser.format_help()


def _parser(
    config_class: type[CommandConfig], name: str, description: str, *, width: int
) -> ArgumentParser:
    operands = f" {config_class.operands.upper()}" if config_class.operands else ""
    return ArgumentParser(
        usage=f"{name}{operands} [-h [all|WORD]] [OPTIONS]",
        description=description,
        add_help=False,
        formatter_class=partial(
            RawDescriptionHelpFormatter, width=max(width, MIN_WIDTH), max_help_position=TEXT_COLUMN
        ),
    )


def _add_groups(parser: ArgumentParser, leaves: Iterable[Option]) -> None:
    groups: dict[str, Any] = {}
    for leaf in leaves:
        section = leaf.path.rpartition(".")[0]
        if section not in groups:
            about = leaf.section.__doc__ if section else None
            groups[section] = parser.add_argument_group(f"{section or 'general'} options", about)
        others = " ".join(f"--{name}" for name in dict(leaf.names) if name != leaf.path)
        also = f" Also {others}." if others else ""
        environment = f" Environment: {leaf.env}." if leaf.env else ""
        more = f"{also}{environment}{_default_text(leaf)}"
        _add(groups[section], leaf, f"--{leaf.path}", more, leaf.kinds)


def _add(group: Any, leaf: Option, flag: str, more: str, kinds: Iterable[Any]) -> None:
    is_switch = leaf.field.annotation is bool
    values = "|".join(map(_kind, kinds))
    shown: dict[str, Any] = {"action": "store_true"} if is_switch else {"metavar": values}
    text = f"{leaf.field.description}{more}"
    group.add_argument(flag, help=text.replace("%", "%%"), **shown)


def _default_text(leaf: Option) -> str:
    return f" (default: {typed_value(leaf.default)})"


def _is_about(leaf: Option, words: Sequence[str]) -> bool:
    text = f"{' '.join(dict(leaf.names))} {leaf.field.description}".lower().replace("-", "_")
    return all(word.lower().lstrip("-").replace("-", "_") in text for word in words)


def _asked(config_class: type[CommandConfig], words: Sequence[str]) -> str:
    """Return the words that nothing is about, and what to type instead."""
    near = nearest(config_class, words[0].lstrip("-"))
    meant = f"Did you mean --help {near[0]}? " if near else ""
    return f"{' '.join(words)}. {meant}--help all lists all of them."


def _kind(annotation: Any) -> str:
    """Return the form of a flag's value: `INT`, `{a,b}`, `FLOAT FLOAT`, `none`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is NoneType:
        return "none"
    if annotation == OwnFunction:
        return "FILE.py:NAME"
    if origin is Annotated:
        return _kind(parts[0])
    if origin is Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if origin is tuple:
        return " ".join("..." if part is Ellipsis else _kind(part) for part in parts)
    return str(annotation.__name__).upper()
