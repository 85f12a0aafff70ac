"""The one list of flags that are understood and whose feature is not built yet.

A flag leaves the list in the change that builds its feature. Settings that only refine a feature
are not listed: without the feature they have no effect, and old commands carry them.
"""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf.config.base import value_at, walk
from openrlhf.config.flags import plain_flag
from openrlhf.config.run import CommandConfig

UNIMPLEMENTED = {  # path -> what is missing
    "actor.freeze_visual_encoder": "vision-language models",
    "data.max_images_per_prompt": "vision-language models",
}


def unimplemented_problems(config: CommandConfig) -> Iterator[str]:
    """Yield a line for every setting whose feature is not built yet."""
    for option in walk(type(config)):
        value = value_at(config, option.path)
        if option.path in UNIMPLEMENTED and value != option.default:
            word = "" if value is True else f" {value}"
            reason = UNIMPLEMENTED[option.path]
            yield f"not yet implemented: {plain_flag(option)}{word} ({reason}). Leave it out."
