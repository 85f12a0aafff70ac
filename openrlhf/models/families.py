"""The families of language models that Transformers knows, and what is said of those whose rows are
padded.
"""

from __future__ import annotations

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.config.common import DeepSpeedConfig
from openrlhf.errors import ConfigError
from openrlhf.models.rotary import own_length
from openrlhf.utils.packable import why_padded

# Of the plans in which transformers says how layers are split: those that AutoTP follows.
SPLIT_STYLES = frozenset(
    {
        "colwise",
        "colwise_gather_output",
        "colwise_rep",
        "embedding_rowwise",
        "replicated_with_grad_allreduce",
        "rowwise",
    }
)


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


def refuse_shared_rows(config: PretrainedConfig, path: str, ds: DeepSpeedConfig) -> None:
    """Raise ConfigError for a model whose rows `--ring_attn_size` ranks cannot share."""
    if ds.ring_attn_size == 1:
        return
    size, text = ds.ring_attn_size, config.get_text_config()
    if padding_note(config, path) is not None:
        why = "its rows are padded, not packed"
    elif (limit := own_length(config)) is not None:
        why = f"its rotary positions change beyond {limit} tokens"
    else:
        heads = {text.num_attention_heads, getattr(text, "num_key_value_heads", None) or size}
        if ds.cp_mode == "ring" or not any(count % ds.ranks_per_share for count in heads):
            return
        raise ConfigError(
            f"--cp_mode ulysses shares heads, and {path} has {min(heads)}, not a multiple of the "
            f"{ds.ranks_per_share} ranks that work on the same samples. Type --cp_mode ring."
        )
    raise ConfigError(f"--ring_attn_size {size}: {path} cannot be shared, {why}. Leave it out.")


def refuse_split_layers(config: PretrainedConfig, path: str, ds: DeepSpeedConfig) -> None:
    """Raise ConfigError for a model whose layers `--ds_tensor_parallel_size` cannot split."""
    size, text = ds.tensor_parallel_size, config.get_text_config()
    if size == 1:
        return
    plan = getattr(text, "base_model_tp_plan", None) or {}
    has_norms = getattr(text, "use_qk_norm", False) or getattr(text, "qk_layernorm", False)
    knows_norms = any("norm" in name for name in plan)
    if not plan or set(plan.values()) - SPLIT_STYLES or (has_norms and not knows_norms):
        raise ConfigError(
            f"--ds_tensor_parallel_size {size}: {path} is of the family {config.model_type}, which "
            "DeepSpeed's AutoTP cannot split. Leave it out, and type --zero_stage 3 instead."
        )
    heads = {text.num_attention_heads, getattr(text, "num_key_value_heads", None) or size}
    if any(count % size for count in heads):
        raise ConfigError(
            f"--ds_tensor_parallel_size {size}: {path} has {min(heads)} heads, not a multiple of "
            "it. Type a divisor."
        )


def refuse_own_code(model: PreTrainedModel, path: str) -> None:
    """Code that comes with the weights must take packed rows: raise ConfigError where it cannot."""
    reason = why_padded(type(model), model.config)
    if reason is not None and causal_class(model.config) is None:
        raise ConfigError(
            f"{path}: {type(model).__name__} has {reason}. Code of its own must use Transformers' "
            "attention interface."
        )
