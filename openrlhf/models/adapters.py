"""LoRA adapters over the models of this package: put on, switched off, merged.

PEFT does the work; this module says which layers take an adapter, that a value head is trained and
saved with it, and that a frozen base is the reference of an adapter trained on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import peft
import torch
from torch import nn
from typing_extensions import Unpack

from openrlhf.config.common import LoraConfig
from openrlhf.errors import ConfigError
from openrlhf.models.loading import (
    LoadOptions,
    load_causal_lm,
    load_sequence_model,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
MAX_NAMES_SHOWN = 12


def add_lora(model: PreTrainedModel, lora: LoraConfig) -> nn.Module:
    """Freeze the model and put an adapter on it: W + alpha / rank * B A (arXiv 2106.09685).

    A value head stays trained and is saved with the adapter. With rank 0 the model is answered as
    it is. Raises ConfigError for target modules that the model does not have.
    """
    if not lora.rank:
        return model
    names = list(lora.target_modules)
    targets: str | list[str] = ALL_LINEAR if names == [ALL_LINEAR] else names
    head = model.config.to_dict().get("value_head_prefix")
    if getattr(model, "is_quantized", False):
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        bias="none",
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
        modules_to_save=[head] if head else None,
    )
    try:
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(
            f"--target_modules {' '.join(names)}: {_linear_names(model)} are the layers of "
            f"{type(model).__name__} that can take an adapter. Name some of them."
        ) from error
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name or "modules_to_save" in name for name in trained), (
        trained
    )
    return adapted


def is_adapted(model: nn.Module) -> bool:
    """Whether a model carries an adapter."""
    return isinstance(model, peft.PeftModel)


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """A block in which an adapted model answers as its base does."""
    assert isinstance(model, peft.PeftModel), type(model)
    with model.disable_adapter():
        yield


def load_adapter(model: PreTrainedModel, path: str | os.PathLike[str]) -> peft.PeftModel:
    """A model with the adapter saved at `path` on it.

    Raises ConfigError when the folder holds no adapter, or one that does not fit the model.
    """
    folder = Path(path)
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{path} holds no adapter_config.json. Give the folder of an adapter.")
    try:
        return peft.PeftModel.from_pretrained(model, folder)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"The adapter at {path} does not fit {model.config._name_or_path}: {reason}. "
            "Give the base it was trained on."
        ) from error


def merge_adapter(
    base_path: str, adapter_path: str, *, is_rm: bool = False, **options: Unpack[LoadOptions]
) -> PreTrainedModel:
    """The base with the adapter's weights added, as a plain Hugging Face model.

    A reward model gets its head and its scale from the adapter's folder. Raises ConfigError as
    `load_adapter` does.
    """
    _check_kind(Path(adapter_path), is_rm=is_rm)
    if is_rm:
        model = _reward_base(base_path, adapter_path, **options)
    else:
        model = load_causal_lm(base_path, **options)
    adapted = load_adapter(model, adapter_path)
    with torch.no_grad():
        return adapted.merge_and_unload()


def _check_kind(folder: Path, *, is_rm: bool) -> None:
    """Refuse to merge a reward model's adapter as a language model's, which would lose the head."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        return  # load_adapter says so
    has_head = json.loads(path.read_text()).get("task_type") == "SEQ_CLS"
    if has_head and not is_rm:
        raise ConfigError(f"{folder} is the adapter of a reward model. Type --is_rm.")
    if is_rm and not has_head:
        raise ConfigError(f"--is_rm: the adapter at {folder} has no value head. Leave --is_rm out.")


def _reward_base(
    base_path: str, adapter_path: str, **options: Unpack[LoadOptions]
) -> PreTrainedModel:
    """The base with a head of the name, and the scale, that stand in the adapter's folder."""
    stored: dict[str, object] = {}
    if (Path(adapter_path) / "config.json").is_file():
        stored = json.loads((Path(adapter_path) / "config.json").read_text())
    head = stored.get("value_head_prefix")
    name = head if isinstance(head, str) else None
    model = load_sequence_model(base_path, value_head_prefix=name, **options)
    model.config.update({key: stored[key] for key in ("mean", "std") if key in stored})
    return model


def _linear_names(model: nn.Module) -> str:
    names = sorted(
        {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    )
    return ", ".join(names[:MAX_NAMES_SHOWN])
