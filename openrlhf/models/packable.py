"""Which model families can be trained on packed rows: told by their class, before a weight is read.

Rows of several sequences are one row to the model. A family that attends in a way of its own would
drop the boundaries between them, and a recurrent one carries its state over them.
"""

from __future__ import annotations

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.errors import ConfigError

PACKABLE_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


def check_family(config: PretrainedConfig) -> None:
    """Raise ConfigError for a model that cannot be trained packed; code that comes with the weights
    is looked at when it is loaded.
    """
    families = transformers.AutoModelForCausalLM._model_mapping
    if type(config) in families and getattr(config, "auto_map", None) is None:
        check_packable(families[type(config)], config)


def check_packable(model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """A model that carries state over sequences, or attends in its own way, is a ConfigError."""
    name = model_class.__name__
    text = config.get_text_config()
    layer_types = set(text.to_dict().get("layer_types") or ())
    if model_class._is_stateful or layer_types - PACKABLE_LAYER_TYPES:
        kinds = ", ".join(sorted(layer_types - PACKABLE_LAYER_TYPES)) or "recurrent layers"
        raise ConfigError(
            f"{name} has {kinds}: only causal and sliding-window attention can be trained packed."
        )
    if not model_class._supports_attention_backend:
        raise ConfigError(
            f"{name} does not use transformers' attention interface: it cannot be trained packed. "
            "Use a family that does, such as Llama, Qwen, Mistral or Gemma."
        )
