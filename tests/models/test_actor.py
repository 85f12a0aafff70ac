"""The policy equals the dense logits of one sequence at a time; the router loss of each packed
sequence equals Hugging Face's on that sequence alone.
"""

import pytest
import torch
import transformers as hf

from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor, load_balancing_losses
from openrlhf.models.loading import check_own_numbers, load_causal_lm
from openrlhf.models.packing import PACKED_ATTENTION
from openrlhf.utils.packing import PackedBatch, is_padded
from tests.models.helpers import (
    FAMILIES,
    dense_logprobs,
    eager_model,
    full_batch,
    gradients,
    random_masks,
    random_sequences,
    tiny_model,
)


def load_actor(path, **options: bool) -> Actor:
    return Actor(load_causal_lm(path), **options)


@pytest.fixture(scope="module")
def qwen2_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("actor"), "qwen2")


def assert_equals_dense(actor, reference, lengths, *, temperature=0.7):
    sequences = random_sequences(lengths)
    masks = random_masks(sequences)
    batch = PackedBatch.from_sequences(sequences, masks)
    stats = actor(batch, temperature=temperature, with_entropy=True)
    logprobs, entropy = dense_logprobs(reference, sequences, masks, temperature)
    assert logprobs.std() > 0.1
    torch.testing.assert_close(stats.logprobs, logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats.entropy, entropy, atol=1e-5, rtol=1e-5)
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1)) / len(logprobs)
    (stats.logprobs @ weights + 0.1 * (stats.entropy @ weights)).backward()
    (logprobs @ weights + 0.1 * (entropy @ weights)).backward()
    expected, actual = gradients(reference), gradients(actor.model)
    assert expected.keys() == actual.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_packed_equals_one_sequence_at_a_time_in_every_family(architecture, tmp_path):
    path = tiny_model(tmp_path, architecture)
    actor = load_actor(path)
    assert not is_padded(actor.model)
    assert_equals_dense(actor, eager_model(path), [5, 1, 17, 24, 2, 9])


SIZES = {
    "vocab_size": 262,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
OWN_NAMES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 262, "initializer_range": 0.2}
HEAD_CONFIGS = {
    "cohere": lambda: hf.CohereConfig(**SIZES, logit_scale=0.25),
    "granite": lambda: hf.GraniteConfig(**SIZES, logits_scaling=4.0),
    "phi": lambda: hf.PhiConfig(**SIZES),  # its head has a bias
    "qwen2_tied": lambda: hf.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "gpt2": lambda: hf.GPT2Config(**OWN_NAMES),
}
# They cannot see several sequences in one row.
PADDED_CONFIGS = {
    "bloom": lambda: hf.BloomConfig(**OWN_NAMES, hidden_size=32),
    "gpt_oss": lambda: hf.GptOssConfig(**SIZES, head_dim=8, num_local_experts=4),
    "mamba": lambda: hf.MambaConfig(
        vocab_size=262, hidden_size=32, num_hidden_layers=2, initializer_range=0.2
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**SIZES, head_dim=8, **LINEAR, **EXPERTS),
}


@pytest.mark.parametrize("family", [*HEAD_CONFIGS, *PADDED_CONFIGS])
def test_every_kind_of_head_and_padded_rows_equal_the_dense_logits(family, tmp_path):
    config = (HEAD_CONFIGS | PADDED_CONFIGS)[family]()
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    head = model.get_output_embeddings()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    model.save_pretrained(tmp_path)
    reference, actor = eager_model(tmp_path), load_actor(tmp_path)
    assert is_padded(actor.model) == (family in PADDED_CONFIGS)
    assert_equals_dense(actor, reference, [5, 1, 17, 9], temperature=1.3)


def test_a_head_that_does_more_is_refused():
    config = hf.BertConfig(**SIZES, is_decoder=True)
    config._attn_implementation = PACKED_ATTENTION
    with pytest.raises(ConfigError, match="BertLMHeadModel computes its logits in a way of its"):
        check_own_numbers(hf.AutoModelForCausalLM.from_config(config).eval())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_keeps_the_gradients(qwen2_dir, use_reentrant):
    batch = full_batch(random_sequences([7, 30, 12]))
    plain, checkpointed = load_actor(qwen2_dir).train(), load_actor(qwen2_dir).train()
    checkpointed.gradient_checkpointing_enable(use_reentrant=use_reentrant)
    plain(batch).logprobs.mean().backward()
    checkpointed(batch).logprobs.mean().backward()
    expected, actual = gradients(plain), gradients(checkpointed)
    assert expected.keys() == actual.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, atol=1e-7, rtol=1e-6, msg=name)


def test_a_batch_without_targets_still_reaches_every_parameter(qwen2_dir):
    actor = load_actor(qwen2_dir)
    batch = PackedBatch.from_sequences([torch.tensor([7, 8, 9])], [torch.zeros(3, dtype=bool)])
    stats = actor(batch, with_entropy=True)
    assert stats.logprobs.shape == stats.entropy.shape == (0,)
    stats.logprobs.sum().backward()
    grads = gradients(actor.model)
    assert grads.keys() == dict(actor.model.named_parameters()).keys()
    assert all(not grad.any() for grad in grads.values())


TOP_K = 2


def save_qwen3_moe(path):
    """A model whose first layer is dense: only the second has a router."""
    config = hf.Qwen3MoeConfig(
        vocab_size=262, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, head_dim=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, num_experts=4,
        num_experts_per_tok=TOP_K, mlp_only_layers=[0], initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def gate_gradients(model):
    return {n: p.grad for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")}


def test_even_use_of_two_experts_costs_top_k():
    logits = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    assert load_balancing_losses([logits], [2], top_k=1).tolist() == pytest.approx([1.0])
    assert load_balancing_losses([logits, logits], [2], top_k=2).tolist() == pytest.approx([2.0])


def test_an_expert_that_takes_all_costs_twice_its_probability():
    # Both tokens go to the first of two experts, with probability 0.75: 2 * (1 * 0.75 + 0 * 0.25).
    logits = torch.tensor([[0.75, 0.25], [0.75, 0.25]]).log()
    assert load_balancing_losses([logits], [2], top_k=1).tolist() == pytest.approx([1.5])


def test_a_sequence_is_balanced_by_itself():
    # Alone, each sequence of one token uses one expert only: 2 * 0.75; together they would be even.
    logits = torch.tensor([[0.75, 0.25], [0.25, 0.75]]).log()
    assert load_balancing_losses([logits], [1, 1], top_k=1).tolist() == pytest.approx([1.5, 1.5])
    assert load_balancing_losses([logits], [2], top_k=1).tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_packed_row_has_the_router_loss_of_each_sequence_alone_and_its_gradient(family, tmp_path):
    path = tiny_model(tmp_path, family) if family == "mixtral" else save_qwen3_moe(tmp_path)
    sequences = random_sequences([5, 23, 1, 37])
    reference = eager_model(path)
    alone = [reference(input_ids=ids[None], output_router_logits=True) for ids in sequences]
    expected = torch.stack([output.aux_loss for output in alone])
    actor = load_actor(path, with_aux_loss=True)
    actual = actor(full_batch(sequences)).aux_loss
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
    actual.sum().backward()
    expected.sum().backward()
    gradients = gate_gradients(actor.model)
    assert gradients
    for name, gradient in gate_gradients(reference).items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-5)
