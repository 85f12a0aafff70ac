"""Replacing the weights of a live vLLM model, complete or not at all.

On a CPU vLLM packs the weights of linear layers into opaque copies; `InPlaceUpdate` gives the
layers their plain weights back, loads them in place and packs them anew, the tied LM head too.
Elsewhere `LayerwiseUpdate` is vLLM's own layerwise reload. Both refuse an update that leaves a
parameter out or brings a tensor that nothing takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from openrlhf.engines.host_memory import use_heap_for_large_pieces
from openrlhf.engines.vllm_held import bit_sum, keeps_bits, plain_rows
from openrlhf.engines.vllm_probe import PackingCheck, has_experts
from openrlhf.engines.vllm_slots import Part, Scratch, Slot, end_to_end
from openrlhf.errors import WeightSyncError

MAX_NAMES_SHOWN = 5
NEVER_PACKED = {"bias"}  # vLLM notes no metadata of these

NamedTensor = tuple[str, Tensor]


class ModelUpdate(Protocol):
    """One way to replace the weights of a model."""

    def begin(self) -> None:
        """Get ready; what an earlier, unfinished update left behind is dropped."""

    def load(self, tensors: Iterable[NamedTensor]) -> None:
        """Load some tensors, each taken once; they are not looked at again afterwards."""

    def finish(self, names: Sequence[str]) -> None:
        """Make the weights live; `names` is all that was received."""


class InPlaceUpdate:
    """Replaces the weights of a model that lives whole on this CPU.

    A layer is packed as soon as it is complete, while its weights are still in a cache, and at once
    from the received tensor where that is the whole weight.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self.model = model
        self.model_config = model_config
        self.layers = [(name, layer) for name, layer in model.named_modules()]
        self.check = PackingCheck()
        self.scratch = Scratch()
        self.slots: dict[nn.Module, list[Slot]] = {}
        self.unpacked: dict[nn.Module, str] = {}  # layers that wait for packing, with their names
        self.known_names: frozenset[str] = frozenset()  # of a complete update, once one was seen
        self.num_taken = 0
        self.current_name = ""
        self.taken_names: set[str] = set()
        self.complete: list[nn.Module] = []  # layers that can be packed now
        # Places of the tensors that make up a slot, laid end to end; None where that is not so.
        self.stacks: dict[str, tuple[object, ...] | None] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Give every layer plain parameters again, with loaders that count what they take."""
        use_heap_for_large_pieces(is_on=True)
        self.slots, self.unpacked, self.complete = {}, {}, []
        seen: set[int] = set()
        for layer_name, layer in self.layers:
            if isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase):
                self.unpacked[layer] = layer_name
            plain = get_layerwise_info(layer).restore_metadata[0]
            before = dict(layer._parameters)
            for name in [*plain, *(layer._parameters.keys() & NEVER_PACKED)]:
                param = self._plain_parameter(layer, name, plain.get(name))
                if param is not None and id(param) not in seen:  # tied weights are filled once
                    seen.add(id(param))
                    slot = Slot(layer, name, f"{layer_name}.{name}", num_values(layer, param))
                    slot.is_temporary = param is not before.get(name)
                    self.slots.setdefault(layer, []).append(slot)
                    self._count_loads(param, slot)
        self.check.begin()

    @torch.no_grad()
    def load(self, tensors: Iterable[NamedTensor]) -> None:
        """Load tensors in place and pack the layers that are complete."""
        wanted: list[tuple[str, int]] = []  # names and numbers of values
        self.num_taken, self.taken_names = 0, set()
        try:
            self.model.load_weights(self._named(tensors, wanted))
        except (ValueError, KeyError, RuntimeError, AssertionError) as error:
            raise WeightSyncError(f"the engine cannot load {self.current_name}: {error}") from error
        num_given = sum(num_values for _, num_values in wanted)
        if self.num_taken != num_given:
            ignored = [name for name, _ in wanted if name not in self.taken_names]
            raise WeightSyncError(
                f"the engine took {self.num_taken} of {num_given} values; unknown: {some(ignored)}"
            )
        self._pack_complete()
        for layer in self.unpacked:
            for slot in self.slots.get(layer, ()):
                self._own(slot)  # the bucket is used again before the layer is complete

    @torch.no_grad()
    def finish(self, names: Sequence[str]) -> None:
        """Pack what is left; raises WeightSyncError when a parameter did not get all its values."""
        slots = [slot for slots in self.slots.values() for slot in slots]
        wrong = [str(slot) for slot in slots if slot.num_loaded != slot.num_expected]
        if wrong:
            absent = sorted(self.known_names - set(names))
            hint = f"; missing tensors: {some(absent)}" if absent else ""
            raise WeightSyncError(f"incomplete update: {some(wrong)}{hint}")
        for layer in list(self.unpacked):  # those without parameters of their own: a tied LM head
            self._pack(layer)
        for _, layer in self.layers:
            if is_deferred_attention_layer(layer):
                layer.process_weights_after_loading(self.model_config.dtype)
        if hasattr(self.model, "process_weights_after_loading"):
            self.model.process_weights_after_loading()
        self._check_plain()
        self.check.finish()
        use_heap_for_large_pieces(is_on=False)
        self.known_names = frozenset(names)

    def _plain_parameter(self, layer: nn.Module, name: str, meta: Tensor | None) -> Tensor | None:
        """The live parameter where it is still plain, else a new one to be filled."""
        current = layer._parameters.get(name)
        if current is None or meta is None:
            return current
        if current.shape == meta.shape and not has_experts(layer):
            return current
        plain = materialize_meta_tensor(restore_layer_refs(meta, layer))
        layer.register_parameter(name, plain)
        return plain

    def _count_loads(self, param: Any, slot: Slot) -> None:
        loader = getattr(param, "weight_loader", default_weight_loader)
        loader = getattr(loader, "counted_loader", loader)

        def counting(param: Tensor, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
            loaded = loaded_weight  # vLLM's name for it: experts are loaded by keywords
            slot.num_loaded += loaded.numel()
            self.num_taken += loaded.numel()
            self.taken_names.add(self.current_name)
            answer = kwargs.get("return_success")  # vLLM asks whether the expert is held here
            if slot.is_temporary:
                self._take(slot, param, Part(loaded, args, kwargs))
            else:
                answer = loader(param, loaded, *args, **kwargs)
                self._add_bits(slot, loaded.to(param.dtype))
            self._note_complete(slot.layer)
            return answer

        counting.counted_loader = loader  # type: ignore[attr-defined]
        param.weight_loader = counting

    def _take(self, slot: Slot, param: Any, part: Part) -> None:
        """Use a tensor where it lies, if it and its neighbours are the parameter; else copy it."""
        slot.parts.append(part)
        is_last = slot.num_loaded == slot.num_expected
        stack = self.stacks.get(slot.title)
        if stack is None or slot.is_split:
            self._copy(slot, param, part)
            if is_last and slot.title not in self.stacks and not slot.is_split:
                self._learn(slot, param)
        elif part.place != stack[len(slot.parts) - 1]:
            self._own(slot)
        elif is_last:
            joined = end_to_end([part.tensor for part in slot.parts], param)
            if joined is None:
                self._own(slot)
            else:
                param.data, slot.is_borrowed = joined, True

    def _copy(self, slot: Slot, param: Any, part: Part) -> None:
        if not slot.is_scratch:
            param.data, slot.is_scratch = self.scratch.take(param.data), True
        param.weight_loader.counted_loader(param, part.tensor, *part.args, **part.kwargs)

    def _learn(self, slot: Slot, param: Tensor) -> None:
        """Note whether the loaders laid the tensors end to end, as they are."""
        tensors = [part.tensor for part in slot.parts]
        is_stack = all(t.shape[1:] == param.shape[1:] for t in tensors)
        is_stack = is_stack and torch.equal(torch.cat(tensors), param)
        self.stacks[slot.title] = tuple(p.place for p in slot.parts) if is_stack else None

    def _own(self, slot: Slot) -> None:
        """Copy what was not copied yet: from now on its tensors need not stay."""
        param: Any = slot.layer._parameters[slot.name]
        if slot.is_borrowed:
            memory = self.scratch.take(param.data)
            param.data, slot.is_borrowed, slot.is_scratch = memory.copy_(param.data), False, True
        elif slot.parts and not slot.is_split and self.stacks.get(slot.title) is not None:
            for part in slot.parts:
                self._copy(slot, param, part)
        slot.is_split = slot.is_split or bool(slot.parts)
        slot.parts = []

    def _add_bits(self, slot: Slot, part: Tensor) -> None:
        is_summable = part.nbytes % 8 == 0 or part.numel() == slot.num_expected
        if slot.bits is not None:
            slot.bits = slot.bits + bit_sum([part]) if is_summable else None

    def _note_complete(self, layer: nn.Module) -> None:
        slots = self.slots[layer]
        if layer in self.unpacked and all(s.num_loaded == s.num_expected for s in slots):
            self.complete.append(layer)

    def _pack_complete(self) -> None:
        for layer in self.complete:
            self._pack(layer)
        self.complete = []

    def _named(
        self, tensors: Iterable[NamedTensor], wanted: list[tuple[str, int]]
    ) -> Iterator[NamedTensor]:
        for name, tensor in tensors:
            self._pack_complete()
            if not is_tied_copy(name, self.model_config):
                wanted.append((name, tensor.numel()))
                self.current_name = name
                yield name, tensor

    def _pack(self, layer: Any) -> None:
        name = self.unpacked.pop(layer)
        plain = dict(layer._parameters)
        layer.cpu_linear = None  # frees the last packed copy before the next one is made
        if has_experts(layer):  # or vLLM would keep the plain weights for packed ones
            layer.quant_method.moe_kernel = None
        self.check.around(
            layer, name, partial(layer.quant_method.process_weights_after_loading, layer)
        )
        for slot in self.slots.get(layer, ()):
            param = plain.get(slot.name)
            is_held = layer._parameters.get(slot.name) is param
            if slot.is_scratch and not is_held:
                self.scratch.give(param.data)
            elif slot.is_borrowed and is_held:  # the trainer goes on to change that memory
                param.data = param.data.clone()
            slot.is_borrowed = slot.is_scratch = False
            slot.parts = []

    def _check_plain(self) -> None:
        """Compare the bits of the parameters that are not packed with those received."""
        for slot in (slot for slots in self.slots.values() for slot in slots):
            param = slot.layer._parameters.get(slot.name)
            if slot.is_temporary or param is None or slot.bits is None or not keeps_bits(param):
                continue
            if bit_sum([plain_rows(slot.layer, param.data)]) != slot.bits % 2**64:
                raise WeightSyncError(f"{slot.title} does not hold what was received")


class LayerwiseUpdate:
    """vLLM's own layerwise reload, for any device and any number of workers."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self.model = model
        self.model_config = model_config
        self.known_names: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Put the model's parameters on the meta device and catch what is loaded."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights, info.load_numel = [], 0
        initialize_layerwise_reload(self.model)

    def load(self, tensors: Iterable[NamedTensor]) -> None:
        """Load tensors; those a layer holds back are copied, for the buffer is used again."""
        try:
            self.model.load_weights(iter(tensors))
        except (ValueError, KeyError) as error:
            raise WeightSyncError(f"the engine cannot load a bucket: {error}") from error
        for layer in self.model.modules():
            for _, bound in get_layerwise_info(layer).loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, Tensor) and key != "param" and not value.is_meta:
                        bound.arguments[key] = value.clone()

    def finish(self, names: Sequence[str]) -> None:
        """Make the weights live; raises WeightSyncError when something is missing."""
        absent = sorted(self.known_names - set(names))
        untouched = [
            name
            for name, layer in self.model.named_modules()
            if layer._parameters  # those with buffers only are made, not loaded
            and get_layerwise_info(layer).load_numel_total
            and not get_layerwise_info(layer).load_numel
            and not is_tied_copy(f"{name}.weight", self.model_config)
        ]
        finalize_layerwise_reload(self.model, self.model_config)
        # On a CPU a tied LM head, which loads nothing itself, would keep its packed old weights.
        for layer in self.model.modules():
            if getattr(layer, "cpu_linear", None) is not None and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
        if absent or (untouched and not self.known_names):
            raise WeightSyncError(f"incomplete update: missing {some(absent or untouched)}")
        self.known_names = frozenset(names)


def is_tied_copy(name: str, model_config: Any) -> bool:
    """Whether a tensor is an LM head that the model takes from its embedding."""
    is_tied = bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
    return is_tied and name.endswith(("lm_head.weight", "embed_out.weight"))


def num_values(layer: nn.Module, param: Tensor) -> int:
    """How many values a checkpoint holds for a parameter; only vLLM pads vocabularies."""
    rows = getattr(layer, "org_vocab_size", None)
    if rows is not None and param.ndim and param.shape[0] >= rows:
        return int(param.numel() // param.shape[0] * rows)
    return int(get_tensor_load_numel(param))


def some(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
