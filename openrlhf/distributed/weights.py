"""Full weights of a wrapped model by their Hugging Face names, whatever ZeRO stage holds them.

Adapters are merged on the way out, so the names are those of the base model. Every rank must
iterate: under ZeRO-3 each tensor is a collective.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from openrlhf.distributed.collectives import import_deepspeed, is_main
from openrlhf.distributed.folders import Write, nothing, take_tensors
from openrlhf.distributed.tensor_parallel import whole_layers
from openrlhf.utils.packing import base_model_of

EMPTY: Mapping[str, Any] = MappingProxyType({})
LAYER = re.compile(r"^.*?\.\d+\.")  # "model.layers.3."


def hf_model_of(module: nn.Module) -> nn.Module:
    """Return the Hugging Face (or PEFT) model inside a wrapper such as an actor; the module itself
    if there is none.
    """
    for candidate in module.modules():
        if hasattr(candidate, "save_pretrained"):
            return candidate
    return module


@contextmanager
def whole_parameters(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Make these parameters whole on every rank during the block."""
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        with import_deepspeed().zero.GatheredParameters(list(parameters)):
            yield
    else:
        with whole_layers(parameters):
            yield


def full_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of the Hugging Face model inside; valid until the next one."""
    yield from _tensors(base_model_of(hf_model_of(module)), "", set())


def total_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of whole parameters, also of those that ZeRO-3 has split; those in four bits
    count as the plain numbers that leave the trainer.
    """
    return sum(_whole_bytes(parameter) for parameter in parameters)


def _whole_bytes(parameter: Tensor) -> int:
    if (packed := getattr(parameter, "quant_state", None)) is not None:
        return int(packed.shape.numel() * packed.dtype.itemsize)
    return getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()


def exported_parameters(hf_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of what an export of this model holds: the trained weights of an
    adapter as they are, not merged, or all weights.
    """
    if not hasattr(hf_model, "peft_config"):
        yield from full_parameters(hf_model)
        return
    for name, parameter in hf_model.named_parameters():
        if parameter.requires_grad:
            with whole_parameters([parameter]):
                yield name, parameter.data


def master_parameters(hf_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `exported_parameters` in fp32: of 16-bit weights that are trained, the
    numbers that DeepSpeed's optimizer adds updates to. Every rank must iterate.

    A small update is lost when it is rounded to bf16: a weight of 1 moves by steps of 0.008.
    """
    from deepspeed.utils import safe_get_full_fp32_param  # noqa: PLC0415 - slow to import

    trained = {n: p for n, p in hf_model.named_parameters() if p.requires_grad}
    for name, tensor in exported_parameters(hf_model):
        if name in trained and tensor.dtype in (torch.bfloat16, torch.float16):
            yield name, safe_get_full_fp32_param(trained[name])
        else:
            yield name, tensor.float() if tensor.is_floating_point() else tensor


def stored_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in a saved file, full tensor) of the Hugging Face model inside, adapters merged.

    Every rank must iterate; a tensor is valid until the next one is asked for.
    """
    return as_stored(base_model_of(hf_model_of(module)), full_parameters(module))


def as_stored(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) as `save_pretrained` would write them; a layer's weights are copied.

    Transformers fuses some weights when it loads a model, such as the experts of a mixture; saved
    files and other engines know the parts. A model without such fusions streams through untouched.
    """
    if not getattr(model, "_weight_conversions", None):
        yield from tensors
        return

    def layer_of(named: tuple[str, Tensor]) -> str:
        match = LAYER.match(named[0])
        return match.group() if match else ""

    for _, layer in groupby(tensors, key=layer_of):
        state = {name: tensor.clone() for name, tensor in layer}
        yield from revert_weight_conversion(model, state).items()


