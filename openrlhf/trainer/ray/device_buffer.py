"""A buffer on the GPU into which tensors are packed for vLLM's weight-transfer backends.

Knows the layout vLLM expects (tensors one behind another, without gaps) and how CUDA lends memory
to another process; not who reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openrlhf.engines.base import NamedTensors, WeightBucket
from openrlhf.utils.tensors import as_bytes, dtype_name


class GpuMemory:
    """What the transports between GPUs ask of CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)

    def allocate(self, num_bytes: int) -> Tensor:
        """A buffer, (num_bytes,) uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def handle(self, buffer: Tensor) -> dict[str, tuple[Any, ...]]:
        """{physical id of the GPU: how another process opens the buffer}; one reader each time."""
        # Registers CUDA's reductions when imported, which a process without CUDA need not do.
        from torch.multiprocessing.reductions import reduce_tensor  # noqa: PLC0415 - see above

        _, arguments = reduce_tensor(buffer)
        return {str(torch.cuda.get_device_properties(self.device).uuid): arguments}

    def synchronize(self) -> None:
        """Wait until what was copied lies in the buffer."""
        torch.cuda.current_stream(self.device).synchronize()

    def stream(self) -> Any:
        """The stream that copies into the buffer are queued on."""
        return torch.cuda.current_stream(self.device)

    def collect(self) -> None:
        """Take back buffers that other processes have let go of."""
        torch.cuda.ipc_collect()


@dataclass
class Packing:
    """Tensors of one type that lie in a buffer one behind another, without gaps."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)

    def has_room(self, tensor: Tensor, bucket_bytes: int) -> bool:
        """Whether a tensor may be added; a first one may be larger than a bucket.

        vLLM reads each tensor where it lies: types of different sizes would not be aligned.
        """
        if not self.names:
            return True
        is_same = self.dtypes[-1] == dtype_name(tensor.dtype)
        return is_same and self.num_bytes + tensor.nbytes <= bucket_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Note the next tensor."""
        self.offsets.append(self.num_bytes)
        self.names.append(name)
        self.dtypes.append(dtype_name(tensor.dtype))
        self.shapes.append(list(tensor.shape))
        self.sizes.append(tensor.nbytes)

    def update_info(self, **more: object) -> dict[str, object]:
        """What vLLM's backends are told about these tensors."""
        return {
            "names": self.names,
            "dtype_names": self.dtypes,
            "shapes": self.shapes,
            **more,
        }

    def bucket(self, update_info: dict[str, object]) -> WeightBucket:
        """The tensors as a bucket of one of vLLM's backends."""
        return WeightBucket(
            tuple(self.names),
            tuple(self.dtypes),
            tuple(tuple(shape) for shape in self.shapes),
            tuple(self.offsets),
            self.num_bytes,
            {"update_info": update_info},
        )


class DeviceBuffer:
    """The memory on the GPU that tensors are packed into; a rank without a reader needs none."""

    def __init__(self, bucket_bytes: int, memory: GpuMemory, *, is_used: bool = True) -> None:
        self.bucket_bytes = bucket_bytes
        self.memory = memory
        self.is_used = is_used
        self.bytes: Tensor | None = None
        self.handle: dict[str, tuple[Any, ...]] = {}

    def packed(self, tensors: NamedTensors) -> Iterator[Packing]:
        """Fill the buffer again and again; it is overwritten when the next packing is asked for."""
        packing = Packing()
        for name, tensor in tensors:
            if not packing.has_room(tensor, self.bucket_bytes):
                yield packing
                packing = Packing()
            if self.is_used:
                self._put(tensor, packing.num_bytes)
            packing.add(name, tensor)
        if packing.names:
            yield packing

    def _put(self, tensor: Tensor, begin: int) -> None:
        end = begin + tensor.nbytes
        if self.bytes is None or self.bytes.numel() < end:
            assert begin == 0, "only a first tensor may be larger than a bucket"
            self.bytes, self.handle = self.memory.allocate(max(end, self.bucket_bytes)), {}
        self.bytes[begin:end].copy_(as_bytes(tensor))

    def exported(self) -> dict[str, tuple[Any, ...]]:
        """How the engine on this GPU opens the buffer: the same answer until it is a new one."""
        if self.is_used and not self.handle:
            assert self.bytes is not None
            self.handle = self.memory.handle(self.bytes)
        return self.handle

    def free(self) -> None:
        """Let go of the memory."""
        self.bytes, self.handle = None, {}
