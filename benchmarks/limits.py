"""The arithmetic limit of a step: its matrix products and attention, by themselves."""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from benchmarks.workload import Workload


def seconds(call: Callable[[], object], *, repeats: int = 5, warm_up: int = 2) -> float:
    """Median wall seconds of a call after warming up."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        start = time.monotonic()
        call()
        times.append(time.monotonic() - start)
    return statistics.median(times)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that are computed at once.

    Example: `MicroBatch([100, 60], head_rows=144)`
    """

    lengths: list[int]  # tokens of each sequence
    head_rows: int = 0  # tokens that the LM head sees
    backward: bool = True


def limit_s(
    model: Path, micro_batches: Sequence[MicroBatch], dtype: torch.dtype
) -> tuple[float, float]:
    """Return the seconds of the matrix products and the attention of micro-batches, and the rate of
    the products in GFLOP/s.

    Sequences of one length have their attention in one call. What is alike is measured once.
    """
    shape = json.loads((model / "config.json").read_text())
    hidden, inner, heads = (
        shape[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    size = shape.get("head_dim") or hidden // heads
    qkv = (heads + 2 * shape["num_key_value_heads"]) * size
    of_layer = [(hidden, qkv), (heads * size, hidden), (hidden, 2 * inner), (inner, hidden)]
    products_of = cache(partial(matrix_products_s, dtype=dtype))
    attention_of = cache(partial(attention_s, heads, size, dtype=dtype))
    products = attention = flops = 0.0
    for batch in micro_batches:
        tokens, passes = sum(batch.lengths), 3 if batch.backward else 1
        rows = [(tokens, *each, shape["num_hidden_layers"]) for each in of_layer]
        if batch.head_rows:
            rows.append((batch.head_rows, hidden, shape["vocab_size"], 1))
        for num_rows, num_in, num_out, count in rows:
            products += count * sum(products_of(num_rows, num_in, num_out)[:passes])
            flops += count * 2 * passes * num_rows * num_in * num_out
        for length, number in Counter(batch.lengths).items():
            took = attention_of(number, length, batch.backward)
            attention += took * shape["num_hidden_layers"]
    return products + attention, flops / products / 1e9


def limit_of_update(work: Workload) -> tuple[float, float]:
    """Return what `limit_s` does, of an update of GRPO at the sizes of its micro-batches."""
    length = work.most_prompt + work.max_new_tokens
    number = min(work.max_tokens // length, work.num_completions)
    batch = MicroBatch([length] * number, head_rows=number * work.max_new_tokens)
    num_micro_batches = -(-work.num_completions // number)
    return limit_s(work.model, [batch] * num_micro_batches, work.torch_dtype)


def attention_s(
    heads: int, size: int, number: int, length: int, backward: bool, *, dtype: torch.dtype
) -> float:
    """Return the seconds of causal attention of `number` sequences."""
    q = torch.randn(number, heads, length, size, dtype=dtype, requires_grad=backward)
    k, v = (torch.randn_like(q, requires_grad=backward) for _ in range(2))

    def attention() -> None:
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if backward:
            found.sum().backward()

    return seconds(attention, repeats=3, warm_up=1)


def matrix_products_s(
    num_rows: int, num_in: int, num_out: int, *, dtype: torch.dtype
) -> list[float]:
    """Return the seconds of the three products of a linear layer: forward, backward, gradient."""
    x, w = torch.randn(num_rows, num_in, dtype=dtype), torch.randn(num_out, num_in, dtype=dtype)
    grad = torch.randn(num_rows, num_out, dtype=dtype)
    products = (lambda: x @ w.T, lambda: grad @ w, lambda: grad.T @ x)
    return [seconds(product, repeats=3, warm_up=1) for product in products]
