"""Attention over packed rows equals a loop over tokens, also where ranks share a row."""

from dataclasses import dataclass

import pytest
import torch

from openrlhf.models import packing
from openrlhf.models.packing import (
    PackedRow,
    ScoreOptions,
    chunk_of_row,
)
from openrlhf.utils.context_parallel import RowSlice


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


@pytest.mark.parametrize("query_block", [4, 1024])
@pytest.mark.parametrize(
    "options",
    [
        ScoreOptions(),
        ScoreOptions(sliding_window=1),
        ScoreOptions(softcap=0.7, sliding_window=3, scale=0.5),
    ],
    ids=str,
)
def test_row_attention_equals_a_loop_over_tokens(options, query_block, monkeypatch):
    monkeypatch.setattr(packing, "QUERY_BLOCK", query_block)
    lengths = (3, 12, 1, 11, 12, 2)
    q, k, v = random_qkv(sum(lengths))
    row = PackedRow.of_lengths(lengths, torch.device("cpu"))
    output = row.attention(q, k, v, options)
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    expected = torch.cat([naive_attention(*part, options) for part in parts])
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(output)
    expected_grads = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    grads = torch.autograd.grad((output * weights).sum(), (q, k, v))
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize(
    "options",
    [ScoreOptions(), ScoreOptions(sliding_window=5), ScoreOptions(softcap=0.7, scale=0.5)],
    ids=str,
)
def test_a_row_that_begins_inside_a_sequence_sees_the_keys_before_it(options, monkeypatch):
    monkeypatch.setattr(packing, "QUERY_BLOCK", 4)
    q, k, v = random_qkv(21)
    whole = PackedRow.of_lengths((13, 8), torch.device("cpu"))
    expected = whole.attention(q, k, v, options)[6:]
    part = PackedRow.of_lengths((7, 8), torch.device("cpu"), num_earlier=6)
    output = part.attention(q[6:], k, v, options)
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(output)
    expected_grads = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    torch.testing.assert_close(
        torch.autograd.grad((output * weights).sum(), (q, k, v)), expected_grads
    )


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """A place in a group that nobody joins."""

    rank: int
    size: int = 2


def test_a_rank_holds_a_chunk_from_either_end():
    first, second = (RowSlice(Place(rank), num_tokens=15) for rank in range(2))  # type: ignore[arg-type]
    assert first.positions_S.tolist() == [0, 1, 2, 3, 12, 13, 14, 15]  # 15 is padding
    assert second.positions_S.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


def test_a_chunk_sees_its_sequences_from_their_beginning():
    seen, row = chunk_of_row((4, 6), range(2, 7), CPU)
    assert (seen, row.seq_lengths, row.num_earlier) == (slice(0, 7), (2, 3), 2)
    seen, row = chunk_of_row((4, 6), range(4, 10), CPU)
    assert (seen, row.seq_lengths, row.num_earlier) == (slice(4, 10), (6,), 0)
    seen, row = chunk_of_row((4, 6), range(8, 10), CPU)
    assert (seen, row.seq_lengths, row.num_earlier) == (slice(4, 10), (2,), 4)
