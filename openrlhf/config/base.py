"""Config fields: a typed value with its help text, aliases and range in one place;
and the top of every command's tree.

The path of a field in the tree is its dotted flag (`--ds.zero_stage`). Other names stand beside
the field; a name that stands beside several fields of one tree sets all of them.
Knows nothing of argv or files.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.fields import FieldInfo

ModelT = TypeVar("ModelT", bound=BaseModel)
Meanings = Mapping[str, object]  # typed word -> field value

# A function of the user's, where the name of a built-in one may stand: `file.py:name`.
OwnFunction = Annotated[str, StringConstraints(pattern=r"^[^:]+:\w+$")]
SCHEME = re.compile(r"[a-z]+:")  # of `http://host` and the like, which is no path
DATA_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".csv", ".parquet", ".arrow")
UNNAMED = "./not-named"  # stands in a check for what is not named
MODELS = ("actor", "critic", "ref", "reward")  # sections whose names begin flat names

# What a value leads to outside of the config, and what to type where nothing is there. A plural,
# `data` or `code` may be a comma list; `output` and `output_file` are written.
REMEDIES = {
    "model": "a folder with a config.json, or a hub id such as org/name",
    "models": "a folder with a config.json, or a hub id such as org/name",
    "runs": "the folder of a model or of a run, or a hub id such as org/name",
    "data": f"a file ({', '.join(DATA_SUFFIXES)}), a folder of them, or a hub id",
    "code": "the path of a .py file",
    "template": "the template itself, or the path of a .jinja file",
    "file": "the path of a file",
    "folder": "the path of a folder",
    "output": "the path of a folder that can be written",
    "output_file": "the path of a file that can be written",
}


class Caution(str):
    """A notice of something that is probably not meant, costs data or shows a secret.

    Shown as a warning; any other notice is information and shown plainly.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Option:
    """The declaration of a field beyond its type, and its path in a tree.

    Example: `Option(("{model}learning_rate",), at_resume="kept")`; where `path` is "actor.adam.lr",
    `flag` is "--actor_learning_rate".
    """

    # Other names; without any, a leaf goes by the last part of its path (`--max_norm`), if it is
    # `flat`. `{model}num_nodes` of `actor.num_nodes` is actor_num_nodes.
    other_names: tuple[str, ...] = ()
    flat: bool = True
    # Name -> what the words after it mean (`--bf16` -> "bf16"); they are taken as typed else.
    meanings: Mapping[str, Meanings] = field(default_factory=dict)
    bare: str | None = None  # value of the flag typed without one; bool fields need none
    env: str | None = None  # environment variable that gives the default
    secret_env: str | None = None  # environment variable that a secret is moved to
    opens: str | None = None  # which kind of file, folder or hub id the value names: of REMEDIES
    forms: str | None = None  # what fits its pattern, for who types another text
    needed: str | None = None  # what it is called where it is missing; it has no default
    known_as: Mapping[str, str] = field(default_factory=dict)  # wrong word -> value meant by it
    splits: bool = True  # of a tuple: commas separate values too
    # When a run goes on from a checkpoint that was written with another value: refuse it, or keep
    # the checkpoint's. None: the new value holds from then on.
    at_resume: Literal["refused", "kept"] | None = None
    # Filled in by `walk`.
    path: str = ""  # dotted
    section: type[BaseModel] = BaseModel  # that declares it
    field: FieldInfo = field(default_factory=FieldInfo)
    default: Any = None

    @property
    def flag(self) -> str:
        """Return the flag an old command would use: the first flat name, else the dotted one."""
        names = [name for name, meanings in self.names if meanings is None]
        return f"--{next((name for name in names if '.' not in name), self.path)}"

    @property
    def names(self) -> Iterator[tuple[str, Meanings | None]]:
        """Yield the path and every other name, and what the words after it mean."""
        yield self.path, None
        head = self.path.partition(".")[0]
        model = f"{head}_" if head in MODELS else ""
        own = (self.path.rpartition(".")[2],) if self.flat else ()
        for name in (*(self.other_names or own), *self.meanings):
            yield name.replace("{model}", model), self.meanings.get(name)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Return the types a value may have: the members of a union."""
        annotation = self.field.annotation
        is_union = get_origin(annotation) in (Union, UnionType)
        return get_args(annotation) if is_union else (annotation,)

    @property
    def is_switch(self) -> bool:
        """Return True if the flag may stand without a value, meaning true."""
        return bool in self.kinds

    @property
    def choices(self) -> tuple[Any, ...]:
        """Return the values that a `Literal` allows."""
        return sum((get_args(k) for k in self.kinds if get_origin(k) is Literal), ())

    @property
    def members(self) -> tuple[Any, ...]:
        """Return the types in a tuple, of which the last may be an ellipsis; () of one value."""
        return sum((get_args(kind) for kind in self.kinds if get_origin(kind) is tuple), ())

    @property
    def is_whole(self) -> bool:
        """Return True if a value is a whole number."""
        return int in {*self.kinds, *self.members, *map(type, self.choices)}


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
            if isinstance(default, BaseModel) and name in self.model_fields_set:
                object.__setattr__(self, name, with_defaults(getattr(self, name), default))
        return self


def is_blank(text: str | None) -> bool:
    """Return True if a name is unset or empty."""
    return text is None or not text.strip()


def option(default: object, description: str, *names: str, **details: object) -> Any:
    """Declare a field: default (or its factory), help text, other names.

    `details` are those of `Option` and ranges (`gt=0` and the like).
    """
    about = {part.name: details.pop(part.name) for part in fields(Option) if part.name in details}
    start = {"default_factory" if callable(default) else "default": default}
    extra = {"option": Option(names, **about)}  # type: ignore[arg-type]
    known = {**start, **details, "description": description, "json_schema_extra": extra}
    return Field(**known)  # type: ignore[call-overload]


def switch(description: str, *names: str, default: bool = False, **details: object) -> Any:
    """Declare a field that is true when its flag stands alone."""
    return option(default, description, *names, **details)


def walk(
    config_class: type[BaseModel],
    prefix: str = "",
    defaults: BaseModel | None = None,
    only: Iterable[str] | None = None,
) -> Iterator[Option]:
    """Yield every leaf of the tree, in the order of declaration; a section has its `defaults`.

    A command `shows` some leaves of a section only: the others keep their defaults.
    """
    shows = getattr(config_class, "shows", {})
    for name in config_class.model_fields if only is None else only:
        info = config_class.model_fields[name]
        section = info.annotation
        own = info.get_default(call_default_factory=True)
        default = getattr(defaults, name, own)
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from walk(section, f"{prefix}{name}.", default, shows.get(name))
        else:
            extra = info.json_schema_extra
            declared = extra.get("option") if isinstance(extra, dict) else None
            assert isinstance(declared, Option), f"{prefix}{name} is not declared with option()"
            where = {"path": prefix + name, "section": config_class}
            yield replace(declared, field=info, default=default, **where)


def value_at(config: BaseModel, path: str) -> Any:
    """Return the value of the leaf with this dotted path."""
    return attrgetter(path)(config)


def is_given(config: BaseModel, path: str) -> bool:
    """Return True if whoever built the tree set this leaf, rather than left its default."""
    head, _, rest = path.partition(".")
    return head in config.model_fields_set and (not rest or is_given(getattr(config, head), rest))


def with_value(config: ModelT, path: str, value: object) -> ModelT:
    """Return the same tree with another value at this leaf, which must be of the leaf's type. It
    does not count as given where the old one did not.
    """
    head, _, rest = path.partition(".")
    if rest:
        value = with_value(getattr(config, head), rest, value)
    return config.model_construct(config.model_fields_set, **vars(config) | {head: value})


def with_defaults(config: ModelT, defaults: BaseModel) -> ModelT:
    """Return a section with these defaults where nobody set a value."""
    for name in defaults.model_fields_set:
        default = getattr(defaults, name)
        if isinstance(default, BaseModel):
            config = with_value(config, name, with_defaults(getattr(config, name), default))
        elif name not in config.model_fields_set:
            config = with_value(config, name, default)
    return config


class CommandConfig(Base):
    """Top of every command's tree."""

    # Section -> the leaves of it that the command has; all of those that are not named here.
    shows: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    trains: ClassVar[bool] = False
    operands: ClassVar[str] = ""  # the leaf whose values may stand before all flags
    essentials: ClassVar[tuple[str, ...]] = ()  # the leaves that `--help` shows; none: all
    example: ClassVar[str] = ""  # flags to start with

    use_ms: bool = switch("ModelScope instead of the Hugging Face hub.")
    trust_remote_code: bool = switch("Run Python files that come with a model or tokenizer.")

    def derived(self) -> Iterator[tuple[str, object]]:
        """Yield leaves whose default follows from the rest; each is applied before the next."""
        yield from ()

    @model_validator(mode="after")
    def fill_derived(self) -> Self:
        """Put derived defaults in while the tree is being built; it is complete from then on."""
        for path, value in self.derived():
            section, _, rest = path.partition(".")
            part = with_value(getattr(self, section), rest, value)
            object.__setattr__(self, section, part)
        return self

    def unnamed(self) -> list[Option]:
        """Return the settings that must be named and are not."""
        leaves = (leaf for leaf in walk(type(self)) if leaf.needed)
        return [leaf for leaf in leaves if is_blank(value_at(self, leaf.path))]

    def missing(self) -> Iterator[str]:
        """Yield one line for everything that must be named and is not."""
        for leaf in self.unnamed():
            remedy = " or ".join(leaf.choices) or REMEDIES.get(leaf.opens or "", "a text")
            yield f"No {leaf.needed} is named. Type {leaf.flag} with {remedy}."

    def problems(self) -> Iterator[str]:
        """Yield one line for everything that is missing or contradicts something else."""
        yield from self.missing()

    def notices(self) -> Iterator[str]:
        """Yield one line for everything a user should know before the run starts."""
        if self.trust_remote_code:
            yield Caution("--trust_remote_code: Python files that come with the models are run.")
