"""Proof that the packed layers of a CPU model hold the weights they received, at every update.

Packed weights are opaque, so each layer multiplies unit vectors, which must give whole columns of
the received weight bit by bit, and now and then a dense vector, which looks at every value. Experts
of a mixture answer a dense vector each: one of a layer at every update, now and then all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from openrlhf.errors import WeightSyncError

NUM_PLACES, WIDTH = 2, 2  # columns of every layer at every update: neighbours, in either half
NUM_DENSE = 2  # layers that also get the dense vector, in an update after the first one
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest value


class PackingCheck:
    """Packs layers and compares what they held before and after."""

    def __init__(self) -> None:
        self.num_layers = 0  # packed layers of the model, known after the first update
        self.num_updates = 0
        self.index = 0  # of the layer in this update
        self.first = 0  # the layer that gets the dense vector next

    def begin(self) -> None:
        """Start counting layers."""
        self.index = 0

    def finish(self) -> None:
        """Move on to the next layers and columns."""
        is_first = self.num_layers == 0
        self.num_layers = self.index
        self.num_updates += 1
        self.first = 0 if is_first else (self.first + NUM_DENSE) % max(self.num_layers, 1)

    def around(self, layer: Any, name: str, pack: Callable[[], None]) -> None:
        """Pack a layer; raises WeightSyncError naming it when it holds something else then."""
        weight = layer._parameters.get("weight")
        is_dense = not self.num_layers or (self.index - self.first) % self.num_layers < NUM_DENSE
        self.index += 1
        plain = dict(layer._parameters)
        pack()
        if has_experts(layer):
            num_experts = len(plain["w13_weight"])
            one = [(self.num_updates + self.index) % num_experts]
            compare_experts(layer, plain, name, range(num_experts) if is_dense else one)
        elif weight is not None and weight.ndim == 2 and hasattr(layer, "cpu_linear"):
            columns = self._columns(weight.shape[1])
            compare(layer, weight.data, name, columns=columns, is_dense=is_dense)

    def _columns(self, num_columns: int) -> list[int]:
        """Others at every update; neighbours come from memory together."""
        part = max(num_columns // NUM_PLACES, 1)
        generator = torch.Generator().manual_seed(self.num_updates * 65_537 + self.index)
        place = int(torch.randint(max(part - WIDTH + 1, 1), (), generator=generator))
        starts = range(place, num_columns, part)
        return [k for start in starts for k in range(start, min(start + WIDTH, num_columns))]


def has_experts(layer: Any) -> bool:
    """Whether a layer is the experts of a mixture: packed, their weights keep their shapes."""
    return hasattr(getattr(layer, "quant_method", None), "moe_kernel")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def compare_experts(
    layer: Any, plain: Mapping[str, Tensor], name: str, experts: Sequence[int]
) -> None:
    """Refuse a layer whose experts (E of them) answer otherwise than their plain weights."""
    kind = layer.activation.value
    if kind not in ACTIVATIONS:
        raise WeightSyncError(f"{name}: experts with {kind} cannot be compared on a CPU")
    w13_weight, w2_weight = plain["w13_weight"], plain["w2_weight"]
    generator = torch.Generator().manual_seed(0)
    shape = (len(experts), w13_weight.shape[2])
    input_EH = torch.randn(shape, generator=generator).to(w13_weight.dtype)
    expected_EH = torch.stack(
        [
            _expert(x_H, e, plain, ACTIVATIONS[kind])
            for x_H, e in zip(input_EH, experts, strict=True)
        ]
    ).float()
    held_EH = torch.empty_like(input_EH)
    kernel = layer.quant_method.moe_kernel.fused_experts
    nothing = torch.empty(0)
    kernel.apply(
        held_EH,
        input_EH,
        layer.w13_weight,
        layer.w2_weight,
        torch.ones(len(experts), 1),
        torch.tensor(experts, dtype=torch.int32)[:, None],
        layer.activation,
        len(w13_weight),
        *(None, None, None),
        *(nothing, nothing),
        None,
        apply_router_weight_on_input=False,
    )
    scale = expected_EH.abs().amax(1).clamp_min(1e-6)
    off_E = (held_EH.float() - expected_EH).abs().amax(1) / scale
    if not off_E.max() <= TOLERANCE[w2_weight.dtype]:
        worst = experts[int(off_E.argmax())]
        raise WeightSyncError(
            f"{name} does not hold what was received: expert {worst} is off by {off_E.max():.1e}"
        )


def _expert(
    x_H: Tensor, expert: int, plain: Mapping[str, Tensor], act: Callable[[Tensor], Tensor]
) -> Tensor:
    """What one expert makes of a vector: down(act(gate(x)) * up(x))."""
    biases = [plain.get(name) for name in ("w13_bias", "w2_bias")]
    first, second = [None if bias is None else bias[expert] for bias in biases]
    gate, up = functional.linear(x_H, plain["w13_weight"][expert], first).chunk(2)
    return functional.linear(act(gate) * up, plain["w2_weight"][expert], second)


def compare(layer: Any, weight: Tensor, name: str, *, columns: list[int], is_dense: bool) -> None:
    """Refuse a layer whose products are not those of its plain weight (N, K).

    Products with unit vectors (`columns`, C of them) are columns, exactly; that with a dense one
    is compared up to rounding.
    """
    vectors_CK = torch.zeros(len(columns) + is_dense, weight.shape[1], dtype=weight.dtype)
    vectors_CK[range(len(columns)), columns] = 1
    if is_dense:
        vectors_CK[-1] = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
    held_CN = layer.cpu_linear(vectors_CK, layer.weight, None)
    if not torch.equal(held_CN[: len(columns)], weight[:, columns].T):
        raise WeightSyncError(f"{name} does not hold what was received; columns seen: {columns}")
    if is_dense:
        expected_N = torch.nn.functional.linear(vectors_CK[-1:], weight)[0].float()
        scale = expected_N.abs().max().clamp_min(1e-6)
        difference = (held_CN[-1].float() - expected_N).abs().max() / scale
        if not difference <= TOLERANCE[weight.dtype]:
            raise WeightSyncError(
                f"{name} does not hold what was received (off by {difference:.1e})"
            )
