"""Full weights of a wrapped model by their Hugging Face names, whatever ZeRO stage holds them.

Adapters are merged on the way out, so the names are those of the base model. Every rank must
iterate: under ZeRO-3 each bucket is a collective.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from openrlhf.distributed.backend import import_deepspeed
from openrlhf.distributed.tensor_parallel import whole_layers

GATHER_BUCKET_NUMEL = 500_000_000  # parameters that are whole at the same time
# Biases, and what Mamba layers have instead: experts and heads may stack them to any shape.
VECTOR_SUFFIXES = ("bias", ".A_log", ".D")
LAYER = re.compile(r"^.*?\.\d+\.")  # "model.layers.3."


def hf_model_of(module: nn.Module) -> nn.Module:
    """Return the Hugging Face (or PEFT) model inside a wrapper such as an actor; the module itself
    if there is none.
    """
    for candidate in module.modules():
        if hasattr(candidate, "save_pretrained"):
            return candidate
    return module


def base_model_of(model: nn.Module) -> nn.Module:
    """Return the Hugging Face model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def ids_of_matrices(module: nn.Module) -> set[int]:
    """Return the `id` of parameters of two or more dimensions, but no stacks of biases or norms."""
    found = set()
    for name, owner in module.named_modules():
        if type(owner).__name__.endswith("Norm"):  # of each head in some families
            continue
        for leaf, parameter in owner.named_parameters(recurse=False):
            num_dims = len(getattr(parameter, "ds_shape", parameter.shape))
            if num_dims >= 2 and not f"{name}.{leaf}".endswith(VECTOR_SUFFIXES):
                found.add(id(parameter))
    return found


@contextmanager
def gathered(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Make these parameters whole on every rank during the block."""
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        with import_deepspeed().zero.GatheredParameters(list(parameters)):
            yield
    else:
        with whole_layers(parameters):
            yield


def full_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of the Hugging Face model inside; valid until the next one."""
    units = list(_units(base_model_of(hf_model_of(module))))
    for bucket in _buckets(units):
        parameters = [p for _, owner, names in bucket for p in _parameters(owner, names)]
        with gathered(parameters), torch.no_grad():
            for prefix, owner, names in bucket:
                yield from _tensors(prefix, owner, names)


def trained_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in the module, full tensor) of the parameters that are trained: adapters as they are,
    not merged.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            with gathered([parameter]):
                yield name, parameter.data


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
    for _, layer in groupby(tensors, key=_layer_of):
        state = {name: tensor.clone() for name, tensor in layer}
        yield from revert_weight_conversion(model, state).items()


def _layer_of(named: tuple[str, Tensor]) -> str:
    match = LAYER.match(named[0])
    return match.group() if match else ""


def to_cpu(tensors: Iterable[tuple[str, Tensor]], *, is_main: bool) -> dict[str, Tensor]:
    """Return copies in CPU memory on the main rank, nothing elsewhere; all ranks must call."""
    state = {}
    for name, tensor in tensors:
        if is_main:
            state[name] = tensor.detach().to("cpu", copy=True)
    return state


# A unit is what can be written out together: (name prefix, module, its own tensors' names); a LoRA
# layer is one unit with no names, for its single weight is made of several parameters.
Unit = tuple[str, nn.Module, tuple[str, ...]]


def _units(model: nn.Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[Unit]:
    seen = set() if seen is None else seen
    if hasattr(model, "get_delta_weight") and hasattr(model, "base_layer"):
        yield prefix, model, ()
        return
    if hasattr(model, "modules_to_save") and hasattr(model, "original_module"):
        # PEFT keeps a module that is trained whole beside the one that it stands for.
        yield from _units(model.modules_to_save[model.active_adapters[0]], prefix, seen)
        return
    names = []
    for name, tensor in (*model.named_parameters(recurse=False), *_stored_buffers(model)):
        if id(tensor) not in seen:  # tied weights are written once
            seen.add(id(tensor))
            names.append(name)
    if names:
        yield prefix, model, tuple(names)
    for name, child in model.named_children():
        yield from _units(child, f"{prefix}{name}.", seen)


def _stored_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _buckets(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    bucket: list[Unit] = []
    numel = 0
    for unit in units:
        size = sum(getattr(p, "ds_numel", p.numel()) for p in _parameters(unit[1], unit[2]))
        if bucket and numel + size > GATHER_BUCKET_NUMEL:
            yield bucket
            bucket, numel = [], 0
        bucket.append(unit)
        numel += size
    if bucket:
        yield bucket


def _parameters(owner: nn.Module, names: Sequence[str]) -> list[nn.Parameter]:
    if names:
        own = dict(owner.named_parameters(recurse=False))
        return [own[name] for name in names if name in own]
    return list(owner.parameters())


def _tensors(prefix: str, owner: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        yield prefix + name, getattr(owner, name).data
    if not names:
        base = owner.base_layer
        weight = _plain_weight(base)
        for adapter in owner.active_adapters:
            weight = weight + owner.get_delta_weight(adapter).to(weight.dtype)
        yield prefix + "weight", weight
        if getattr(base, "bias", None) is not None:
            yield prefix + "bias", base.bias.data


def _plain_weight(layer: nn.Module) -> Tensor:
    """Return the layer's weight as floats, whatever it is kept in."""
    if not hasattr(layer.weight, "quant_state"):
        return layer.weight.data
    from peft.utils.integrations import dequantize_module_weight  # noqa: PLC0415 - QLoRA only

    return dequantize_module_weight(layer).data


class WeightAverage:
    """An exponential moving average of the trained weights (Polyak averaging), in fp32 in the main
    rank's CPU memory: average <- beta * average + (1 - beta) * weights.

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
        """Update the moving average with the current weights."""
        for name, tensor in self._tensors():
            if self.is_main:
                self.held[name].lerp_(tensor.to("cpu", torch.float32), 1 - self.beta)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in an export, average in the type of the weights) on the main rank."""
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
        """Load the average that `save` wrote."""
        if self.is_main:
            found = safetensors.torch.load_file(path)
            assert found.keys() == self.held.keys(), "the average is of other weights"
            self.held = found

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        is_adapter = hasattr(self.hf_model, "peft_config")
        return (trained_parameters if is_adapter else full_parameters)(self.hf_model)
