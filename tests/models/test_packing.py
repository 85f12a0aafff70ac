"""Attention over packed rows equals a loop over tokens, also where ranks share a row."""

import pytest
import torch

from openrlhf.models import packing
from openrlhf.models.packing import (
    PackedRow,
    ScoreOptions,
)

CPU = torch.device("cpu")


def naive_attention(q_hQD, k_kSD, v_kSD, options):
    """Attention of one sequence, score by score."""
    num_heads, length, head_dim = q_hQD.shape
    output = torch.zeros(length, num_heads, head_dim, dtype=q_hQD.dtype)
    for head in range(num_heads):
        kv_head = head * k_kSD.size(0) // num_heads
        for i in range(length):
            first = max(0, i + 1 - (options.sliding_window or length))
            scores = k_kSD[kv_head, first : i + 1] @ q_hQD[head, i]
            scores = scores * (options.scale or head_dim**-0.5)
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            output[i, head] = scores.softmax(0) @ v_kSD[kv_head, first : i + 1]
    return output


def random_qkv(num_tokens, *, num_heads=4, num_kv_heads=2, head_dim=8):
    generator = torch.Generator().manual_seed(0)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [
        torch.randn(
            num_tokens, n, head_dim, generator=generator, dtype=torch.float64
        ).requires_grad_()
        for n in heads
    ]


@pytest.mark.parametrize(
    ("lengths", "num_earlier", "query_block"),
    [((3, 12, 12, 1, 11, 2), 0, 4), ((3, 12, 12, 1, 11, 2), 0, 1024), ((13, 7, 7, 8), 6, 4)],
)
@pytest.mark.parametrize(
    "options",
    [
        ScoreOptions(),
        ScoreOptions(sliding_window=1),
        ScoreOptions(sliding_window=5),
        ScoreOptions(softcap=0.7, sliding_window=3, scale=0.5),
    ],
    ids=str,
)
def test_row_attention_equals_a_loop_over_tokens_also_from_inside_a_sequence(
    options, lengths, num_earlier, query_block, monkeypatch
):
    monkeypatch.setattr(packing, "QUERY_BLOCK", query_block)
    q, k, v = random_qkv(sum(lengths))
    first, *others = lengths
    row = PackedRow.of_lengths((first - num_earlier, *others), CPU, num_earlier=num_earlier)
    output = row.attention(q[num_earlier:], k, v, options)
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    expected = torch.cat([naive_attention(*part, options) for part in parts])[num_earlier:]
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(output)
    expected_grads = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    grads = torch.autograd.grad((output * weights).sum(), (q, k, v))
    torch.testing.assert_close(grads, expected_grads)


def test_attention_of_short_sequences_in_16_bits_has_only_the_error_of_its_result():
    row = PackedRow.of_lengths([40, 66, 51], CPU)
    generator = torch.Generator().manual_seed(0)
    shapes = [(157, 4, 32), (157, 2, 32), (157, 2, 32), (157, 4, 32)]  # grouped queries
    states = [3 * torch.randn(shape, generator=generator).bfloat16() for shape in shapes]

    def of(dtype: torch.dtype) -> list[torch.Tensor]:
        *inputs, grad = (x.detach().to(dtype).requires_grad_() for x in states)
        result = row.attention(*inputs, ScoreOptions())
        result.backward(grad)
        return [result, *(x.grad for x in inputs)]

    for found, exact in zip(of(torch.bfloat16), of(torch.float64), strict=True):
        assert found.dtype == torch.bfloat16
        # Rounding to 8 bits alone is off by 1.7e-3; SDPA in bf16 by up to 6e-3.
        assert (found.double() - exact).norm() < 2.5e-3 * exact.norm()
