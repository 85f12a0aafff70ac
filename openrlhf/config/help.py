"""`--help` of a command: every flag with its values, help text, default and other names.

Rendered from the config tree itself; a package for that would take longer to import than all else
that `--help` does.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from openrlhf.config.base import Option, walk
from openrlhf.config.flags import names_of
from openrlhf.config.run import CommandConfig

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
    """The help of a command called `name`, in lines of `width` characters where words allow it."""
    parts = [f"usage: {name} [-h] [OPTIONS]\n", f"{config_class.__doc__}\n", NOTES]
    names = other_names(config_class)
    options = list(walk(config_class))
    for prefix, section in sections(config_class):
        leaves = [option for option in options if option.path.rpartition(".")[0] == prefix[:-1]]
        if leaves:
            about = f"  {section.__doc__}" if prefix else ""
            parts.append(f"{prefix.rstrip('.') or 'general'} options:{about}")
            parts += [entry(leaf, names[leaf.path], max(width, MIN_WIDTH)) for leaf in leaves]
            parts.append("")
    return "\n".join(parts)


def sections(
    config_class: type[BaseModel], prefix: str = ""
) -> Iterator[tuple[str, type[BaseModel]]]:
    """The tree's top and every section below, each with the prefix of its leaves' paths."""
    yield prefix, config_class
    for name, info in config_class.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from sections(info.annotation, f"{prefix}{name}.")


def other_names(config_class: type[CommandConfig]) -> Mapping[str, list[str]]:
    """Leaf path -> its names beside the path."""
    return {
        option.path: [name for name in names_of(config_class, option.path) if name != option.path]
        for option in walk(config_class)
    }


def entry(option: Option, others: list[str], width: int) -> str:
    """One flag: what is typed on the left, what it means on the right or, if that is long, below.

    Example: `  --ds.zero_stage {0,1,2,3}  ZeRO stage. Also --zero_stage. (default: 2)`.
    """
    head = f"  --{option.path} {values_of(option)}".rstrip()
    also = f" Also {' '.join(f'--{name}' for name in others)}." if others else ""
    also += f" Environment: {option.info.env}." if option.info.env else ""
    text = f"{option.field.description}{also} (default: {default_of(option)})"
    lines = textwrap.wrap(text, width - TEXT_COLUMN, break_long_words=False, break_on_hyphens=False)
    indented = [" " * TEXT_COLUMN + line for line in lines]
    if len(head) + 2 > TEXT_COLUMN:
        return "\n".join([head, *indented])
    return "\n".join([f"{head:<{TEXT_COLUMN}}{lines[0]}", *indented[1:]])


def values_of(option: Option) -> str:
    """What may stand after the flag: `INT`, `{a,b}`, `FLOAT FLOAT`, `STR|none`; empty: a switch."""
    return "" if option.field.annotation is bool else kind_of(option.field.annotation)


def kind_of(annotation: Any) -> str:
    """A type in the words of `values_of`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is NoneType:
        return "none"
    if origin is Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if origin in (Union, UnionType):
        return "|".join(map(kind_of, parts))
    if origin is tuple:
        return " ".join("..." if part is Ellipsis else kind_of(part) for part in parts)
    return str(annotation.__name__).upper()


def default_of(option: Option) -> str:
    """The default as it would be typed."""
    default = option.default
    if default is None or isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    shown = str(default).replace("\n", "\\n")
    return shown if shown == shown.strip() and shown else f"'{shown}'"
