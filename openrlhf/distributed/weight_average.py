"""An exponential moving average of a model's trained weights (Polyak averaging)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from openrlhf.distributed.weights import full_parameters, trained_parameters


class WeightAverage:
    """average <- beta * average + (1 - beta) * weights, in fp32 in the main rank's CPU memory.

    Starts at the weights as they are. Every rank must take part: under ZeRO-3 reading weights is a
    collective.
    """

    def __init__(self, hf_model: nn.Module, beta: float, *, is_main: bool) -> None:
        assert 0 <= beta < 1, beta
        self.hf_model = hf_model
        self.beta = beta
        self.is_main = is_main
        self.dtypes: dict[str, torch.dtype] = {}
        self.held: dict[str, Tensor] = {}  # empty on the other ranks
        for name, tensor in self._tensors():
            if is_main:
                self.dtypes[name] = tensor.dtype
                self.held[name] = tensor.detach().to("cpu", torch.float32, copy=True)

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after an optimizer step in."""
        for name, tensor in self._tensors():
            if self.is_main:
                self.held[name].lerp_(tensor.to("cpu", torch.float32), 1 - self.beta)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in an export, average in the type of the weights); nothing on the other ranks."""
        for name, tensor in self.held.items():
            yield name, tensor.to(self.dtypes[name])

    def save(self, path: Path) -> None:
        """Write the average to a file; the main rank does."""
        if self.is_main:
            try:
                safetensors.torch.save_file({n: t.contiguous() for n, t in self.held.items()}, path)
            except SafetensorError as error:  # what it makes of a full disk
                raise OSError(str(error)) from None

    def load(self, path: Path) -> None:
        """Take up the average that `save` wrote."""
        if self.is_main:
            found = safetensors.torch.load_file(path)
            assert found.keys() == self.held.keys(), "the average is of other weights"
            self.held = found

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        is_adapter = hasattr(self.hf_model, "peft_config")
        return (trained_parameters if is_adapter else full_parameters)(self.hf_model)
