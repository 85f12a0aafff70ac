"""LoRA adapters over the models of this package: put on, switched off, read from a folder, merged.

PEFT does the work; this module says which layers take an adapter, that a value head is trained and
saved with it, and that every weight of a folder finds its place: PEFT takes a folder with weights
missing and trains on with random ones. With bitsandbytes it takes seconds to import, so it is
imported where an adapter is at hand.
"""

import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from openrlhf.config.common import LoraConfig
from openrlhf.errors import ConfigError, first_line
from openrlhf.utils.adapter_folder import REWARD_TASK
from openrlhf.utils.console import warn_once
from openrlhf.utils.tokenizer import own_generation_config
from openrlhf.utils.vision_families import tower_of

ALL_LINEAR = "all-linear"
SCALE_FIELDS = ("mean", "std")  # of a reward model's scores


def add_lora(model: PreTrainedModel, lora: LoraConfig) -> nn.Module:
    """Freeze the model and put an adapter on it: W + alpha / rank * B A (arXiv 2106.09685); of one
    with a tower, on its language model.

    A value head stays trained and is saved with the adapter. With rank 0 return the model as it
    is. Raises ConfigError for target modules that the model does not have, or whose weights are
    both its embeddings and its LM head.
    """
    if not lora.rank:
        return model
    import peft  # noqa: PLC0415 - takes seconds with bitsandbytes, and few runs need it

    names = list(lora.target_modules)
    targets: str | list[str] = ALL_LINEAR if names == [ALL_LINEAR] else names
    head = model.config.to_dict().get("value_head_prefix")
    if getattr(model, "is_quantized", False):
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        if share_of_frozen_experts(model) > 0:
            warn_once(
                f"--load_in_4bit: the experts of {type(model).__name__} stay in fp32: linear "
                "layers alone are held in 4 bits."
            )
    tower = tower_of(model.config)  # names such as `proj` and `q_proj` are layers of it too
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        exclude_modules=rf"(.*\.)?({'|'.join(tower)})\..*" if tower else None,
        bias="none",
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
        modules_to_save=[head] if head else None,
    )
    flag = f"--target_modules {' '.join(names)}"
    try:
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(
            f"{flag}: {first_line(error)} Name linear layers of "
            f"{type(model).__name__}, or type {ALL_LINEAR}."
        ) from error
    adapted_names = [f".{name}" for name in adapted.base_model.targeted_module_names]
    others = [n for n in names if not any(name.endswith(f".{n}") for name in adapted_names)]
    if targets != ALL_LINEAR and others:
        raise ConfigError(
            f"{flag}: {type(model).__name__} has no layer {', '.join(others)} that takes an "
            f"adapter. Name linear layers with spaces or commas between, or type {ALL_LINEAR}."
        )
    if untie(adapted.get_base_model()):
        raise ConfigError(
            f"{flag}: embeddings and LM head of {model.name_or_path} are the same weights, and a "
            f"merged adapter would change both. Leave both out, or type {ALL_LINEAR}."
        )
    return adapted


def untie(model: nn.Module) -> bool:
    """Give the LM head weights of its own where it shares those of the embeddings and one of the
    two has an adapter; return True if that was so.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    own, shared = (getattr(layer, "base_layer", layer) for layer in (head, embedding))
    is_tied = own is not None and own.weight is shared.weight
    if not is_tied or (own is head and shared is embedding):
        return False
    own.weight = nn.Parameter(own.weight.detach().clone(), requires_grad=False)
    model.config.get_text_config().tie_word_embeddings = False
    model.config.tie_word_embeddings = False
    return True


def share_of_frozen_experts(model: nn.Module) -> float:
    """Return the part of the weights that are experts, several in one tensor, without an adapter
    that PEFT puts around their module.
    """
    wrapped = {id(m.get_base_layer()) for m in model.modules() if hasattr(m, "parameter_name")}
    own = [m for m in model.modules() if id(m) not in wrapped and "xperts" in type(m).__name__]
    fused = [p.numel() for m in own for p in m.parameters(recurse=False) if p.dim() == 3]
    return sum(fused) / sum(p.numel() for p in model.parameters())


def is_adapted(model: nn.Module) -> bool:
    """Return True if a model carries an adapter."""
    return hasattr(model, "peft_config")


def load_adapter(model: PreTrainedModel, path: str | os.PathLike[str]) -> Any:
    """Return a model with the adapter saved at `path` on it.

    Raises ConfigError when the folder holds no adapter, one that does not fit the model, or one
    that lacks weights.
    """
    import peft  # noqa: PLC0415 - see above

    folder = Path(path).expanduser()
    try:
        config = peft.PeftConfig.from_pretrained(folder)
        if config.is_prompt_learning:
            kind = config.peft_type.value
            raise ValueError(f"{kind} adds tokens and cannot be merged. Give a LoRA adapter.")
        if config.task_type != REWARD_TASK and "value_head_prefix" in model.config.to_dict():
            config.task_type = None  # a policy's adapter on a model that does not generate
        with warnings.catch_warnings():
            # What PEFT warns of, and the heads it says nothing about, are errors below.
            warnings.filterwarnings("ignore", message="Found missing adapter keys")
            adapted = peft.PeftModel.from_pretrained(model, folder, config=config)
        expected = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
        found = set(peft.load_peft_weights(str(folder), device="cpu"))
        own = {f"base_model.model.{name}" for name in adapted.get_base_model().state_dict()}
        for kind, keys in (("missing", expected - found), ("unexpected", found - expected - own)):
            if keys:
                raise ValueError(f"{len(keys)} are {kind} ({', '.join(sorted(keys)[:3])}).")
        untie(adapted.get_base_model())
    except pickle.UnpicklingError as error:
        raise ConfigError(would_run_code(f"The adapter at {path}", error)) from error
    except (KeyError, TypeError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"The adapter at {path} does not fit {model.config._name_or_path}: "
            f"{first_line(error)} Save it again, or give the base it was trained on."
        ) from error
    return adapted


def merge_adapter_into(model: PreTrainedModel, path: str | os.PathLike[str]) -> PreTrainedModel:
    """Return the model with the weights of the adapter at `path` added; it is named after the
    adapter, so that what is trained on it names it as its base.
    """
    adapted = load_adapter(model, path)
    try:
        with torch.no_grad():
            merged: PreTrainedModel = adapted.merge_and_unload()
    except RuntimeError as error:  # lora_bias on a layer that has none
        raise ConfigError(
            f"The adapter at {path} cannot be merged: {first_line(error)} Train one without that."
        ) from error
    merged.requires_grad_(requires_grad=True)
    own = own_generation_config(path)
    if own is not None and merged.can_generate():
        merged.generation_config = own
    merged.name_or_path = merged.config._name_or_path = str(path)
    return merged


def would_run_code(file: str, error: pickle.UnpicklingError) -> str:
    """Return the line about pickled weights that name more than tensors."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return (
        f"{file} would run code when it is loaded: it names "
        f"{found[1] if found else 'more than tensors'}. "
        "Do not use it; take the model from a source you trust, as safetensors."
    )
