"""Settings that are not as they were when a checkpoint was written: refused, or said.

`at_resume` beside a field says which. Data and seed are compared elsewhere, the ZeRO stage where
shards are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from openrlhf.config.base import Option, value_at, walk
from openrlhf.config.flags import plain_flag
from openrlhf.config.run import CommandConfig
from openrlhf.errors import ConfigError

Settings = Mapping[str, Any]  # dotted path -> value, as JSON has it

FREE_SECTIONS = ("ckpt.", "eval.", "logger.")  # no weights depend on them


def settings_of(config: CommandConfig) -> dict[str, Any]:
    """What a later start is compared with."""
    return {
        option.path: _as_json(value_at(config, option.path))
        for option in walk(type(config))
        if option.info.at_resume != "free"
        and not option.path.startswith(FREE_SECTIONS)
        and option.info.secret_env is None
    }


def check_settings(config: CommandConfig, saved: Settings, *, path: object, step: int) -> list[str]:
    """One line for each setting that is not as it was when the checkpoint at `path` was written.

    `step` is that of the checkpoint. Raises ConfigError that lists the changes which cannot be.
    """
    changed = list(_changes(config, saved))
    problems = [
        f"{flag} {_shown(new)}: {path} was written with {_shown(old)}. Type {flag} {_typed(old)}, "
        "or leave --load_checkpoint out."
        for option, flag, old, new in changed
        if option.info.at_resume == "refused"
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))  # one flag may be two models' setting
    lines = [_line(option, flag, (old, new), step) for option, flag, old, new in changed]
    return list(dict.fromkeys(lines))


def _changes(config: CommandConfig, saved: Settings) -> Iterator[tuple[Option, str, Any, Any]]:
    now = settings_of(config)
    for option in walk(type(config)):
        # A setting the checkpoint does not know is younger than it.
        if option.path in now and option.path in saved:
            old, new = saved[option.path], now[option.path]
            is_model = option.path.endswith("model_name_or_path")
            if old != new and not (is_model and _is_one_folder(old, new)):
                yield option, plain_flag(option), old, new


def _is_one_folder(old: str | None, new: str | None) -> bool:
    """Whether two paths lead to the same folder, which may be typed in several ways."""
    if old is None or new is None or not Path(new).expanduser().is_dir():
        return False
    return Path(old).expanduser().resolve() == Path(new).expanduser().resolve()


def _line(option: Option, flag: str, values: tuple[Any, Any], step: int) -> str:
    old, new = map(_shown, values)
    if option.info.at_resume == "kept":
        return (
            f"{flag} {new} has no effect: {old} goes on with the checkpoint. "
            "Start anew to change it."
        )
    return f"{flag} {new} ({old} when the checkpoint was written): it holds from step {step + 1} on"


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _typed(value: Any) -> str:
    """A value as it stands on a command line."""
    return str(value).lower() if isinstance(value, bool) else _shown(value)
