"""What a config field is: a typed value with its help text, other names and range in one place.

The path of a field in the tree is its dotted flag (`--ds.zero_stage`). Other names stand beside
the field; a name that stands beside several fields of one tree sets all of them.
Knows nothing of argv or files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from typing_extensions import Self

ModelT = TypeVar("ModelT", bound=BaseModel)

MODELS = ("actor", "critic", "ref", "reward")  # sections whose names begin flat names

# What a value leads to outside of the config; a plural or `data` or `code` may be a comma list.
# `output` and `output_file` are written.
Opens = Literal[
    "model", "models", "data", "code", "template", "file", "json", "folder", "output", "output_file"
]


class Caution(str):
    """A notice of something that is probably not meant, costs data or shows a secret.

    Shown as a warning; any other notice is information and shown plainly.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Alias:
    """Another name of a field; `meanings` translates what is typed after it (`--bf16` -> "bf16").

    A name with a leading dot is a sibling of the field: `.no_nesterov` of `muon.nesterov`.
    `{model}num_nodes` of `actor.num_nodes` is actor_num_nodes.
    """

    name: str
    meanings: Mapping[str, object] | None = None  # typed word -> field value; None: taken as typed


@dataclass(frozen=True)
class OptionInfo:
    """What a field declares beyond its type."""

    aliases: tuple[Alias, ...] = ()
    bare: str | None = None  # value of the flag typed without one; bool fields need none
    env: str | None = None  # environment variable that gives the default, and what `bare` means
    secret_env: str | None = None  # environment variable that a secret is moved to
    opens: Opens | None = None  # which kind of file, folder or hub id the value names
    known_as: Mapping[str, str] | None = None  # wrong word -> the value that is meant by it
    # When a run goes on from a checkpoint that was written with another value: refuse it, or keep
    # the checkpoint's. None: the new value holds from then on.
    at_resume: Literal["refused", "kept"] | None = None


@dataclass(frozen=True)
class Option:
    """One leaf of a config tree."""

    path: str  # dotted
    field: FieldInfo
    info: OptionInfo
    default: Any

    @property
    def flag(self) -> str:
        """The flag an old command would use: the first flat name, else the dotted one."""
        flat = (name for name, meanings in self.other_names if meanings is None)
        return f"--{next(flat, self.path)}"

    @property
    def other_names(self) -> Iterator[tuple[str, Mapping[str, object] | None]]:
        """Yield every name beside the path, and what the words after it mean."""
        head, parent = self.path.partition(".")[0], self.path.rpartition(".")[0]
        model = f"{head}_" if head in MODELS else ""
        for alias in self.info.aliases:
            name = f"{parent}{alias.name}" if alias.name.startswith(".") else alias.name
            yield name.replace("{model}", model).lstrip("."), alias.meanings

    @property
    def is_switch(self) -> bool:
        """Whether the flag may stand without a value, meaning true."""
        return self.field.annotation is bool or bool in get_args(self.field.annotation)


class Base(BaseModel):
    """A frozen part of the config tree; a name it does not have is refused.

    The default of a section holds the defaults that its fields have there:
    `adam: AdamConfig = AdamConfig(lr=1e-5)`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="after")
    def fill_sections(self) -> Self:
        """Put the defaults of every section in where nobody set a value."""
        for name, info in type(self).model_fields.items():
            default = info.default
            if isinstance(default, BaseModel) and default.model_fields_set:
                is_set = name in self.model_fields_set
                section = getattr(self, name) if is_set else type(default)()
                object.__setattr__(self, name, with_defaults(section, default))
        return self


def is_blank(text: str | None) -> bool:
    """Return True if a name is unset or empty."""
    return text is None or not text.strip()


def expand_home(path: str | None) -> str | None:
    """A place to write to, whose `~` no shell may have seen: in a file, in quotes."""
    return path and os.path.expanduser(path)


def option(
    default: object,
    description: str,
    *names: str | Alias,
    **details: object,
) -> Any:
    """Declare a field: default (or its factory), help text, other names.

    `details` are those of `OptionInfo` and ranges (`gt=0` and the like).
    """
    aliases = tuple(Alias(name) if isinstance(name, str) else name for name in names)
    known_details = {part.name for part in fields(OptionInfo)} & set(details)
    about = {name: details.pop(name) for name in known_details}
    start = {"default_factory" if callable(default) else "default": default}
    extra = {"option": OptionInfo(aliases, **about)}  # type: ignore[arg-type]
    known = {**start, **details, "description": description, "json_schema_extra": extra}
    return Field(**known)  # type: ignore[call-overload]


def switch(description: str, *names: str | Alias, default: bool = False, **details: object) -> Any:
    """Declare a field that is true when its flag stands alone."""
    return option(default, description, *names, **details)


def walk(
    config_class: type[BaseModel], prefix: str = "", defaults: BaseModel | None = None
) -> Iterator[Option]:
    """Yield every leaf of the tree, in the order of declaration; a section has its `defaults`."""
    for name, info in config_class.model_fields.items():
        section = info.annotation
        own = info.get_default(call_default_factory=True)
        default = getattr(defaults, name, own)
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from walk(section, f"{prefix}{name}.", default)
        else:
            extra = info.json_schema_extra
            declared = extra.get("option") if isinstance(extra, dict) else None
            assert isinstance(declared, OptionInfo), f"{prefix}{name} is not declared with option()"
            yield Option(prefix + name, info, declared, default)


def value_at(config: BaseModel, path: str) -> Any:
    """The value of the leaf with this dotted path."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def is_given(config: BaseModel, path: str) -> bool:
    """Whether this leaf was set by whoever built the tree, rather than left at its default."""
    head, _, rest = path.partition(".")
    return head in config.model_fields_set and (not rest or is_given(getattr(config, head), rest))


def with_value(config: ModelT, path: str, value: object) -> ModelT:
    """The same tree with another value at this leaf, which must be of the leaf's type."""
    head, _, rest = path.partition(".")
    part = with_value(getattr(config, head), rest, value) if rest else value
    return config.model_copy(update={head: part})


def with_default(config: ModelT, path: str, value: object) -> ModelT:
    """As `with_value`, but the leaf does not count as given by it."""
    head, _, rest = path.partition(".")
    part = with_default(getattr(config, head), rest, value) if rest else value
    changed = config.model_copy(update={head: part})
    if head not in config.model_fields_set:
        changed.model_fields_set.remove(head)
    return changed


def with_defaults(config: ModelT, defaults: BaseModel) -> ModelT:
    """Return a section with these defaults where nobody set a value."""
    for name in defaults.model_fields_set:
        default = getattr(defaults, name)
        if isinstance(default, BaseModel):
            config = with_default(config, name, with_defaults(getattr(config, name), default))
        elif name not in config.model_fields_set:
            config = with_default(config, name, default)
    return config