def _tensors(
    model: nn.Module, prefix: str, seen: set[int], adapters: Mapping[str, Any] = EMPTY
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module; `adapters` are those of its own parameters, by name."""
    if hasattr(model, "parameter_name") and hasattr(model, "base_layer"):
        # PEFT puts a layer around another one for each parameter, such as those of experts.
        yield from _tensors(
            model.base_layer, prefix, seen, {**adapters, model.parameter_name: model}
        )
        return
    if hasattr(model, "get_delta_weight") and hasattr(model, "base_layer"):
        bias = getattr(model.base_layer, "bias", None)
        with whole_parameters(
            [parameter for parameter in model.parameters() if parameter is not bias]
        ):
            yield f"{prefix}weight", _merged(model.base_layer.weight, model)
        if bias is not None:
            with whole_parameters([bias]):
                yield f"{prefix}bias", bias.data
        return
    if hasattr(model, "modules_to_save") and hasattr(model, "original_module"):
        # PEFT keeps a module that is trained whole, and the one that it replaces.
        yield from _tensors(model.modules_to_save[model.active_adapters[0]], prefix, seen)
        return
    buffers = model.named_buffers(recurse=False)
    stored = [named for named in buffers if named[0] not in model._non_persistent_buffers_set]
    for name, tensor in (*model.named_parameters(recurse=False), *stored):
        if id(tensor) not in seen:  # tied weights are written once
            seen.add(id(tensor))
            layer = adapters.get(name)
            own = [] if layer is None else [*layer.lora_A.parameters(), *layer.lora_B.parameters()]
            with whole_parameters([tensor, *own]):
                yield f"{prefix}{name}", _plain(tensor) if layer is None else _merged(tensor, layer)
    for name, child in model.named_children():
        yield from _tensors(child, f"{prefix}{name}.", seen)


@torch.no_grad()
def _merged(parameter: Tensor, layer: Any) -> Tensor:
    """Return a weight with the adapters of its LoRA layer added, as floats; the sum is taken in
    fp32.
    """
    plain = _plain(parameter)
    weight = plain.float()
    for adapter in layer.active_adapters:
        weight = weight + layer.get_delta_weight(adapter)
    return weight.to(plain.dtype)


def _plain(tensor: Tensor) -> Tensor:
    """Return a weight as floats, also where it is held in 4 bits."""
    if not hasattr(tensor, "quant_state"):
        return tensor.data
    from bitsandbytes.functional import dequantize_4bit  # noqa: PLC0415 - QLoRA only

    return dequantize_4bit(tensor.data, tensor.quant_state)


class WeightAverage:
    """An exponential moving average of the trained weights (Polyak averaging), in fp32 in the main
    rank's CPU memory: average <- beta * average + (1 - beta) * weights.

    Starts at the weights as they are. Every rank must take part: under ZeRO-3 reading weights is a
    collective.
    """

    def __init__(self, hf_model: nn.Module, beta: float) -> None:
        self.hf_model = hf_model
        self.beta = beta
        self.dtypes: dict[str, torch.dtype] = {}
        self.held: dict[str, Tensor] = {}  # empty on the other ranks
        for name, tensor in exported_parameters(self.hf_model):
            if is_main():
                self.dtypes[name] = tensor.dtype
                self.held[name] = tensor.detach().to("cpu", torch.float32, copy=True)

    @torch.no_grad()
    def update(self) -> None:
        """Update the moving average with the current weights."""
        for name, tensor in exported_parameters(self.hf_model):
            if is_main():
                self.held[name].lerp_(tensor.to("cpu", torch.float32), 1 - self.beta)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in an export, average in the type of the weights) on the main rank."""
        for name, tensor in self.held.items():
            yield name, tensor.to(self.dtypes[name])

    def take(self, path: Path) -> Write:
        """Copy the average; return the function that writes the copy, as the main rank does."""
        return take_tensors(self.held, path) if is_main() else nothing

    def load(self, path: Path) -> None:
        """Load the average that `take` took."""
        if is_main():
            self.held = torch.load(path, weights_only=True)
