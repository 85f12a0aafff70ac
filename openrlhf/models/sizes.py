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
