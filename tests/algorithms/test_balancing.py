"""Splits of samples over ranks and micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.balancing import (
    balanced_partitions,
    fixed_batches,
    token_budget_batches,
)

some_lengths = st.lists(st.integers(0, 50), max_size=40)


def flatten(batches):
    return sorted(index for batch in batches for index in batch)


def totals(lengths, batches):
    return [sum(lengths[index] for index in batch) for batch in batches]


def test_partitions_by_hand():
    # 8 | 7 | then 6 to the second, 5 to the first, 4 to the first or second (13 each): the first
    assert balanced_partitions([8, 7, 6, 5, 4], 2) == [[0, 3, 4], [1, 2]]


@given(some_lengths, st.integers(1, 8))
def test_partitions_hold_every_sample_once_and_differ_by_at_most_the_longest(lengths, num_parts):
    parts = balanced_partitions(lengths, num_parts)
    assert len(parts) == num_parts
    assert flatten(parts) == list(range(len(lengths)))
    assert sum(1 for part in parts if part) == min(num_parts, len(lengths))
    sums = totals(lengths, parts)
    assert max(sums) - min(sums) <= max(lengths, default=0)


@given(some_lengths, st.integers(1, 60))
def test_batches_keep_the_budget_unless_one_sample_is_longer(lengths, max_tokens):
    batches = token_budget_batches(lengths, max_tokens)
    assert flatten(batches) == list(range(len(lengths)))
    for total, batch in zip(totals(lengths, batches), batches, strict=True):
        assert total <= max_tokens or len(batch) == 1


def test_batches_by_hand():
    assert token_budget_batches([5, 3, 9, 2, 4], 9) == [[2], [0, 4], [1, 3]]
    assert token_budget_batches([20, 1], 9) == [[0], [1]]
    assert token_budget_batches([], 9) == []


def test_fixed_batches_keep_the_order_and_the_rest():
    assert fixed_batches(5, 2) == [[0, 1], [2, 3], [4]]
    assert fixed_batches(0, 2) == []
