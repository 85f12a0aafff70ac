"""Buckets of weights on their way from the trainer to an engine.

A process of the same node opens a bucket's buffer by a handle (shared memory, CUDA IPC); any other
one receives a broadcast of it (gloo, NCCL). Where memory and groups of a CPU and a GPU differ they
have the same calls, and only this file knows which is used.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.engines.base import WeightBucket
from openrlhf.errors import EngineError, WeightSyncError, first_line
from openrlhf.utils.rendezvous import open_store
from openrlhf.utils.tensors import tensors_in
from openrlhf.utils.threads import start_thread

GROUP_TIMEOUT = timedelta(seconds=600)
CONNECT_TIMEOUT = timedelta(seconds=10)  # to who serves the store, who does so before others come
LOOK_EVERY_S = 0.5  # whether a broadcast that lasts was broken off
BROKEN_OFF = "broken_off"  # the key of the store that says so
WAS_BROKEN_OFF = "the broadcast of weights was broken off"  # said by those who left it
HERE = "here/"  # those of the members that have come

Handle = tuple[Any, ...]  # opens a buffer in another process of the same node or GPU


class HostMemory:
    """Shared memory of one node. Readers open its descriptor through /proc, so it has no name and
    ends with the processes that use it.
    """

    device = torch.device("cpu")
    bucket_bytes = 64 << 20
    is_kept = True  # between updates: new pages cost more than the copy into them

    @property
    def location(self) -> str:
        """The node, or the container where processes of others are not seen."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"

    def allocate(self, num_bytes: int, *, is_opened: bool) -> tuple[Tensor, Handle]:
        """Return a new buffer, (n,) uint8, and the path and size that open it elsewhere, whether or
        not that is done.
        """
        descriptor = os.memfd_create("weights")
        os.ftruncate(descriptor, num_bytes)
        handle = (f"/proc/{os.getpid()}/fd/{descriptor}", num_bytes)
        buffer = self.open(handle)
        weakref.finalize(buffer, os.close, descriptor)
        return buffer, handle

    def open(self, handle: Handle) -> Tensor:
        """Map a buffer that another process allocated, (n,) uint8."""
        path, num_bytes = handle
        try:
            return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise WeightSyncError(f"a bucket of weights cannot be opened: {error}") from error

    def finish_copies(self) -> None:
        """Wait until buffers hold what was copied into them: here they do."""

    def collect(self) -> None:
        """Free what readers have let go of: here that needs no call."""


class CudaMemory:
    """Memory of one GPU, opened in other processes through CUDA IPC."""

    bucket_bytes = 256 << 20
    is_kept = False  # other models need it

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)

    @property
    def location(self) -> str:
        """The physical GPU, whatever its index in this process."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def allocate(self, num_bytes: int, *, is_opened: bool) -> tuple[Tensor, Handle]:
        """Return a new buffer, (n,) uint8, and the arguments that `rebuild_cuda_tensor` takes if it
        `is_opened` elsewhere, by one reader: torch never frees a handle that nobody has opened.
        """
        # Registers CUDA's reductions when imported, which a process without CUDA must not do.
        from torch.multiprocessing.reductions import reduce_tensor  # noqa: PLC0415 - see above

        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return buffer, tuple(reduce_tensor(buffer)[1]) if is_opened else ()

    def open(self, handle: Handle) -> Tensor:
        """Open a buffer that another process allocated, (n,) uint8."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor  # noqa: PLC0415 - as above

        # The seventh argument is the index of the GPU, which is another one in this process.
        return rebuild_cuda_tensor(*handle[:6], self.device.index, *handle[7:])

    def finish_copies(self) -> None:
        """Wait until buffers hold what was copied into them; not for a broadcast on a stream of its
        own, which may have to be broken off.
        """
        torch.cuda.current_stream(self.device).synchronize()

    def collect(self) -> None:
        """Free what readers have let go of."""
        torch.cuda.ipc_collect()


