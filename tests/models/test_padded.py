"""Families that cannot see several sequences in one row see padded ones, and say the same of each
as the model itself; those that do more than a head to their hidden states are refused.
"""

from pathlib import Path

import pytest
import torch
import transformers as hf

from openrlhf.cli import train_kto
from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor
from openrlhf.models.loading import check_own_logits, load_sequence_model
from openrlhf.models.packing import PACKED_ATTENTION
from openrlhf.models.value_head import RewardModel
from openrlhf.utils.packing import why_padded
from tests.models.helpers import dense_logprobs, full_batch, gradients, random_sequences
from tests.tiny import make_model, make_reward_model, write_jsonl

LENGTHS = (7, 1, 12, 5, 12)
SIZES = {"vocab_size": 262, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
PADDED = {
    "bloom": lambda: hf.BloomConfig(vocab_size=262, hidden_size=32, n_layer=2, n_head=4),
    "gpt_oss": lambda: hf.GptOssConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "mamba": lambda: hf.MambaConfig(vocab_size=262, hidden_size=32, num_hidden_layers=2),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**LLAMA, **LINEAR, **EXPERTS),
}


def make(config: hf.PretrainedConfig, attention: str | None = None) -> hf.PreTrainedModel:
    """A random model with attention that is worth something."""
    torch.manual_seed(0)
    config._attn_implementation = attention
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(5)
    return model.eval()


@pytest.mark.parametrize("family", PADDED)
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(family: str) -> None:
    model = make(PADDED[family]())
    assert why_padded(type(model), model.config) is not None
    sequences = random_sequences(list(LENGTHS))
    batch = full_batch(sequences)
    ours = Actor(model)(batch).logprobs
    masks = batch.target_mask.split(batch.seq_lengths)
    theirs, _ = dense_logprobs(model, sequences, masks, temperature=1.0)
    assert theirs.std() > 0.1
    check_own_logits(model)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    ours.square().mean().backward()
    got = gradients(model)
    model.zero_grad()
    theirs.square().mean().backward()
    expected = gradients(model)
    assert got.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() < 1e-4 * largest, name


def test_a_head_that_does_more_is_refused() -> None:
    config = hf.BertConfig(**SIZES, intermediate_size=64, is_decoder=True)
    with pytest.raises(ConfigError, match="BertLMHeadModel computes its logits in a way of its"):
        check_own_logits(make(config, PACKED_ATTENTION))


@pytest.mark.parametrize("family", ["bloom", "qwen3_next"])
def test_a_reward_model_scores_as_it_would_alone(family: str, tmp_path: Path) -> None:
    make_reward_model(tmp_path, architecture=family, hidden_size=32)
    sequences = random_sequences(list(LENGTHS))
    with torch.no_grad():
        scores = RewardModel(load_sequence_model(tmp_path))(full_batch(sequences)).scores
        own = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
        alone = [own.eval()(input_ids=ids[None]).logits[0, 0] for ids in sequences]
    assert scores.std() > 0.01
    torch.testing.assert_close(scores, torch.stack(alone), atol=1e-4, rtol=0)


def test_a_command_says_that_it_pads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BLOOM is the family of KTO's default model."""
    model = make_model(tmp_path / "model", "bloom", hidden_size=32)
    rows = [{"input": f"q{k}", "output": "ab"[k % 2], "label": k % 2} for k in range(8)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = f"--pretrain {model} --dataset {data} --save_path {tmp_path}/run --input_key input "
    words += "--output_key output --label_key label --train_batch_size 8"
    train_kto.main([*words.split(), "--micro_train_batch_size", "4"])
    said = f"{model}: BloomForCausalLM has an attention of its own: the sequences of a micro-batch"
    assert said in capsys.readouterr().err
    hf.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
