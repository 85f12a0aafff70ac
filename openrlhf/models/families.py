"""What a model's config tells before its weights are read: sizes, whether its rows are packed or
padded, and which settings it refuses.
"""

from __future__ import annotations

from collections.abc import Mapping

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.config.common import DeepSpeedConfig
from openrlhf.errors import ConfigError
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


def num_positions(config: PretrainedConfig) -> int | None:
    """Return the tokens of the longest sequence that the model reads; None where it has no limit.

    Rotary tables that change with the length of a sequence (dynamic NTK, LongRoPE) are used up to
    the length where they begin to: beyond, they would depend on the longest sequence of a row.
    """
    text = config.get_text_config()
    # An attribute: some families keep it under a name of their own (GPT-2: `n_positions`).
    limit = getattr(text, "max_position_embeddings", None)
    scaling = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [part for part in scaling.values() if isinstance(part, Mapping)]
    kinds = {part.get("rope_type") for part in by_layer_type or [scaling]}
    if limit is None or "dynamic" in kinds:
        return limit
    if "longrope" in kinds:
        parts = by_layer_type or [scaling]
        return min(part.get("original_max_position_embeddings", limit) for part in parts)
    factor = scaling.get("factor")
    if factor is None:
        return limit
    return max(limit, int(scaling.get("original_max_position_embeddings", limit) * factor))


def head_size(config: PretrainedConfig) -> int | None:
    """Return the numbers in an attention head; None where the family does not say it in the usual
    words, or compresses keys and values (MLA).
    """
    text = config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None)
    width = getattr(text, "hidden_size", None)
    if not num_heads or not width or getattr(text, "kv_lora_rank", None):
        return None
    return int(getattr(text, "head_dim", None) or width // num_heads)


def causal_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of a family's language models; None for code that comes with weights."""
    found = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    return found if isinstance(found, type) else None


def padding_note(config: PretrainedConfig, path: str) -> str | None:
    """Return what to say of the model at `path` if its rows are padded."""
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
    if padding_note(config, path) is not None:
        raise ConfigError(
            f"--ring_attn_size {ds.ring_attn_size}: {path} cannot be shared, its rows are padded, "
            "not packed. Leave it out."
        )
    num_heads = _fewest_heads(config, ds.ranks_per_share)
    if ds.cp_mode == "ulysses" and num_heads is not None:
        raise ConfigError(
            f"--cp_mode ulysses shares heads, and {path} has {num_heads}, not a multiple of the "
            f"{ds.ranks_per_share} ranks that work on the same samples. Type --cp_mode ring."
        )


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
    if (num_heads := _fewest_heads(config, size)) is not None:
        raise ConfigError(
            f"--ds_tensor_parallel_size {size}: {path} has {num_heads} heads, not a multiple of "
            "it. Type a divisor."
        )


def _fewest_heads(config: PretrainedConfig, num_ranks: int) -> int | None:
    """Return the number of query or key heads if a number of ranks does not divide both."""
    text = config.get_text_config()
    heads = {text.num_attention_heads, getattr(text, "num_key_value_heads", None) or num_ranks}
    return min(heads) if any(count % num_ranks for count in heads) else None


def refuse_own_code(model: PreTrainedModel, path: str) -> None:
    """Raise ConfigError if code that comes with the weights does not take packed rows."""
    reason = why_padded(type(model), model.config)
    if reason is not None and causal_class(model.config) is None:
        raise ConfigError(
            f"{path}: {type(model).__name__} has {reason}. Code of its own must use Transformers' "
            "attention interface."
        )
