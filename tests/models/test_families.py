"""Sizes that a model's config tells before its weights are read."""

from __future__ import annotations

import pytest
import transformers as hf

from openrlhf.models.families import num_positions

LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (hf.LlamaConfig(max_position_embeddings=2048), 2048),
        (hf.GPT2Config(n_positions=1024), 1024),
        (hf.LlamaConfig(max_position_embeddings=2048, rope_parameters=YARN), 8192),
        # Beyond, positions would depend on the longest sequence of a row.
        (hf.LlamaConfig(max_position_embeddings=2048, rope_parameters=DYNAMIC), 2048),
        (hf.Phi3Config(max_position_embeddings=131072, rope_parameters=LONGROPE), 4096),
        (hf.MambaConfig(), None),
    ],
    ids=["plain", "gpt2", "yarn", "dynamic", "longrope", "none"],
)
def test_the_longest_sequence_that_a_model_reads(
    config: hf.PretrainedConfig, expected: int | None
) -> None:
    assert num_positions(config) == expected
