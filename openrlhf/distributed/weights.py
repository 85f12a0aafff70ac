"""Full weights of a wrapped model by their Hugging Face names, whatever ZeRO stage holds them.

Adapters are merged on the way out, so the names are those of the base model. Every rank must
iterate: under ZeRO-3 each bucket is a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from openrlhf.distributed.backend import import_deepspeed
from openrlhf.distributed.tensor_parallel import whole_layers

GATHER_BUCKET_NUMEL = 500_000_000  # parameters that are whole at the same time
# Biases, and what Mamba layers have instead: experts and heads may stack them to any shape.
VECTOR_SUFFIXES = ("bias", ".A_log", ".D")


def hf_model_of(module: nn.Module) -> nn.Module:
    """The Hugging Face (or PEFT) model inside a wrapper such as an actor; the module itself when
    there is none.
    """
    for candidate in module.modules():
        if hasattr(candidate, "save_pretrained"):
            return candidate
    return module


def base_model_of(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def ids_of_matrices(module: nn.Module) -> set[int]:
    """Parameters of two dimensions and more, by `id`, that are no stack of biases or norms."""
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
    """A block in which these parameters are whole on every rank."""
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        with import_deepspeed().zero.GatheredParameters(list(parameters)):
            yield
    else:
        with whole_layers(parameters):
            yield


def full_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of the Hugging Face model inside; valid until the next is asked for."""
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


def to_cpu(tensors: Iterable[tuple[str, Tensor]], *, is_main: bool) -> dict[str, Tensor]:
    """Copies in CPU memory on the main rank, an empty dictionary elsewhere; all ranks must call."""
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
    """The layer's weight as floats, whatever it is kept in."""
    if not hasattr(layer.weight, "quant_state"):
        return layer.weight.data
    from peft.utils.integrations import dequantize_module_weight  # noqa: PLC0415 - QLoRA only

    return dequantize_module_weight(layer).data
