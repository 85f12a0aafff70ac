"""Which model families see several sequences in one row: told by their class and config, before a
weight is read.

The others see padded rows, one sequence each. A recurrent family would carry its state over the
boundaries in a row, one with an attention of its own drops them (GPT-J and GPT-Neo in flash
attention too): so it is on every machine, and a run means the same everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PACKABLE_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


def base_model_of(model: Any) -> Any:
    """Return the Hugging Face model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_padded(model: Any) -> bool:
    """Return True if a model, inside its adapters or bare, sees padded rows."""
    base = base_model_of(model)
    return why_padded(type(base), base.config) is not None


def why_padded(model_class: type[PreTrainedModel], config: PretrainedConfig) -> str | None:
    """Return what keeps a family from packed rows; None if nothing does."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - PACKABLE_LAYER_TYPES
    if model_class._is_stateful or kinds:
        return ", ".join(sorted(kinds)) or "recurrent layers"
    if not model_class._supports_attention_backend:
        return "an attention of its own"
    return None if model_class._supports_sdpa else "an attention that torch's kernels do not have"
