"""The router loss of each packed sequence equals Hugging Face's on that sequence alone."""

import pytest
import torch
import transformers

from openrlhf.models.actor import Actor, load_balancing_losses
from openrlhf.models.loading import load_causal_lm
from tests.models.helpers import eager_model, full_batch, random_sequences, tiny_model

TOP_K = 2


@pytest.fixture(scope="module")
def mixtral_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("router"), "mixtral")


def save_qwen3_moe(path):
    """A model whose first layer is dense: only the second has a router."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=262, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, head_dim=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, num_experts=4,
        num_experts_per_tok=TOP_K, mlp_only_layers=[0], initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def load_actor(path) -> Actor:
    return Actor(load_causal_lm(path), with_aux_loss=True)


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
def test_one_sequence_gives_the_loss_of_hugging_face_and_its_gradient(
    family, mixtral_dir, tmp_path
):
    path = mixtral_dir if family == "mixtral" else save_qwen3_moe(tmp_path)
    (ids,) = random_sequences([37])
    reference = eager_model(path)
    expected = reference(input_ids=ids[None], output_router_logits=True).aux_loss
    actor = load_actor(path)
    actual = actor(full_batch([ids])).aux_loss
    torch.testing.assert_close(actual, expected[None], atol=1e-6, rtol=0)
    actual.sum().backward()
    expected.backward()
    gradients = gate_gradients(actor.model)
    assert gradients
    for name, gradient in gate_gradients(reference).items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-5)


def test_a_packed_row_gives_the_loss_of_each_sequence_alone(mixtral_dir):
    sequences = random_sequences([5, 23, 1, 12])
    reference = eager_model(mixtral_dir)
    alone = [reference(input_ids=ids[None], output_router_logits=True) for ids in sequences]
    expected = torch.stack([output.aux_loss for output in alone])
    actual = load_actor(mixtral_dir)(full_batch(sequences)).aux_loss
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