def memory_of(device: torch.device) -> HostMemory | CudaMemory:
    """Return the memory of a device that buffers are shared in."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def synchronize(device: torch.device) -> None:
    """Wait for the copies that are queued on a device."""
    torch.get_device_module(device).synchronize(device)


@contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Turn an error of torch about a dead peer into EngineError."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(f"the broadcast of weights failed: {first_line(error)}") from error


class Broadcasts:
    """The trainer's rank 0 and the workers of all engines. Meeting and broadcasts can be left by
    every member: one that is dead or stopped would hold the others until the timeout of the group.
    """

    # Groups whose broadcasts were left, and these: the end of a group waits for them.
    _left: ClassVar[list[tuple[Any, Any, Tensor]]] = []

    def __init__(self, host: str, port: int, *, rank: int, world_size: int) -> None:
        """Open the store at an address, which rank 0 serves; raise EngineError if it is dead."""
        self._rank, self._world_size = rank, world_size
        with naming_lost_peers():
            self._store = open_store(
                host, port, rank=rank, world_size=world_size, timeout=CONNECT_TIMEOUT, waits=False
            )
        self._store.set_timeout(GROUP_TIMEOUT)

    def join(self, device: torch.device) -> "Broadcasts":
        """Form the group once all are there; raise EngineError if that is broken off."""
        everyone = [f"{HERE}{rank}" for rank in range(self._world_size)]
        self._left[:] = [found for found in self._left if not found[1].is_completed()]
        formed: Future[Any] = Future()

        def form() -> None:
            formed.set_result(self._formed(device))

        with naming_lost_peers():
            self._store.set(f"{HERE}{self._rank}", "")
            self._until(lambda: self._store.check(everyone))
            start_thread("weights", form, formed.set_exception)
            self._until(formed.done)
            self._group = formed.result()
        return self

    def _formed(self, device: torch.device) -> Any:
        """Return the group, which waits for members that have died since they came. By a client of
        the store of its own: one that waits holds the others up.
        """
        store = dist.PrefixStore("weights", self._store.clone())
        if device.type != "cuda":
            return dist.ProcessGroupGloo(store, self._rank, self._world_size, GROUP_TIMEOUT)
        torch.cuda.set_device(device)  # of this thread
        group = dist.ProcessGroupNCCL(store, self._rank, self._world_size, GROUP_TIMEOUT)
        group.broadcast(torch.zeros(1, device=device), 0).wait()  # the first one forms it
        return group

    def broadcast(self, data: Tensor) -> None:
        """Send the bytes of rank 0 to all members; raise EngineError if that is broken off."""
        work = self._group.broadcast(data, 0)
        try:
            with naming_lost_peers():
                self._until(work.is_completed)
                work.wait()
        except EngineError:
            if data.is_cuda:
                self._group.abort()  # what waits in the device's queue would hold all that follows
            elif not work.is_completed():  # gloo cannot, but its thread waits alone
                self._left.append((self._group, work, data))
            raise

    def break_off(self) -> None:
        """Have all members leave; no broadcast follows."""
        self._store.set(BROKEN_OFF, "")

    def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until it is so; look less often the longer it takes."""
        begun_at, look_at_s = time.monotonic(), LOOK_EVERY_S
        while not is_so():
            waited_s = time.monotonic() - begun_at
            if waited_s > look_at_s:
                look_at_s += LOOK_EVERY_S
                if self._is_broken_off():
                    raise EngineError(WAS_BROKEN_OFF)
            time.sleep(min(max(waited_s / 100, 0.0001), 0.02))

    def _is_broken_off(self) -> bool:
        try:
            return self._store.check([BROKEN_OFF])
        except RuntimeError:  # rank 0, which serves the store, is dead
            return True


def fetched(bucket: WeightBucket, get: Callable[[Any], Any]) -> WeightBucket:
    """Return the bucket with its bytes, if they are an object of a store that `get` reads."""
    if "object" not in bucket.address:
        return bucket
    return replace(bucket, address={"bytes": get(bucket.address["object"])})


class BucketReader:
    """The engine's side, in every worker: opens or receives buckets for the worker's device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memories = [HostMemory(), memory_of(device)]
        self._group: Broadcasts | None = None
        self._received = torch.empty(0)  # what a broadcast is received into
        self._opened: dict[Handle, Tensor] = {}

    def join(self, group: Broadcasts, device: torch.device) -> None:
        """Receive from this group from now on, into memory of the device."""
        self._group = group
        self._received = torch.empty(0, dtype=torch.uint8, device=device)

    def read(self, bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view) of every tensor, on the device; valid until the next bucket comes."""
        data = self._bytes(bucket).to(self.device)
        views = tensors_in(data, bucket.dtypes, bucket.shapes, bucket.offsets)
        yield from zip(bucket.names, views, strict=True)

    def close(self) -> None:
        """Let go of the writer's memory at the end of an update."""
        self._opened.clear()
        self._received = self._received.new_empty(0)

    def _bytes(self, bucket: WeightBucket) -> Tensor:
        if self._group is not None:
            if len(self._received) < bucket.num_bytes:
                self._received = self._received.new_empty(bucket.num_bytes)
            data = self._received[: bucket.num_bytes]
            self._group.broadcast(data)
            return data
        if "bytes" in bucket.address:
            return torch.tensor(bucket.address["bytes"])
        for memory in self.memories:
            handle: Any = bucket.address.get(memory.location)
            if handle is not None:
                if handle not in self._opened:
                    self._opened[handle] = memory.open(handle)
                return self._opened[handle][: bucket.num_bytes]
        raise WeightSyncError(
            "no rank of the trainer shares memory with this engine. Type --vllm_sync_with_ray, or "
            "give the actor as many devices as the engines."
        )
