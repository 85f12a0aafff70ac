"""An adapter's folder put on a model that is loaded, every weight of it in its place, and merged.

PEFT takes a folder with weights missing and trains on with random ones; here that is an error. It
is imported where an adapter is at hand: with bitsandbytes it takes seconds in every process.
"""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from openrlhf.errors import ConfigError, first_line
from openrlhf.models.quiet_loading import refused_name, would_run_code
from openrlhf.utils.adapter_folder import ADAPTER_CONFIG, REWARD_TASK

if TYPE_CHECKING:
    from collections.abc import Set

    import peft
    from transformers import PreTrainedModel

NUM_KEYS_SHOWN = 3
SCALE_FIELDS = ("mean", "std")  # of a reward model's scores


def load_adapter(model: PreTrainedModel, path: str | os.PathLike[str]) -> peft.PeftModel:
    """A model with the adapter saved at `path` on it.

    Raises ConfigError when the folder holds no adapter, one that does not fit the model, or one
    that lacks weights.
    """
    import peft  # noqa: PLC0415 - see above

    folder = Path(path).expanduser()
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{path} holds no {ADAPTER_CONFIG}. Give the folder of an adapter.")
    config = _read_config(folder)
    if config.task_type != REWARD_TASK and "value_head_prefix" in model.config.to_dict():
        config.task_type = None  # a policy's adapter on a model that does not generate
    try:
        with warnings.catch_warnings():
            # What PEFT warns of, and the heads it says nothing about, are errors below.
            warnings.filterwarnings("ignore", message="Found missing adapter keys")
            adapted = peft.PeftModel.from_pretrained(model, folder, config=config)
        check_adapter_keys(adapted, folder)
    except KeyError as error:  # a module that is trained whole, such as a head, has no weights
        raise ConfigError(
            f"The weights of the adapter at {path} do not fit its base: {error.args[0]} is "
            "missing. Save it again."
        ) from error
    except pickle.UnpicklingError as error:
        raise ConfigError(would_run_code(f"The adapter at {path}", refused_name(error))) from error
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"The adapter at {path} does not fit {model.config._name_or_path}: "
            f"{first_line(error)}. "
            "Give the base it was trained on."
        ) from error
    return adapted


def merge_adapter_into(model: PreTrainedModel, path: str | os.PathLike[str]) -> PreTrainedModel:
    """The model with the weights of the adapter at `path` added; it is named after the adapter, so
    that what is trained on it names it as its base.
    """
    adapted = load_adapter(model, path)
    with torch.no_grad():
        merged: PreTrainedModel = adapted.merge_and_unload()
    merged.requires_grad_(requires_grad=True)
    merged.name_or_path = merged.config._name_or_path = str(path)
    return merged


def check_adapter_keys(adapted: peft.PeftModel, folder: Path) -> None:
    """Raise ConfigError unless the folder holds every weight of the adapter, and no others."""
    import peft  # noqa: PLC0415 - see above

    expected = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
    found = set(peft.load_peft_weights(str(folder), device="cpu"))
    own = {f"base_model.model.{name}" for name in adapted.get_base_model().state_dict()}
    problems = {"missing": expected - found, "unexpected": found - expected - own}
    texts = [f"{len(keys)} are {kind} ({_some(keys)})" for kind, keys in problems.items() if keys]
    if texts:
        raise ConfigError(
            f"The weights of the adapter at {folder} do not fit its base: {'; '.join(texts)}. "
            "Save it again, or give the base it was trained on."
        )


def _read_config(folder: Path) -> peft.PeftConfig:
    import peft  # noqa: PLC0415 - see above

    try:
        config = peft.PeftConfig.from_pretrained(folder)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG} cannot be read: {error!r}. Save the adapter again."
        ) from error
    if config.is_prompt_learning:
        raise ConfigError(
            f"The adapter at {folder} is of kind {config.peft_type.value}, which adds tokens and "
            "cannot be merged. Give a LoRA adapter."
        )
    return config


def _some(keys: Set[str]) -> str:
    return ", ".join(sorted(keys)[:NUM_KEYS_SHOWN])
