"""Which model families can be trained on packed rows: told by their class, before a weight is read.

Rows of several sequences are one row to the model. A recurrent family carries its state over the
boundaries between them. One with an attention of its own drops them on a CPU, and some (GPT-J,
GPT-Neo) in flash attention too: it is refused everywhere, so that a run means the same everywhere.
"""

from __future__ import annotations

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.errors import ConfigError

PACKABLE_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


def check_family(config: PretrainedConfig, path: str) -> None:
    """Raise ConfigError for a model at `path` that cannot be trained packed; code that comes with
    the weights is looked at when it is loaded.
    """
    families = transformers.AutoModelForCausalLM._model_mapping
    if type(config) in families and getattr(config, "auto_map", None) is None:
        check_packable(families[type(config)], config, path)


def check_packable(model_class: type[PreTrainedModel], config: PretrainedConfig, path: str) -> None:
    """A model that carries state over sequences, or attends in its own way, is a ConfigError."""
    name = f"{path}: {model_class.__name__}"
    text = config.get_text_config()
    layer_types = set(text.to_dict().get("layer_types") or ())
    if model_class._is_stateful or layer_types - PACKABLE_LAYER_TYPES:
        kinds = ", ".join(sorted(layer_types - PACKABLE_LAYER_TYPES)) or "recurrent layers"
        raise ConfigError(
            f"{name} has {kinds}: only causal and sliding-window attention can be trained packed."
        )
    if not model_class._supports_attention_backend:
        raise ConfigError(
            f"{name} has an attention of its own, which is not known to keep packed sequences "
            "apart. Use another family, such as Llama, Qwen, Mistral or Gemma."
        )
