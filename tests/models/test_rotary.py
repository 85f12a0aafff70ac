"""Rotary tables that depend on length: a sequence is read alike alone and among others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor

from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from tests.models.helpers import full_batch, random_sequences
from tests.tiny import make_tokenizer

SIZES = {
    **{"vocab_size": 262, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "eos_token_id": 1},
    "initializer_range": 0.2,
}
LONGROPE = {
    **{"rope_type": "longrope", "original_max_position_embeddings": 16, "rope_theta": 10000.0},
    **{"short_factor": [1.0] * 8, "long_factor": [float(2 + i) for i in range(8)]},
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
CONFIGS = {
    "dynamic": lambda: hf.LlamaConfig(
        **SIZES, max_position_embeddings=16, rope_parameters=dict(DYNAMIC)
    ),
    "longrope": lambda: hf.Phi3Config(
        **SIZES,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=dict(LONGROPE),
    ),
}
LENGTHS = (9, 40, 16, 28, 3, 17)  # on both sides of the 16 tokens beyond which tables change


def save(config: hf.PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def alone(folder: Path, ids: Tensor) -> Tensor:
    """Log-probs by a model that has seen nothing else, of Transformers only."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_sequence_is_read_alike_alone_and_among_others(kind: str, tmp_path: Path) -> None:
    folder = save(CONFIGS[kind](), tmp_path / kind)
    sequences = random_sequences(LENGTHS)
    expected = torch.cat([alone(folder, ids) for ids in sequences])
    actor = Actor(load_causal_lm(folder)).eval()
    with torch.no_grad():
        for _ in range(2):  # what was read before has no say
            torch.testing.assert_close(
                actor(full_batch(sequences)).logprobs, expected, atol=1e-5, rtol=0
            )
        short = actor(full_batch(sequences[:1])).logprobs
    torch.testing.assert_close(short, expected[: LENGTHS[0] - 1], atol=1e-5, rtol=0)


def test_a_family_of_padded_rows_is_refused_with_such_tables(tmp_path: Path) -> None:
    config = hf.FalconConfig(
        **{"vocab_size": 262, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        max_position_embeddings=16,
        rope_parameters=dict(DYNAMIC),
    )
    folder = save(config, tmp_path / "falcon")
    with pytest.raises(ConfigError, match="change beyond 16 tokens, and its rows are padded"):
        load_causal_lm(folder)
