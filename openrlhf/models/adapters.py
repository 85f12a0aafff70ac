"""LoRA adapters over the models of this package: put on, switched off, merged.

PEFT does the work; this module says which layers take an adapter, that a value head is trained and
saved with it, and that a frozen base is the reference of an adapter trained on it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from torch import nn
from typing_extensions import Unpack

from openrlhf.config.common import LoraConfig
from openrlhf.errors import ConfigError
from openrlhf.models.adapter_files import merge_adapter_into
from openrlhf.models.loading import LoadOptions, load_causal_lm, load_reward_base
from openrlhf.utils.adapter_folder import is_reward_adapter, read_adapter_config

if TYPE_CHECKING:
    import peft
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
    import peft  # noqa: PLC0415 - takes seconds with bitsandbytes, and few runs need it

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
    peft = sys.modules.get("peft")  # what put the adapter on has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """A block in which an adapted model answers as its base does."""
    assert is_adapted(model), type(model)
    with cast("peft.PeftModel", model).disable_adapter():
        yield


def merge_adapter(
    base_path: str, adapter_path: str, *, is_rm: bool = False, **options: Unpack[LoadOptions]
) -> PreTrainedModel:
    """The base with the adapter's weights added, as a plain Hugging Face model.

    A reward model gets its head and its scale from the adapter's folder. Raises ConfigError as
    `load_adapter` does.
    """
    _check_kind(adapter_path, is_rm=is_rm)
    if is_rm:
        model = load_reward_base(base_path, adapter_path, **options)
    else:
        model = load_causal_lm(base_path, **options)
    merged = merge_adapter_into(model, adapter_path)
    merged.name_or_path = merged.config._name_or_path = base_path
    return merged


def _check_kind(path: str, *, is_rm: bool) -> None:
    """Refuse to merge a reward model's adapter as a language model's, which would lose the head."""
    if read_adapter_config(path) is None:
        raise ConfigError(f"{path} holds no adapter_config.json. Give the folder of an adapter.")
    has_head = is_reward_adapter(path)
    if has_head and not is_rm:
        raise ConfigError(f"{path} is the adapter of a reward model. Type --is_rm.")
    if is_rm and not has_head:
        raise ConfigError(f"--is_rm: the adapter at {path} has no value head. Leave --is_rm out.")


def _linear_names(model: nn.Module) -> str:
    names = sorted(
        {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    )
    return ", ".join(names[:MAX_NAMES_SHOWN])
