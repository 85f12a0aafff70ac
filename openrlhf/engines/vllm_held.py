"""What the plain parameters of a vLLM model hold, as sums of their bits.

A sum of words does not depend on how tensors were merged or cut, so that of all parameters is that
of all tensors which were sent, although vLLM merges some and tensor parallel workers hold parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from openrlhf.errors import WeightSyncError

WORD_BYTES = 8


class HeldBits(NamedTuple):
    """Bit sums in one worker, modulo 2^64."""

    sent: int  # of what was received
    whole: int  # of parameters that every worker holds
    parts: int  # of parameters that workers hold parts of


def bit_sum(tensors: Iterable[Tensor]) -> int:
    """Sum of the 64-bit words of some tensors, modulo 2^64: the same for a tensor and its parts.

    Parts are whole numbers of words, but for the last bytes of the tensor.
    """
    total = 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        num_whole = len(data) // WORD_BYTES * WORD_BYTES
        total += int(data[:num_whole].view(torch.int64).sum()) if num_whole else 0
        total += int.from_bytes(bytes(data[num_whole:].tolist()), "little")
    return total % 2**64


@dataclass
class SentBits:
    """What was received in an update."""

    total: int = 0
    dtypes: set[torch.dtype] = field(default_factory=set)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor in."""
        self.total += bit_sum([tensor])
        self.dtypes.add(tensor.dtype)


def held_bits(model: nn.Module, sent: SentBits) -> HeldBits | None:
    """Sums over the parameters of this worker; None where they cannot be compared.

    That is so where a parameter is packed, has another type, is loaded by a function that changes
    values, is cut inside a word, or where workers hold the same key-value heads.
    """
    whole = parts = 0
    seen: set[int] = set()
    for layer in model.modules():
        for param in layer._parameters.values():
            if param is None or id(param) in seen:
                continue
            seen.add(id(param))
            is_part = _is_part(layer, param)
            is_cut_well = not is_part or _is_cut_between_words(layer, param)
            if not (keeps_bits(param) and is_cut_well and param.dtype in sent.dtypes):
                return None
            bits = bit_sum([plain_rows(layer, param.data)])
            whole, parts = (whole, parts + bits) if is_part else (whole + bits, parts)
    return HeldBits(sent.total % 2**64, whole % 2**64, parts % 2**64)


def check_held(workers: Sequence[HeldBits | None]) -> bool:
    """Raise WeightSyncError unless the workers of an engine hold together what was sent; False
    where that cannot be told.
    """
    known = [bits for bits in workers if bits is not None]
    if len(known) < len(workers):
        return False
    first = known[0]
    if any((bits.sent, bits.whole) != (first.sent, first.whole) for bits in known):
        raise WeightSyncError("the workers of a tensor parallel engine hold different weights")
    if (first.whole + sum(bits.parts for bits in known)) % 2**64 != first.sent:
        raise WeightSyncError("the engine does not hold what was received")
    return True


def keeps_bits(param: Any) -> bool:
    """Whether the parameter is plain and its loader copies values as they are: some models load
    log(-x).
    """
    loader = getattr(param, "weight_loader", default_weight_loader)
    loader = getattr(loader, "counted_loader", loader)
    owner = getattr(loader, "__self__", None)
    is_copy = loader is default_weight_loader
    return param.numel() > 0 and (
        is_copy or isinstance(owner, (LinearBase, VocabParallelEmbedding))
    )


def plain_rows(layer: nn.Module, data: Tensor) -> Tensor:
    """The rows that come from a checkpoint; vLLM pads vocabularies."""
    if isinstance(layer, VocabParallelEmbedding):
        return data[: layer.shard_indices.num_org_elements]
    return data


def _is_part(layer: nn.Module, param: Tensor) -> bool:
    if getattr(layer, "tp_size", 1) == 1:
        return False
    is_row_weight = isinstance(layer, RowParallelLinear) and param.ndim > 1
    return is_row_weight or isinstance(layer, (ColumnParallelLinear, VocabParallelEmbedding))


def _is_cut_between_words(layer: nn.Module, param: Tensor) -> bool:
    has_copies = isinstance(layer, QKVParallelLinear) and layer.num_kv_head_replicas > 1
    return not has_copies and param.shape[-1] * param.element_size() % WORD_BYTES == 0
