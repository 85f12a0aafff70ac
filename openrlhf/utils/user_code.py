"""A user's Python file (reward function, agent, loss): loaded as a module of its own, its functions
held against what they are called with, its numbers as training can hold them, its exceptions in
one line and with its own traceback.
"""

import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb
from types import ModuleType

from openrlhf.errors import ConfigError, OpenRLHFError

FLOAT32_MAX = 3.4028234663852886e38
NEARLY = 0.75  # the likeness of a key that was mistyped: `score`, `extra_log`
MAX_MESSAGE = 500  # characters of what an exception says


@contextmanager
def blaming(
    path: str | Path, error_type: type[OpenRLHFError], *, during: str = ""
) -> Iterator[None]:
    """Run a block of user code: any exception of it becomes one of ours, with its file:line, and
    with what was done `during` it.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        where = user_line(path, error) or str(path)
        blamed = error_type(f"{where}: {in_words(error)}{during}")
        raise blamed.in_user_code(user_traceback(path, error)) from error


def mistyped_key(answer: Mapping[str, object], known: Sequence[str]) -> str:
    """Return a sentence about a key of a dict that is nearly one that is read; empty if there is
    none.
    """
    for key in (str(key) for key in answer if key not in known):
        for meant in get_close_matches(key.lower(), known, 1, NEARLY):
            remedy = (
                f". Write {meant!r}." if meant not in answer else f" beside {meant!r}: drop one."
            )
            return f"the answer has the key {key!r:.120}{remedy}"
    return ""


def split_name(where: str | Path) -> tuple[str, str]:
    """Return `file.py` and `name` of `file.py:name`; the name is empty where none is typed."""
    file, _, name = str(where).rpartition(".py:")
    return (f"{file}.py", name) if file else (str(where), "")


def load_module(path: str | Path) -> ModuleType:
    """Run a .py file under a name made from its path, so that two files of the same name do not
    collide.

    The file's folder is importable for it. Raises ConfigError when the file is missing or does not
    run.
    """
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"{path} is not a Python file that exists. Give the path of a .py file.")
    name = f"openrlhf_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    module = sys.modules[name] = ModuleType(name)  # where pickling and dataclasses look it up
    module.__file__ = str(file)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    with blaming(path, ConfigError):  # from the text: bytecode may be that of an edit before
        exec(compile(file.read_bytes(), file, "exec"), vars(module))
    return module


def import_function(where: str) -> Callable[..., object]:
    """Import the function at `package.module:name` or `file.py:name`; raise ConfigError."""
    module_name, _, name = where.rpartition(":")
    try:
        is_file = module_name.endswith(".py")
        found = None if is_file else importlib.util.find_spec(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{where} cannot be imported: {error}. Type module:name.") from error
    if is_file:
        return member(load_module(module_name), name, module_name)
    if found is None:
        raise ConfigError(f"{where} cannot be imported: no module {module_name}. Type module:name.")
    with blaming(found.origin or module_name, ConfigError):
        module = importlib.import_module(module_name)
    return member(module, name, module_name)


def member(module: ModuleType, name: str, module_name: str) -> Callable[..., object]:
    """Return the function or class of this name; raise ConfigError that lists what there is."""
    found = getattr(module, name, None)
    if not callable(found):
        known = ", ".join(public_names(module)) or "nothing public"
        raise ConfigError(f"{module_name} has no {name}; found: {known}. Define {name} in it.")
    return found


def check_signature(
    function: Callable[..., object], like: Callable[..., object], *, path: str | Path
) -> None:
    """Raise ConfigError, with the line of its definition, unless a function of the file at `path`
    can be called with what `like` takes.
    """
    wanted = inspect.signature(like)
    parameters = [p.replace(annotation=p.empty) for p in wanted.parameters.values()]
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    own, name = inspect.signature(function), getattr(function, "__name__", str(function))
    try:
        own.bind(*by_place, **dict.fromkeys(by_name))
    except TypeError as error:
        raise ConfigError(
            f"{defined_at(path, function)}: {name}{own} cannot be called as it will be: {error}. "
            f"Write {name}{inspect.Signature(parameters)}."
        ) from None


def defined_at(path: str | Path, function: Callable[..., object]) -> str:
    """Return `file:line` of a function's or a class's definition; the file alone of others."""
    file, _ = split_name(path)
    if inspect.isclass(function):
        return f"{file}:{inspect.getsourcelines(function)[1]}"
    code = getattr(inspect.unwrap(function), "__code__", None)
    return file if code is None else f"{file}:{code.co_firstlineno}"


def takes_any(function: Callable[..., object]) -> bool:
    """Return True for a function with **columns or the like."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def accepted(function: Callable[..., object], arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments that a function names; all of them when it takes any."""
    parameters, takes_all = inspect.signature(function).parameters, takes_any(function)
    return {name: value for name, value in arguments.items() if takes_all or name in parameters}


def public_names(module: ModuleType) -> list[str]:
    """Return the classes and functions that a user's file defines itself, in order."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
    ]


def file_of(path: str | Path) -> str:
    """Return the file of a path as tracebacks name it."""
    return str(Path(split_name(path)[0]).expanduser().resolve())


def in_words(error: BaseException) -> str:
    """Describe an exception in one line that is not too long."""
    message = " ".join(str(error).split())
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]} ..."
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def user_line(path: str | Path, error: BaseException) -> str | None:
    """Return `file:line` of the deepest place in the user's file that an error went through."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{error.filename}:{error.lineno}"
    file = file_of(path)
    frames = walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    return f"{split_name(path)[0]}:{lines[-1]}" if lines else None


def user_traceback(path: str | Path, error: BaseException) -> str:
    """Return the traceback of an error from the first line of the user's file on."""
    file, frames = file_of(path), error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != file:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def as_float32(value: float) -> float:
    """Return a number as a float; infinite if float32 cannot hold it, as torch does."""
    if value != value:
        return math.nan
    if abs(value) <= FLOAT32_MAX:
        return float(value)
    return math.inf if value > 0 else -math.inf
