"""The one list of flags that are understood and whose feature is not built yet.

A flag leaves the list in the change that builds its feature. Settings that only refine a feature
are not listed: without the feature they have no effect, and old commands carry them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from openrlhf.config.base import value_at, walk
from openrlhf.config.flags import plain_flag
from openrlhf.config.run import CommandConfig


class Unimplemented(NamedTuple):
    """A leaf, and what is missing."""

    path: str
    reason: str


UNIMPLEMENTED: tuple[Unimplemented, ...] = (
    Unimplemented("actor.freeze_visual_encoder", "vision-language models"),
    Unimplemented("data.max_images_per_prompt", "vision-language models"),
)


def unimplemented_problems(config: CommandConfig) -> Iterator[str]:
    """One line for every setting whose feature is not built yet."""
    options = {option.path: option for option in walk(type(config))}
    for later in UNIMPLEMENTED:
        if later.path not in options:
            continue
        option, value = options[later.path], value_at(config, later.path)
        if value != option.field.get_default():
            word = "" if value is True else f" {value}"
            yield f"not yet implemented: {plain_flag(option)}{word} ({later.reason}). Leave it out."
