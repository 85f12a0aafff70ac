"""Buckets of weights on their way from the trainer to an engine.

Tensors are packed into a flat buffer. A process of the same node opens the buffer by a handle
(shared memory, CUDA IPC); any other one receives a broadcast of it (gloo, NCCL). Where memory and
groups of a CPU and a GPU differ they have the same calls, and only this file knows which is used.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.engines.base import NamedTensors, WeightBucket
from openrlhf.errors import WeightSyncError
from openrlhf.utils.tensors import align, as_bytes, dtype_name, tensors_in

NUM_BUFFERS = 2  # one is filled while the other one is read
GROUP_TIMEOUT = timedelta(seconds=600)

Handle = tuple[Any, ...]  # opens a buffer in another process of the same place


class BufferMemory(Protocol):
    """Memory that other processes of the same place can open."""

    device: torch.device
    bucket_bytes: int

    @property
    def place(self) -> str:
        """The node or GPU; processes in one place open each other's buffers."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a buffer of at least `num_bytes`, (n,) uint8."""

    def export(self, buffer: Tensor) -> Handle:
        """Return the handle of a buffer; export each buffer once."""

    def open(self, handle: Handle) -> Tensor:
        """Open a buffer that another process exported, (n,) uint8."""

    def synchronize(self) -> None:
        """Wait until all copies into and out of buffers are done."""

    def release(self, buffers: list[Tensor]) -> None:
        """Give buffers back that no reader needs any more."""

    def close(self) -> None:
        """Let go of the buffers that were opened; the update they belong to is over."""


class HostMemory:
    """Shared memory of one node. Readers open its descriptor through /proc, so it has no name and
    ends with the processes that use it.
    """

    device = torch.device("cpu")
    bucket_bytes = 64 << 20

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # new pages cost more than the copy into them
        self._opened: dict[Handle, Tensor] = {}

    @property
    def place(self) -> str:
        """The node, or the container where processes of others are not seen."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a released buffer that is large enough, or a new one; raise WeightSyncError where
        the node has no room.
        """
        fitting = [k for k, buffer in enumerate(self._free) if len(buffer) >= num_bytes]
        if fitting:
            return self._free.pop(fitting[0])
        num_free = shutil.disk_usage("/dev/shm").free
        if num_free < num_bytes:
            raise WeightSyncError(
                f"/dev/shm has {num_free >> 20} MiB left, and a bucket of weights needs "
                f"{num_bytes >> 20}. Give the container more shared memory (Docker's shm-size)."
            )
        return _flat(torch.UntypedStorage._new_using_fd_cpu(num_bytes))

    def export(self, buffer: Tensor) -> Handle:
        """Return process, descriptor, inode (descriptors are used again) and size."""
        descriptor, num_bytes = buffer.untyped_storage()._share_fd_cpu_()
        return (os.getpid(), descriptor, os.fstat(descriptor).st_ino, num_bytes)

    def open(self, handle: Handle) -> Tensor:
        """Map the buffer, once for all buckets that come in it."""
        if handle not in self._opened:
            if len(self._opened) == NUM_BUFFERS:  # the writer has a larger one in its place
                del self._opened[next(iter(self._opened))]
            self._opened[handle] = _mapped(*handle)
        return self._opened[handle]

    def synchronize(self) -> None:
        """Copies of a CPU are done when the call returns."""

    def release(self, buffers: list[Tensor]) -> None:
        """Keep them for the next update."""
        self._free += buffers

    def close(self) -> None:
        """Keep the mappings: the writer uses the same buffers again."""


class CudaMemory:
    """Memory of one GPU, opened in other processes through CUDA IPC."""

    bucket_bytes = 256 << 20

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)
        self._opened: dict[Handle, Tensor] = {}

    @property
    def place(self) -> str:
        """The physical GPU, whatever its index in this process."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a new buffer; torch keeps freed memory itself."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def export(self, buffer: Tensor) -> Handle:
        """Return the arguments that `rebuild_cuda_tensor` takes; one reader opens each."""
        # Registers CUDA's reductions when imported, which a process without CUDA must not do.
        from torch.multiprocessing.reductions import reduce_tensor  # noqa: PLC0415 - see above

        return tuple(reduce_tensor(buffer)[1])

    def open(self, handle: Handle) -> Tensor:
        """Open the buffer, once for all buckets that come in it."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor  # noqa: PLC0415 - as above

        if handle not in self._opened:
            # The seventh argument is the index of the GPU, which is another one in this process.
            arguments = (*handle[:6], self.device.index, *handle[7:])
            self._opened[handle] = rebuild_cuda_tensor(*arguments)
        return self._opened[handle]

    def synchronize(self) -> None:
        """Wait for the stream that copies are queued on."""
        torch.cuda.current_stream(self.device).synchronize()

    def release(self, buffers: list[Tensor]) -> None:
        """Free them once their readers have let go."""
        buffers.clear()
        torch.cuda.ipc_collect()

    def close(self) -> None:
        """Let go of the writer's memory, which it frees then."""
        self._opened.clear()


