"""Sizes that a model's config tells before the model is loaded."""

from __future__ import annotations

from transformers import PretrainedConfig


def num_positions(config: PretrainedConfig) -> int | None:
    """Tokens of the longest sequence that the model was made for, scaled rotary positions included;
    None where it has no such number.

    Read as an attribute: some families keep it under a name of their own (GPT-2: `n_positions`).
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    scaling = getattr(text, "rope_parameters", None) or {}
    factor = scaling.get("factor")
    if limit is None or factor is None:
        return limit
    return max(limit, int(scaling.get("original_max_position_embeddings", limit) * factor))


def head_size(config: PretrainedConfig) -> int | None:
    """Numbers in an attention head; None where the family does not say it in the usual words, or
    compresses keys and values (MLA).
    """
    text = config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None)
    width = getattr(text, "hidden_size", None)
    if not num_heads or not width or getattr(text, "kv_lora_rank", None):
        return None
    return int(getattr(text, "head_dim", None) or width // num_heads)
