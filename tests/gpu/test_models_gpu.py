"""Packed models on CUDA against plain Hugging Face; needs torch, transformers and this package."""

import pytest
import torch

from openrlhf.models import packing
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from openrlhf.models.packing import PACKED_ATTENTION, PackedRow, ScoreOptions
from openrlhf.models.value_head import CriticModel
from openrlhf.utils.packing import PackedBatch
from tests.helpers import tiny_vision
from tests.helpers.vision_samples import Samples
from tests.models.helpers import (
    FAMILIES,
    command,
    dense_logprobs,
    eager_model,
    full_batch,
    gradients,
    random_lengths,
    random_masks,
    random_sequences,
    tiny_model,
)

pytestmark = pytest.mark.gpu


def load_actor(path, dtype, attention=PACKED_ATTENTION) -> Actor:
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    how = command(param_dtype=names[dtype], attn_implementation=attention)
    return Actor(load_causal_lm(path, how)).cuda()


@pytest.fixture(autouse=True)
def exact_fp32_products():
    """No TF32: fp32 is compared to 1e-4 here."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.parametrize("architecture", FAMILIES)
def test_packed_fp32_on_cuda_equals_one_sequence_at_a_time(architecture, tmp_path):
    path = tiny_model(tmp_path, architecture)
    actor, reference = load_actor(path, torch.float32), eager_model(path).cuda()
    sequences = [ids.cuda() for ids in random_sequences(random_lengths(24, 40))]
    masks = [mask.cuda() for mask in random_masks(sequences)]
    stats = actor(PackedBatch.from_sequences(sequences, masks), 0.7, True)
    logprobs, entropy = dense_logprobs(reference, sequences, masks, 0.7)
    torch.testing.assert_close(stats.logprobs, logprobs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stats.entropy, entropy, atol=1e-4, rtol=1e-4)
    stats.logprobs.mean().backward()
    logprobs.mean().backward()
    expected, actual = gradients(reference), gradients(actor.model)
    assert expected.keys() == actual.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_a_packed_row_with_images_on_cuda_equals_that_on_a_cpu(kind, tmp_path):
    batch = Samples(str(tiny_vision.make(kind, tmp_path))).batch()
    actor = load_actor(tmp_path, torch.float32)
    found = actor(batch.to("cuda")).logprobs
    expected = actor.cpu()(batch).logprobs
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_earlier", [0, 37])  # keys of the first sequence before its queries
@pytest.mark.parametrize("sliding_window", [None, 16])
def test_the_variable_length_kernel_equals_grouped_attention(sliding_window, num_earlier):
    lengths = (5, 64, 1, 200, 64)
    row = PackedRow.of_lengths(lengths, torch.device("cuda"), num_earlier=num_earlier)
    num_tokens = (sum(lengths), *[sum(lengths) + num_earlier] * 2)
    options = ScoreOptions(scale=0.1, sliding_window=sliding_window)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(n, heads, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n, heads in zip(num_tokens, (8, 2, 2), strict=True)
    )
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    fast = [x.requires_grad_() for x in (q, k, v)]
    assert packing.can_use_varlen(fast[0], fast[2], options)
    expected = packing.sdpa_row_attention(*exact, row, options)
    output = row.attention(*fast, options)
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=2e-2)
    weights = torch.randn(expected.shape, generator=generator, device="cuda", dtype=torch.double)
    grads = torch.autograd.grad((output.double() * weights).sum(), fast)
    expected_grads = torch.autograd.grad((expected * weights).sum(), exact)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.double(), expected_grad, atol=5e-2, rtol=5e-2)


def test_bf16_packed_stays_near_fp32(tmp_path):
    path = tiny_model(tmp_path, "qwen2", hidden_size=128, initializer_range=0.02)
    batch = full_batch([ids.cuda() for ids in random_sequences(random_lengths(24, 200))])
    expected = load_actor(path, torch.float32)(batch).logprobs
    logprobs = load_actor(path, torch.bfloat16)(batch).logprobs
    torch.testing.assert_close(logprobs, expected, atol=5e-2, rtol=0)


def test_tokens_of_a_neighbour_change_no_bit_on_cuda(tmp_path):
    path = tiny_model(tmp_path, "qwen2", hidden_size=128)
    for dtype in (torch.float32, torch.bfloat16):
        actor = load_actor(path, dtype)
        first, second, third = (ids.cuda() for ids in random_sequences([20, 24, 33]))
        other = random_sequences([24], seed=9)[0].cuda()
        before = actor(full_batch([first, second, third])).logprobs
        after = actor(full_batch([first, other, third])).logprobs
        assert torch.equal(before[:19], after[:19])
        assert torch.equal(before[42:], after[42:])


def test_value_heads_on_cuda_equal_the_cpu(tmp_path):
    path = tiny_model(tmp_path, "llama")
    sequences = random_sequences(random_lengths(12, 30))
    model = CriticModel(load_sequence_model(path, command(param_dtype="fp32")))
    expected = model(full_batch(sequences))
    actual = model.cuda()(full_batch(sequences).to("cuda"))
    torch.testing.assert_close(actual.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_no_forward_or_backward_holds_all_logits(tmp_path):
    path = tiny_model(tmp_path, "qwen2", vocab_size=65536)
    actor = load_actor(path, torch.bfloat16)
    batch = full_batch([ids.cuda() for ids in random_sequences([512] * 64)])
    torch.cuda.reset_peak_memory_stats()
    actor(batch).logprobs.mean().backward()
    all_logits = 64 * 511 * 65536 * 4
    assert torch.cuda.max_memory_allocated() < all_logits / 4