def memory_of(device: torch.device) -> BufferMemory:
    """Return the memory of a device that buffers are shared in."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


class BroadcastGroup:
    """A process group of its own: the trainer's rank 0 and the workers of all engines."""

    def __init__(
        self, device: torch.device, host: str, port: int, *, rank: int, world_size: int
    ) -> None:
        """Join as `rank`; wait until all are there."""
        self.device = device
        store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=GROUP_TIMEOUT)
        make = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
        self._group = make(dist.PrefixStore("weights", store), rank, world_size, GROUP_TIMEOUT)

    def broadcast(self, data: Tensor) -> None:
        """Send rank 0's bytes (n,) uint8 to the others, or receive them."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([data], options).wait()


@dataclass
class Packed:
    """Named tensors in a buffer, on their way to become a bucket."""

    buffer: Tensor | None
    # name, dtype, shape and offset of each
    entries: list[tuple[str, str, tuple[int, ...], int]] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def data(self) -> Tensor:
        """The bytes that are in use, (num_bytes,) uint8."""
        assert self.buffer is not None
        return self.buffer[: self.num_bytes]

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to the end of the buffer, if there is one."""
        begin = align(self.num_bytes)
        self.num_bytes = begin + tensor.nbytes
        if self.buffer is not None:
            self.buffer[begin : self.num_bytes].copy_(as_bytes(tensor))
        self.entries.append((name, dtype_name(tensor.dtype), tuple(tensor.shape), begin))

    def bucket(self, handle: dict[str, object]) -> WeightBucket:
        """Return the bucket of these tensors."""
        names, dtypes, shapes, offsets = zip(*self.entries, strict=True)
        return WeightBucket(names, dtypes, shapes, offsets, self.num_bytes, handle)


class BucketBuffers:
    """The writer's side: two buffers that tensors are packed into in turn. A rank that nobody reads
    from packs nothing, but walks through the same buckets.
    """

    def __init__(self, memory: BufferMemory, *, is_used: bool = True) -> None:
        self.memory = memory
        self.is_used = is_used
        self.bucket_bytes = memory.bucket_bytes
        self._buffers: list[Tensor | None] = [None] * NUM_BUFFERS
        self._handles: list[Handle | None] = [None] * NUM_BUFFERS
        self._turn = 0

    def pack(self, tensors: NamedTensors) -> Iterator[Packed]:
        """Fill buffers of about `bucket_bytes`; each is overwritten when the next but one is asked
        for. A tensor that is larger travels alone.
        """
        packed: Packed | None = None
        for name, tensor in tensors:
            is_full = (
                packed is not None and align(packed.num_bytes) + tensor.nbytes > self.bucket_bytes
            )
            if packed is not None and is_full:
                yield self._finished(packed)
            if packed is None or is_full:
                packed = Packed(self._next_buffer(tensor.nbytes))
            packed.add(name, tensor)
        if packed is not None:
            yield self._finished(packed)

    def handle(self) -> dict[str, Handle]:
        """Return {place: handle} of the buffer filled last; empty on a rank that packs nothing."""
        buffer = self._buffers[self._turn]
        if buffer is None:
            return {}
        handle = self._handles[self._turn] or self.memory.export(buffer)
        self._handles[self._turn] = handle
        return {self.memory.place: handle}

    def release(self) -> None:
        """Give the memory back until the next update."""
        buffers = [buffer for buffer in self._buffers if buffer is not None]
        self._buffers = [None] * NUM_BUFFERS
        self._handles = [None] * NUM_BUFFERS
        self.memory.release(buffers)

    def _finished(self, packed: Packed) -> Packed:
        if self.is_used:
            self.memory.synchronize()
        return packed

    def _next_buffer(self, num_bytes: int) -> Tensor | None:
        self._turn = (self._turn + 1) % NUM_BUFFERS
        buffer = self._buffers[self._turn]
        if self.is_used and (buffer is None or len(buffer) < num_bytes):
            buffer = self.memory.allocate(max(num_bytes, self.bucket_bytes))
            self._buffers[self._turn], self._handles[self._turn] = buffer, None
        return buffer


class BucketReader:
    """The engine's side, in every worker: opens or receives buckets for the worker's device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memories = {memory.device.type: memory for memory in (HostMemory(), memory_of(device))}
        self._group: BroadcastGroup | None = None
        self._received: Tensor | None = None  # what a broadcast is received into

    def join(self, group: BroadcastGroup) -> None:
        """Receive from this group from now on."""
        self._group = group

    def read(self, bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view) of every tensor, on the device; valid until the next bucket comes."""
        data = self._bytes(bucket).to(self.device)
        views = tensors_in(data, bucket.dtypes, bucket.shapes, bucket.offsets)
        yield from zip(bucket.names, views, strict=True)

    def synchronize(self) -> None:
        """Wait until the bucket has been read."""
        self.memories[self.device.type].synchronize()

    def close(self) -> None:
        """Let go of the writer's memory at the end of an update."""
        for memory in self.memories.values():
            memory.close()
        self._received = None

    def _bytes(self, bucket: WeightBucket) -> Tensor:
        if self._group is not None:
            if self._received is None or len(self._received) < bucket.num_bytes:
                self._received = torch.empty(
                    bucket.num_bytes, dtype=torch.uint8, device=self._group.device
                )
            data = self._received[: bucket.num_bytes]
            self._group.broadcast(data)
            return data
        for memory in self.memories.values():
            handle: Any = bucket.handle.get(memory.place)
            if handle is not None:
                return memory.open(handle)[: bucket.num_bytes]
        raise WeightSyncError(
            "no rank of the trainer shares memory with this engine. Give the actor as many devices "
            "as the engines, leave out --colocate_all_models, or type --vllm_sync_with_ray."
        )


def _flat(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _mapped(pid: int, descriptor: int, inode: int, num_bytes: int) -> Tensor:
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        with open(path, "r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_ino != inode:
                raise WeightSyncError(f"a bucket of weights is gone: {path} is something else")
            return _flat(torch.UntypedStorage._new_shared_fd_cpu(file.fileno(), num_bytes))
    except OSError as error:
        raise WeightSyncError(f"a bucket of weights cannot be opened: {error}") from error
