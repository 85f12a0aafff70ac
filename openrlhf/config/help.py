"""`--help` of a command: every flag with its values, help text, default and other names."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from functools import partial
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from openrlhf.config.base import Option, walk
from openrlhf.config.common import CommandConfig

NOTES = """\
Every flag has a dotted name and, after "Also", the names of older commands and of Hugging Face.
`-` and `_` are the same. A switch may stand alone or before true or false.

--config FILE.yaml  defaults from a file: the nested tree, dotted names or flat names; flags win
--debug             a traceback with every error
--version           the version of openrlhf
-h, --help          this text
"""
TEXT_COLUMN = 28  # where help texts begin
MIN_WIDTH = 60


def help_text(config_class: type[CommandConfig], name: str, *, width: int = 80) -> str:
    """Return the help of a command called `name`, in lines of `width` characters."""
    parser = ArgumentParser(
        usage=f"{name} [-h] [OPTIONS]",
        description=f"{config_class.__doc__}\n\n{NOTES}",
        add_help=False,
        formatter_class=partial(
            RawDescriptionHelpFormatter,
            width=max(width, MIN_WIDTH),
            max_help_position=TEXT_COLUMN,
        ),
    )
    groups: dict[str, Any] = {}
    for leaf in walk(config_class):
        section = leaf.path.rpartition(".")[0]
        if section not in groups:
            about = leaf.section.__doc__ if section else None
            groups[section] = parser.add_argument_group(f"{section or 'general'} options", about)
        text = f"{leaf.field.description}{_also(leaf)} (default: {_default(leaf)})"
        is_switch = leaf.field.annotation is bool
        values = "|".join(map(_kind, leaf.kinds))
        shown: dict[str, Any] = {"action": "store_true"} if is_switch else {"metavar": values}
        groups[section].add_argument(f"--{leaf.path}", help=text.replace("%", "%%"), **shown)
    return parser.format_help()


def _also(leaf: Option) -> str:
    others = [f"--{name}" for name in dict(leaf.names) if name != leaf.path]
    environment = f" Environment: {leaf.env}." if leaf.env else ""
    return (f" Also {' '.join(others)}." if others else "") + environment


def _kind(annotation: Any) -> str:
    """Return what may stand after a flag: `INT`, `{a,b}`, `FLOAT FLOAT`, `none`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is NoneType:
        return "none"
    if origin is Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if origin is tuple:
        return " ".join("..." if part is Ellipsis else _kind(part) for part in parts)
    return str(annotation.__name__).upper()


def _default(leaf: Option) -> str:
    """Return the default as it would be typed."""
    default = leaf.default
    if default is None or isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    shown = str(default).replace("\n", "\\n")
    return shown if shown == shown.strip() and shown else f"'{shown}'"
