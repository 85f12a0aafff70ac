"""Weights of mixtures of experts, and of families that the trainer pads, reach vLLM as they are."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from openrlhf.distributed.weights import as_stored
from openrlhf.engines.vllm_engine import VLLMEngine
from tests.distributed.spawn import run_ranks
from tests.engines.helpers import PROMPT, largest_gap, load, request, send, shake, start, weights
from tests.tiny import make_tokenizer

SIZES = {"vocab_size": 262, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 256}
SHORT = {"vocab_size": 262, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
FAMILIES = {
    "mixtral": lambda: hf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**LLAMA, **EXPERTS, head_dim=32),
    "bloom": lambda: hf.BloomConfig(**SHORT, hidden_size=128),
    "falcon": lambda: hf.FalconConfig(**SIZES, bos_token_id=1, eos_token_id=1),
}
IN_MAIN = {"mixtral"}


def make(family: str, path: Path) -> Any:
    make_tokenizer(path)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    shake(model, 7)
    model.save_pretrained(path)
    return load(path)


def gap(engine: VLLMEngine, model: Any) -> float:
    """How far log-probs lie from the trainer's, at most."""
    prompts = [PROMPT[:n] for n in (3, 10, 40)]
    asked = [request(prompt, num_samples=2, max_new_tokens=20) for prompt in prompts]
    answers = zip(prompts, engine.generate(asked), strict=True)
    return max(largest_gap(model, p, a, 1.0) for p, samples in answers for a in samples)


@pytest.mark.parametrize(
    "family", [f if f in IN_MAIN else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_two_updates_arrive(family: str, tmp_path: Path) -> None:
    """In a process of its own: vLLM has groups for experts in its first engine of one, or never."""
    run_ranks(partial(check_updates, family), 1, tmp_path)


def check_updates(family: str, folder: Path) -> None:
    model = make(family, folder)
    engine = start(folder)
    assert gap(engine, model) < 1e-3
    for version in (1, 2):
        shake(model, version)
        before = gap(engine, model)
        send(engine, list(as_stored(model, weights(model))), version, bucket_bytes=2**17)
        assert gap(engine, model) < 1e-3 < before / 10
    engine.shutdown()
