"""Trained parameters that live in shared memory, so that engines read them where they are trained.

That spares a copy at every weight update. Only parameters with memory of their own can move: those
that DeepSpeed keeps as parts of a flat buffer, or on another device, stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from openrlhf.engines.shared_memory import Segment, module_of
from openrlhf.errors import WeightSyncError
from openrlhf.utils.tensors import align, as_bytes


class SharedParameters:
    """The parameters of one model in one piece of shared memory."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Move what can be moved, values and all, as far as there is memory for it.

        Weights of one module lie end to end, as engines merge some of them (query, key and value).
        """
        movable = sorted(
            ((name, p) for name, p in parameters if _has_own_memory(p)),
            key=lambda pair: (module_of(pair[0]), pair[0].rpartition(".")[2]),
        )
        num_bytes = sum(align(p.nbytes) for _, p in movable)
        self.segment = Segment(max(num_bytes, 1))
        self._memory = self.segment.mapped()
        begin = 0
        try:
            for _, parameter in movable:
                self.segment.put(as_bytes(parameter), begin)
                data = self._memory[begin : begin + parameter.nbytes]
                parameter.data = data.view(parameter.dtype).view(parameter.shape)
                begin += align(parameter.nbytes)
        except WeightSyncError:  # no memory: the others are copied at every update
            pass

    def offset_of(self, tensor: Tensor) -> int | None:
        """Byte offset of a tensor in the segment; None when it does not lie there."""
        offset = tensor.data_ptr() - self._memory.data_ptr()
        is_inside = offset >= 0 and offset + tensor.nbytes <= len(self._memory)
        return offset if is_inside and tensor.is_cpu and tensor.is_contiguous() else None


def _has_own_memory(parameter: nn.Parameter) -> bool:
    return (
        parameter.is_cpu
        and parameter.is_contiguous()
        and parameter.nbytes > 0
        and parameter.untyped_storage().nbytes() == parameter.nbytes
    )
