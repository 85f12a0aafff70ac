"""`--help` of a command: every flag with its values, help text, default and other names."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from functools import partial
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

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
    leaves = list(walk(config_class))
    for prefix, section in sections(config_class):
        about = section.__doc__ if prefix else None
        group = parser.add_argument_group(f"{prefix.rstrip('.') or 'general'} options", about)
        for leaf in leaves:
            if leaf.path.rpartition(".")[0] == prefix[:-1]:
                text = f"{leaf.field.description}{_also(leaf)} (default: {_default(leaf)})"
                values = "|".join(map(_kind, leaf.kinds))
                is_switch = leaf.field.annotation is bool
                shown: dict[str, Any] = (
                    {"action": "store_true"} if is_switch else {"metavar": values}
                )
                group.add_argument(f"--{leaf.path}", help=text.replace("%", "%%"), **shown)
    return parser.format_help()


def sections(
    config_class: type[BaseModel], prefix: str = ""
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the tree's top and every section below, each with the prefix of its leaves' paths."""
    yield prefix, config_class
    for name, info in config_class.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from sections(info.annotation, f"{prefix}{name}.")


def _also(leaf: Option) -> str:
    others = [f"--{name}" for name in dict(leaf.names) if name != leaf.path]
    environment = f" Environment: {leaf.info.env}." if leaf.info.env else ""
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
