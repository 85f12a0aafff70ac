"""Settings that somebody typed in vain: nothing reads them in this run, because another one is
missing or chosen. They are said, not refused, as old commands carry them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import BaseModel

from openrlhf.config.base import Option, is_changed, is_given, value_at, walk
from openrlhf.config.flags import plain_flag
from openrlhf.config.run import CommandConfig

CONDITION = re.compile(r"(?P<unless>!)?(?P<path>[\w.]+)((?P<sign>[=>])(?P<value>.+))?")


def settings_without_effect(config: CommandConfig) -> Iterator[str]:
    """Yield a line for each setting that was typed in vain, with another value than its default."""
    options = {option.path: option for option in walk(type(config))}
    lines = (line for option in options.values() if (line := _line(config, option, options)))
    yield from dict.fromkeys(lines)  # a flag may set several leaves


def _line(config: CommandConfig, option: Option, options: dict[str, Option]) -> str | None:
    if not (is_given(config, option.path) and is_changed(config, option.path)):
        return None
    why = option.info.unused
    if why is None and option.info.only_with is not None:
        why = _missing(config, option.info.only_with, options)
    return why and f"{plain_flag(option)} has no effect {why}."


def _missing(config: BaseModel, condition: str, options: dict[str, Option]) -> str | None:
    """Return what is missing for a condition, in words; None if it is met or of another command."""
    found = CONDITION.fullmatch(condition)
    assert found is not None, f"{condition!r} is no condition"
    if found["path"] not in options:
        return None
    flag = plain_flag(options[found["path"]])
    value = value_at(config, found["path"])
    if found["unless"]:
        return f"with {flag}" if value else None
    if found["sign"] == ">":
        return None if value > float(found["value"]) else f"without {flag}"
    if found["sign"] == "=":
        return None if str(value) == found["value"] else f"without {flag} {found['value']}"
    return None if value else f"without {flag}"
