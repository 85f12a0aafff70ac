"""Settings that nothing reads in this run, because another one is missing or chosen: said, not
refused, as old commands carry them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from openrlhf.config.base import is_changed, is_given, walk
from openrlhf.config.flags import flag_table, plain_flag
from openrlhf.config.run import CommandConfig


class Idle(NamedTuple):
    """Leaves, in which configs nothing reads them, and the words that say so.

    Example: `("ckpt.max_num",)`, no `save_steps`: "--max_ckpt_num has no effect without
    --save_steps."
    """

    paths: tuple[str, ...]
    is_idle: Callable[[Any], bool]
    why: str  # follows "has no effect"


def idle_settings(config: CommandConfig, rules: Iterable[Idle]) -> Iterator[str]:
    """One line for each setting that somebody typed, with another value than its default, in vain.

    A rule may name leaves that this command does not have. A flag of several leaves stands for them
    where none of them is read; else each has its dotted name.
    """
    options = {option.path: option for option in walk(type(config))}
    found: dict[tuple[str, str], list[str]] = {}  # flag and why -> leaves
    for rule in rules:
        for path in rule.paths:
            is_typed = path in options and is_given(config, path) and is_changed(config, path)
            if is_typed and rule.is_idle(config):
                found.setdefault((plain_flag(options[path]), rule.why), []).append(path)
    table = flag_table(type(config))
    for (flag, why), paths in found.items():
        leaves = {target.option.path for target in table[flag.removeprefix("--")]}
        for name in [flag] if leaves <= {*paths} else [f"--{path}" for path in paths]:
            yield f"{name} has no effect {why}."
