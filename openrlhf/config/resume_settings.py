"""Settings that are not as they were when a checkpoint was written: refused, or said to have no
effect.

`at_resume` beside a field says which. Data and seed are compared elsewhere, the ZeRO stage where
shards are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf.config.base import value_at, walk
from openrlhf.config.common import CommandConfig
from openrlhf.errors import ConfigError


def settings_of(config: CommandConfig) -> dict[str, Any]:
    """Return what a later start is compared with: dotted path -> value, as JSON has it."""
    found = {o.path: value_at(config, o.path) for o in walk(type(config)) if o.info.at_resume}
    return {path: list(v) if isinstance(v, tuple) else v for path, v in found.items()}


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
