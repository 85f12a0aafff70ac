"""The families of language models that Transformers knows, and what is said of those whose rows are
padded.
"""

from __future__ import annotations

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.errors import ConfigError
from openrlhf.utils.packable import why_padded


def causal_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of a family's language models; None for code that comes with the weights."""
    found = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    return found if isinstance(found, type) else None


def padding_note(config: PretrainedConfig, path: str) -> str | None:
    """What to say of the model at `path` when its rows are padded."""
    model_class = causal_class(config)
    reason = None if model_class is None else why_padded(model_class, config)
    if model_class is None or reason is None:
        return None
    return (
        f"{path}: {model_class.__name__} has {reason}: the sequences of a micro-batch are padded "
        "to the longest, not packed, which takes more time and memory"
    )


def refuse_token_budget(config: PretrainedConfig, path: str) -> None:
    """Raise ConfigError for a model whose rows are padded: a number of tokens is no bound."""
    if padding_note(config, path) is not None:
        raise ConfigError(
            f"--use_dynamic_batch: the rows of {path} are padded, so a budget of tokens does not "
            "bound their memory. Leave it out and set --micro_train_batch_size."
        )


def refuse_own_code(model: PreTrainedModel, path: str) -> None:
    """Code that comes with the weights must take packed rows: raise ConfigError where it cannot."""
    reason = why_padded(type(model), model.config)
    if reason is not None and causal_class(model.config) is None:
        raise ConfigError(
            f"{path}: {type(model).__name__} has {reason}. Code of its own must use Transformers' "
            "attention interface."
        )
