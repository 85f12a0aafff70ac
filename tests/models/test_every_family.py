"""Every family of causal language models that Transformers has: equal to itself, or refused."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch
import transformers as hf

from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor
from openrlhf.models.loading import check_own_logits
from openrlhf.models.packing import PACKED_ATTENTION
from openrlhf.utils.packable import why_padded
from tests.models.helpers import full_batch, random_sequences
from tests.models.test_padded import own_logprobs

NUM_HEADS = 4
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "mamba_d_ssm"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), NUM_HEADS),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), NUM_HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size",), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "expand", "mamba_expand", "n_groups"), 1),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "state_size", "qk_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "attention_window_size", "chunk_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), NUM_HEADS),
    "qk_rope_head_dim": 4,
    "vocab_size": 262,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
LATENT = {"num_key_value_heads": NUM_HEADS, "head_dim": 4, "qk_head_dim": 12}
PER_LAYER = {"vocab_size_per_layer_input": 262, "hidden_size_per_layer_input": 8}
GLOBAL = {"global_head_dim": 8, "num_global_key_value_heads": 2}
OTHERS: dict[str, dict[str, object]] = {  # what a family needs beside SMALL, or instead
    "AXK1Config": LATENT,
    "DbrxConfig": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {
            **{"ffn_hidden_size": 64, "hidden_size": 32},
            **{"moe_num_experts": 4, "moe_top_k": 2},
        },
    },
    "DeepseekV3Config": LATENT,
    "Dots1Config": {"n_shared_experts": 1},
    "Gemma3nTextConfig": {
        **PER_LAYER,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "Gemma4TextConfig": {**PER_LAYER, **GLOBAL},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashConfig": {
        **LATENT,
        **{"num_layers": 1, "moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 32},
    },
    "ReformerConfig": {"axial_pos_embds": False},
    "RoCBertConfig": {
        **{"pronunciation_vocab_size": 10, "pronunciation_embed_dim": 8},
        **{"shape_vocab_size": 10, "shape_embed_dim": 8},
    },
    "XmodConfig": {"default_language": "en_XX", "languages": ["en_XX"]},
    "YoutuConfig": LATENT,
    "ZambaConfig": {
        **{"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
        **{"attention_head_dim": 16, "attention_hidden_size": 64},
        **{"n_mamba_heads": 2, "mamba_expand": 2},
    },
    "Zamba2Config": {
        **{"num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "hybrid"]},
        **{"num_mem_blocks": 1, "hybrid_layer_ids": [1, 2]},
    },
    "ZayaConfig": {"num_experts_per_tok": 1},
}
MAX_PARAMETERS = 10_000_000
MAX_ERROR = 1e-3  # xLSTM computes in bf16 inside
LEAST_EQUAL = 130  # of some 178; most others are refused, or see more than text


def small_config(config_class: type) -> hf.PretrainedConfig:
    """The smallest sizes for every setting that a family has; of its text where it sees more."""
    if config_class is hf.Gemma4Config:
        text = small_config(hf.Gemma4TextConfig).to_dict()
        return hf.Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    names = vars(config_class()).keys() | inspect.signature(config_class).parameters.keys()
    sizes = {name: size for name, size in SMALL.items() if name in names}
    return config_class(**sizes | OTHERS.get(config_class.__name__, {}))


def small_model(config_class: type) -> hf.PreTrainedModel | None:
    """A random model of a few thousand weights; None for a family that needs other settings."""
    try:
        config = small_config(config_class)
        model_class = hf.AutoModelForCausalLM._model_mapping[config_class]
        is_packed = why_padded(model_class, config) is None
        attention = PACKED_ATTENTION if is_packed else None
        with torch.device("meta"):
            model = model_class._from_config(config, attn_implementation=attention)
        if sum(weight.numel() for weight in model.parameters()) > MAX_PARAMETERS:
            return None
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation=attention).eval()
        model(input_ids=torch.tensor([[5, 6]]), use_cache=False)
    except Exception:  # noqa: BLE001 - whatever a config says that these sizes are not for it
        return None
    return model


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_log_probs_are_the_models_own_or_it_is_refused() -> None:
    outcomes: Counter[str] = Counter()
    wrong = []
    sequences = random_sequences([7, 5, 12])
    for config_class in hf.AutoModelForCausalLM._model_mapping:
        model = small_model(config_class)
        if model is None:
            outcomes["needs other settings"] += 1
            continue
        try:
            check_own_logits(model)
            with torch.no_grad():
                ours = Actor(model)(full_batch(sequences)).logprobs
        except ConfigError:
            outcomes["refused"] += 1
            continue
        if model.config._attn_implementation == PACKED_ATTENTION:
            model.set_attn_implementation("eager")
        with torch.no_grad():
            error = (ours - own_logprobs(model, sequences)).abs().max().item()
        outcomes["equal" if error < MAX_ERROR else "wrong"] += 1
        if not error < MAX_ERROR:
            wrong.append((type(model).__name__, error))
    assert not wrong
    assert outcomes["equal"] >= LEAST_EQUAL, outcomes
    print(outcomes)
