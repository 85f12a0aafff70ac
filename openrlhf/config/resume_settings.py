"""Settings that are not as they were when a checkpoint was written: refused, or said.

What the position in the data or the optimizer's state would mean something else under is refused;
what the checkpoint's own states decide has no effect; anything else holds from the next step on.
Data and seed are compared elsewhere, the ZeRO stage where shards are read. What is said of an
optimizer holds for each of several (`actor.adam.lr`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from openrlhf.config.base import Option, value_at, walk
from openrlhf.config.flags import plain_flag
from openrlhf.config.run import CommandConfig
from openrlhf.errors import ConfigError

Settings = Mapping[str, Any]  # dotted path -> value, as JSON has it

# They change no weights, or are compared elsewhere: seed, shards.
IGNORED = (
    "ckpt.",
    "ds.use_universal_ckpt",
    "ds.zero_stage",
    "eval.",
    "local_rank",
    "logger.",
    "train.seed",
    "use_ms",
)
REFUSED = (
    "adam.weight_decay",  # how parameters are grouped in the optimizer's state
    "ds.load_in_4bit",
    "ds.lora.alpha",
    "ds.lora.rank",
    "ds.lora.target_modules",
    "ds.param_dtype",
    "ds.value_head_prefix",
    "lr_scheduler",
    "model.model_name_or_path",
    "model_name_or_path",
    "optim",
    "train.batch_size",
)
KEPT = ("adam.", "muon.")  # the optimizer's state brings them
TRAINED = ("actor.", "critic.")  # sections that have an optimizer of their own
# By the name of a config class, as importing every tree takes time: what each step's updates, and
# with them the learning rate, are counted in, and which states there are.
REFUSED_TOO = {
    "PPOConfig": (
        "algo.advantage.estimator",
        "rollout.batch_size",
        "rollout.n_samples_per_prompt",
        "train.async_enable",  # what is pending in a checkpoint
        "train.enable_ema",
        "train.max_epochs",
    )
}


def settings_of(config: CommandConfig) -> dict[str, Any]:
    """What a later start is compared with."""
    return {
        option.path: _as_json(value_at(config, option.path))
        for option in walk(type(config))
        if not option.path.startswith(IGNORED) and option.info.secret_env is None
    }


def check_settings(config: CommandConfig, saved: Settings, *, path: object, step: int) -> list[str]:
    """One line for each setting that is not as it was when the checkpoint at `path` was written.

    `step` is that of the checkpoint. Raises ConfigError that lists the changes which cannot be.
    """
    changed = list(_changes(config, saved))
    refused = (*REFUSED, *REFUSED_TOO.get(type(config).__name__, ()))
    problems = [
        f"{flag} {_shown(new)}: {path} was written with {_shown(old)}. Type {flag} {_typed(old)}, "
        "or leave --load_checkpoint out."
        for option, flag, old, new in changed
        if _own_path(option).startswith(refused)
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
    effect = SPECIAL.get(option.path) or SPECIAL.get(option.path.partition(".")[0])
    if effect is not None:
        return f"{flag} {new} ({old} when the checkpoint was written): {effect(step)}"
    if _own_path(option).startswith(KEPT):
        return (
            f"{flag} {new} has no effect: {old} goes on with the checkpoint. "
            "Start anew to change it."
        )
    return f"{flag} {new} ({old} when the checkpoint was written): it holds from step {step + 1} on"


def _own_path(option: Option) -> str:
    """The path within the section of the model it is about, where there are several."""
    section = next(filter(option.path.startswith, TRAINED), "")
    return option.path.removeprefix(section)


SPECIAL: dict[str, Callable[[int], str]] = {  # of a setting, or a whole section
    "data": lambda step: "the rows to train on and their tokens are the same",
    "train.max_epochs": lambda step: (
        f"the learning rate follows the schedule of the new length from step {step + 1} on"
    ),
    "train.num_episodes": lambda step: (
        f"the learning rate follows the schedule of the new length from step {step + 1} on"
    ),
    "data.pretrain_dataset": lambda step: "other text is read from its beginning",
    "train.micro_batch_size": lambda step: "results agree to rounding, not bit for bit",
    "train.dynamic_batch_enable": lambda step: "results agree to rounding, not bit for bit",
    "train.max_tokens_per_gpu": lambda step: "results agree to rounding, not bit for bit",
}


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _typed(value: Any) -> str:
    """A value as it stands on a command line."""
    return str(value).lower() if isinstance(value, bool) else _shown(value)
