"""Sizes that a model's config tells before the model is loaded."""

from __future__ import annotations

from transformers import PretrainedConfig


def num_positions(config: PretrainedConfig) -> int | None:
    """Tokens of the longest sequence that the model was made for; None where it has no such number.

    Read as an attribute: some families keep it under a name of their own (GPT-2: `n_positions`).
    """
    return getattr(config.get_text_config(), "max_position_embeddings", None)
