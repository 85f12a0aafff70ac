"""The one list of flags that are understood and whose feature is not built yet.

A flag leaves the list in the change that builds its feature. Settings that only refine a feature
are not listed: without the feature they have no effect, and old commands carry them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from openrlhf.config.base import value_at, walk
from openrlhf.config.flags import plain_flag
from openrlhf.config.run import CommandConfig
from openrlhf.errors import ConfigError


class Unimplemented(NamedTuple):
    """A leaf, what is missing, the values beside its default that work already, and where."""

    path: str
    reason: str
    accepts: Callable[[Any], bool] = lambda value: False
    # Config class whose commands lack the feature; its name, as importing every tree takes time.
    scope: str = "CommandConfig"


UNIMPLEMENTED: tuple[Unimplemented, ...] = (
    Unimplemented("actor.freeze_visual_encoder", "vision-language models"),
    Unimplemented("ckpt.best_metric_key", "best checkpoints"),
    Unimplemented("ckpt.load_enable", "resuming", scope="PPOConfig"),
    Unimplemented(
        "ckpt.save_steps",
        "checkpoints during training",
        lambda value: value <= 0,
        scope="PPOConfig",
    ),
    Unimplemented("data.max_images_per_prompt", "vision-language models"),
    Unimplemented("data.pretrain_dataset", "mixing in pre-training text"),
    Unimplemented("ds.deepcompile", "DeepCompile"),
    Unimplemented("ds.ring_attn_size", "ring attention"),
    Unimplemented("ds.tensor_parallel_size", "tensor parallel training"),
    Unimplemented("ds.use_universal_ckpt", "universal checkpoints"),
    Unimplemented("ds.zpg", "ZeRO++"),
    Unimplemented("rollout.vllm_generate_batch_size", "generating ahead"),
    Unimplemented("train.async_enable", "asynchronous training"),
    Unimplemented("train.partial_rollout_enable", "partial rollouts"),
    Unimplemented("use_ms", "ModelScope"),
    Unimplemented("vllm.sync_with_ray", "weight sync through Ray"),
)


def refuse_unimplemented(config: CommandConfig) -> None:
    """Raise ConfigError that lists every setting whose feature is not built yet."""
    problems = list(dict.fromkeys(unimplemented_problems(config)))
    if problems:
        raise ConfigError(problems)


def unimplemented_problems(config: CommandConfig) -> Iterator[str]:
    """One line for every setting whose feature is not built yet."""
    options = {option.path: option for option in walk(type(config))}
    kinds = {kind.__name__ for kind in type(config).__mro__}
    for later in UNIMPLEMENTED:
        if later.path not in options or later.scope not in kinds:
            continue
        option, value = options[later.path], value_at(config, later.path)
        if value != option.field.get_default() and not later.accepts(value):
            word = "" if value is True else f" {value}"
            yield f"not yet implemented: {plain_flag(option)}{word} ({later.reason}). Leave it out."
