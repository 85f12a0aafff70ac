"""A functional check that packed weights are the weights that were received.

Packing is opaque, so each checked layer multiplies one fixed vector before and after it: with the
plain weight, and as the live layer does. The first update checks every layer, later ones a few in
turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openrlhf.errors import WeightSyncError

NUM_PER_UPDATE = 2  # layers checked in an update after the first one
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest value


class PackingCheck:
    """Chooses which layers to check, and compares."""

    def __init__(self) -> None:
        self.num_layers = 0  # packed layers of the model, known after the first update
        self.index = 0  # of the layer in this update
        self.first = 0  # the layer that is checked next

    def begin(self) -> None:
        """Start counting layers."""
        self.index = 0

    def finish(self) -> None:
        """Move on to the next layers."""
        is_first = self.num_layers == 0
        self.num_layers = self.index
        self.first = 0 if is_first else (self.first + NUM_PER_UPDATE) % max(self.num_layers, 1)

    def around(self, layer: Any, name: str, pack: Callable[[], None]) -> None:
        """Pack a layer, checked when it is its turn; raises WeightSyncError naming it."""
        weight = layer._parameters.get("weight")
        is_turn = self._is_turn()
        self.index += 1
        pack()
        if is_turn and weight is not None and weight.ndim == 2 and hasattr(layer, "cpu_linear"):
            compare(layer, weight, name)

    def _is_turn(self) -> bool:
        if not self.num_layers:
            return True
        return (self.index - self.first) % self.num_layers < NUM_PER_UPDATE


def compare(layer: Any, weight: Tensor, name: str) -> None:
    """Refuse a layer whose product with a fixed vector is not that of its plain weight (N, K)."""
    probe = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(0))
    probe = probe.to(weight.dtype)
    expected = torch.nn.functional.linear(probe, weight.data).float()
    held = layer.cpu_linear(probe, layer.weight, None).float()
    scale = expected.abs().max().clamp_min(1e-6)
    difference = (held - expected).abs().max() / scale
    if not difference <= TOLERANCE[weight.dtype]:
        raise WeightSyncError(f"{name} does not hold what was received (off by {difference:.1e})")
