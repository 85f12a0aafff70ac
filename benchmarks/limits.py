"""The arithmetic limit of an update: its matrix products and attention, by themselves."""

import json
import statistics
import time
from collections.abc import Callable

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


def limit_s(work: Workload) -> tuple[float, float]:
    """Return the seconds of the matrix products and the attention of an update, forward and
    backward at the sizes of its micro-batches, and the rate of the products in GFLOP/s.
    """
    shape = json.loads((work.model / "config.json").read_text())
    hidden, inner, heads = (
        shape[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    size = shape.get("head_dim") or hidden // heads
    length = work.most_prompt + work.max_new_tokens
    in_micro_batch = min(work.max_tokens // length, work.num_completions)
    num_micro_batches = -(-work.num_completions // in_micro_batch)
    tokens, actions = in_micro_batch * length, in_micro_batch * work.max_new_tokens
    qkv = (heads + 2 * shape["num_key_value_heads"]) * size
    of_layer = [(hidden, qkv), (heads * size, hidden), (hidden, 2 * inner), (inner, hidden)]
    rows = [(tokens, *each, shape["num_hidden_layers"]) for each in of_layer]
    rows.append((actions, hidden, shape["vocab_size"], 1))
    products_s = flops = 0.0
    for num_rows, num_in, num_out, count in rows:
        products_s += count * matrix_products_s(num_rows, num_in, num_out, work.torch_dtype)
        flops += count * 6 * num_rows * num_in * num_out

    q = torch.randn(in_micro_batch, heads, length, size, dtype=work.torch_dtype, requires_grad=True)
    k, v = (torch.randn_like(q, requires_grad=True) for _ in range(2))

    def attention() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    attention_s = seconds(attention, repeats=3, warm_up=1) * shape["num_hidden_layers"]
    return (products_s + attention_s) * num_micro_batches, flops / products_s / 1e9


def matrix_products_s(num_rows: int, num_in: int, num_out: int, dtype: torch.dtype) -> float:
    """Return the seconds of the three products of a linear layer, forward and backward."""
    x, w = torch.randn(num_rows, num_in, dtype=dtype), torch.randn(num_out, num_in, dtype=dtype)
    grad = torch.randn(num_rows, num_out, dtype=dtype)
    products = (lambda: x @ w.T, lambda: grad @ w, lambda: grad.T @ x)
    return sum(seconds(product, repeats=3, warm_up=1) for product in products)
