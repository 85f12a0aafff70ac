import pytest
import torch
import transformers

from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.utils.packing import PackedBatch
from tests.models.helpers import (
    OVERRIDES,
    dense_logprobs,
    eager_model,
    full_batch,
    gradients,
    random_masks,
    random_sequences,
    tiny_model,
)


def load_actor(path) -> Actor:
    return Actor(load_causal_lm(path))


@pytest.fixture(scope="module")
def qwen2_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("actor"), "qwen2")


def assert_equals_dense(actor, reference, lengths, *, temperature=0.7):
    sequences = random_sequences(lengths)
    masks = random_masks(sequences)
    batch = PackedBatch.from_sequences(sequences, masks)
    stats = actor(batch, temperature=temperature, with_entropy=True)
    logprobs, entropy = dense_logprobs(reference, sequences, masks, temperature)
    torch.testing.assert_close(stats.logprobs, logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats.entropy, entropy, atol=1e-5, rtol=1e-5)
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1)) / len(logprobs)
    (stats.logprobs @ weights + 0.1 * (stats.entropy @ weights)).backward()
    (logprobs @ weights + 0.1 * (entropy @ weights)).backward()
    expected, actual = gradients(reference), gradients(actor.model)
    assert expected.keys() == actual.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("architecture", sorted(OVERRIDES))
def test_packed_equals_one_sequence_at_a_time_in_every_family(architecture, tmp_path):
    path = tiny_model(tmp_path, architecture)
    assert_equals_dense(load_actor(path), eager_model(path), [5, 1, 17, 24, 2, 9])


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
HEAD_CONFIGS = {
    "cohere": lambda: transformers.CohereConfig(**SIZES, logit_scale=0.25),
    "granite": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=4.0),
    "phi": lambda: transformers.PhiConfig(**SIZES),  # its head has a bias
    "qwen2_tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=262),
}


@pytest.mark.parametrize("family", sorted(HEAD_CONFIGS))
def test_every_kind_of_head_equals_the_dense_logits(family, tmp_path):
    config = HEAD_CONFIGS[family]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    head = model.get_output_embeddings()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    model.save_pretrained(tmp_path)
    reference, actor = eager_model(tmp_path), load_actor(tmp_path)
    assert_equals_dense(actor, reference, [5, 1, 17, 9], temperature=1.3)


def test_tokens_of_a_neighbour_change_no_bit(qwen2_dir):
    actor = load_actor(qwen2_dir)
    first, second, third = random_sequences([20, 24, 33])
    other = random_sequences([24], seed=9)[0]
    before = actor(full_batch([first, second, third]), with_entropy=True)
    after = actor(full_batch([first, other, third]), with_entropy=True)
    for old, new in zip(before[:2], after[:2], strict=True):
        assert torch.equal(old[:19], new[:19])
        assert not torch.equal(old[19:42], new[19:42])
        assert torch.equal(old[42:], new[42:])


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
