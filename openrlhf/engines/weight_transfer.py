"""Buckets of weights on their way from the trainer to an engine.

Tensors are packed into a flat buffer. A process of the same node opens the buffer by a handle
(shared memory, CUDA IPC); any other one receives a broadcast of it (gloo, NCCL). Where memory and
groups of a CPU and a GPU differ they have the same calls, and only this file knows which is used.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.engines.base import NamedTensors, WeightBucket
from openrlhf.errors import WeightSyncError
from openrlhf.utils.tensors import align, as_bytes, dtype_name, tensors_in

NUM_BUFFERS = 2  # one is filled while the other one is read
GROUP_TIMEOUT = timedelta(seconds=600)

Handle = tuple[Any, ...]  # opens a buffer in another process of the same place


class HostMemory:
    """Shared memory of one node. Readers open its descriptor through /proc, so it has no name and
    ends with the processes that use it.
    """

    device = torch.device("cpu")
    bucket_bytes = 64 << 20
    is_kept = True  # between updates: new pages cost more than the copy into them

    @property
    def place(self) -> str:
        """The node, or the container where processes of others are not seen."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a new buffer, (n,) uint8; raise WeightSyncError where the node has no room."""
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
        """Map a buffer that another process exported, (n,) uint8."""
        pid, descriptor, inode, num_bytes = handle
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            with open(path, "r+b", buffering=0) as file:
                if os.fstat(file.fileno()).st_ino != inode:
                    raise WeightSyncError(f"a bucket of weights is gone: {path} is something else")
                return _flat(torch.UntypedStorage._new_shared_fd_cpu(file.fileno(), num_bytes))
        except OSError as error:
            raise WeightSyncError(f"a bucket of weights cannot be opened: {error}") from error

    def synchronize(self) -> None:
        """Copies of a CPU are done when the call returns."""


class CudaMemory:
    """Memory of one GPU, opened in other processes through CUDA IPC."""

    bucket_bytes = 256 << 20
    is_kept = False  # other models need it

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)

    @property
    def place(self) -> str:
        """The physical GPU, whatever its index in this process."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return a new buffer, (n,) uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def export(self, buffer: Tensor) -> Handle:
        """Return the arguments that `rebuild_cuda_tensor` takes; one reader opens each."""
        # Registers CUDA's reductions when imported, which a process without CUDA must not do.
        from torch.multiprocessing.reductions import reduce_tensor  # noqa: PLC0415 - see above

        return tuple(reduce_tensor(buffer)[1])

    def open(self, handle: Handle) -> Tensor:
        """Open a buffer that another process exported, (n,) uint8."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor  # noqa: PLC0415 - as above

        # The seventh argument is the index of the GPU, which is another one in this process.
        return rebuild_cuda_tensor(*handle[:6], self.device.index, *handle[7:])

    def synchronize(self) -> None:
        """Wait for the stream that copies are queued on."""
        torch.cuda.current_stream(self.device).synchronize()


def memory_of(device: torch.device) -> HostMemory | CudaMemory:
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


class WeightTransport:
    """The writer's side: two buffers that tensors are packed into in turn, which readers of this
    place open by a handle. Subclasses carry them further. A rank that nobody reads from packs
    nothing, but walks through the same buckets.
    """

    def __init__(self, device: torch.device, *, is_used: bool = True) -> None:
        self.memory = memory_of(device)
        self.is_used = is_used
        self.bucket_bytes = self.memory.bucket_bytes
        self._buffers: list[Tensor] = []  # the one that is filled comes last
        self._handles: dict[int, Handle] = {}  # by address: each buffer is exported once

    def buckets(self, tensors: NamedTensors) -> Iterator[tuple[WeightBucket, Tensor]]:
        """Yield buckets of about `bucket_bytes` and their bytes; these are overwritten when the
        next but one is asked for. A tensor that is larger travels alone.
        """
        entries: list[tuple[str, str, tuple[int, ...], int]] = []
        num_bytes = 0
        for name, tensor in tensors:
            begin = align(num_bytes)
            if entries and begin + tensor.nbytes > self.bucket_bytes:
                yield self._finished(entries, num_bytes)
                entries, begin = [], 0
            if self.is_used and not entries:
                self._turn(tensor.nbytes)
            num_bytes = begin + tensor.nbytes
            if self.is_used:
                self._buffers[-1][begin:num_bytes].copy_(as_bytes(tensor))
            entries.append((name, dtype_name(tensor.dtype), tuple(tensor.shape), begin))
        if entries:
            yield self._finished(entries, num_bytes)

    def address(self, data: Tensor) -> dict[str, Any]:
        """Return how engines find the bytes of a bucket: {place: handle}; nothing on a rank that
        packs nothing.
        """
        if not self.is_used:
            return {}
        if data.data_ptr() not in self._handles:
            self._handles[data.data_ptr()] = self.memory.export(self._buffers[-1])
        return {self.memory.place: self._handles[data.data_ptr()]}

    def push(self, data: Tensor) -> None:
        """Send the bytes of a bucket that every engine was told to receive."""

    def finish(self) -> None:
        """Give device memory back until the next update; engines have let go of it."""
        if not self.memory.is_kept:
            self._buffers, self._handles = [], {}
            torch.cuda.ipc_collect()

    def _finished(
        self, entries: list[tuple[str, str, tuple[int, ...], int]], num_bytes: int
    ) -> tuple[WeightBucket, Tensor]:
        names, dtypes, shapes, offsets = zip(*entries, strict=True)
        data = torch.empty(0, dtype=torch.uint8)
        if self.is_used:
            self.memory.synchronize()
            data = self._buffers[-1][:num_bytes]
        return WeightBucket(names, dtypes, shapes, offsets, num_bytes, self.address(data)), data

    def _turn(self, num_bytes: int) -> None:
        """Take the other buffer, or a new one where there is none or it is too small."""
        buffer = self._buffers.pop(0) if len(self._buffers) == NUM_BUFFERS else None
        if buffer is None or len(buffer) < num_bytes:
            if buffer is not None:
                self._handles.pop(buffer.data_ptr(), None)
            buffer = self.memory.allocate(max(num_bytes, self.bucket_bytes))
        self._buffers.append(buffer)


class BucketReader:
    """The engine's side, in every worker: opens or receives buckets for the worker's device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memories = {memory.device.type: memory for memory in (HostMemory(), memory_of(device))}
        self._group: BroadcastGroup | None = None
        self._received = torch.empty(0)  # what a broadcast is received into
        self._opened: dict[Handle, Tensor] = {}

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
        self._opened.clear()
        self._received = torch.empty(0)

    def _bytes(self, bucket: WeightBucket) -> Tensor:
        if self._group is not None:
            if len(self._received) < bucket.num_bytes:
                self._received = torch.empty(
                    bucket.num_bytes, dtype=torch.uint8, device=self._group.device
                )
            self._group.broadcast(data := self._received[: bucket.num_bytes])
            return data
        if "bytes" in bucket.handle:
            return torch.tensor(bucket.handle["bytes"])
        for memory in self.memories.values():
            handle: Any = bucket.handle.get(memory.place)
            if handle is not None:
                if handle not in self._opened:
                    self._opened[handle] = memory.open(handle)
                return self._opened[handle][: bucket.num_bytes]
        raise WeightSyncError(
            "no rank of the trainer shares memory with this engine. Give the actor as many devices "
            "as the engines, leave out --colocate_all_models, or type --vllm_sync_with_ray."
        )


def _flat(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
