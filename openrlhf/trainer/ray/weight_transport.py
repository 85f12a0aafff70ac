"""How weights travel from the trainer to the engines: host memory, Ray's object store, CUDA IPC or
NCCL.

Each transport fills buckets for `send_weights`. Host memory works everywhere on one machine. CUDA
IPC lets an engine read the memory of the trainer rank on its own GPU, so every rank fills the same
buckets. NCCL broadcasts from rank 0 to the workers of all engines. These two follow vLLM's formats
(vllm.distributed.weight_transfer: packed IPC, NCCL tensor by tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from openrlhf.distributed.collectives import all_gather_object, barrier
from openrlhf.engines.base import (
    RAY_BACKEND,
    SHM_BACKEND,
    NamedTensors,
    RolloutEngine,
    WeightBucket,
)
from openrlhf.engines.shared_memory import NUM_PARTS, Filling, ShmBucketWriter, checksum
from openrlhf.engines.shared_parameters import SharedParameters
from openrlhf.errors import ConfigError, WeightSyncError
from openrlhf.trainer.ray.device_buffer import DeviceBuffer, GpuMemory
from openrlhf.trainer.ray.object_store import ObjectStoreTransport
from openrlhf.trainer.ray.weight_sync import BucketWriter, all_results, drain
from openrlhf.utils.tensors import fingerprint, tensors_in

IPC_BACKEND = "openrlhf_ipc"
NCCL_BACKEND = "openrlhf_nccl"
BUCKET_BYTES = 256 << 20
SHM_BUCKET_BYTES = 64 << 20  # small, for one is filled while the last one is read


class WeightTransport(BucketWriter, Protocol):
    """A bucket writer that knows how to meet the engines."""

    def connect(self, engines: Sequence[RolloutEngine]) -> None:
        """Meet the engines; rank 0 calls it, once and before the first update."""

    def share(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Take note, on rank 0 and once, of whole parameters that stay where they are from now on;
        they may be moved.
        """

    def follow(self, tensors: NamedTensors) -> None:
        """What the other ranks do while rank 0 sends the same tensors."""


def check_one_machine(nodes: Iterable[str]) -> None:
    """Raise ConfigError unless all addresses of nodes are the same: host memory ends there."""
    places = sorted(set(nodes))
    if len(places) > 1:
        raise ConfigError(
            "Weights can pass through host memory on one machine only, and the trainer and the "
            f"engines are on {', '.join(places)}. Type --vllm_sync_with_ray."
        )


def choose_transport(
    sync_backend: str,
    *,
    has_gpus: bool,
    is_colocated: bool,
    with_ray: bool,
    is_one_machine: bool,
    has_rank_on_every_engine_gpu: bool,
) -> str:
    """The backend of trainer and engines: the fastest that can work, host memory for "gloo", or
    Ray's object store `with_ray`.

    Two ranks of an NCCL group cannot share a GPU, so colocated engines read over CUDA IPC. Raises
    ConfigError when the weights would have to pass through the memory of several machines.
    """
    if with_ray:
        return RAY_BACKEND
    if not has_gpus:
        return SHM_BACKEND
    if sync_backend != "gloo":
        if not is_colocated:
            return NCCL_BACKEND
        if has_rank_on_every_engine_gpu:
            return IPC_BACKEND
    if not is_one_machine:
        remedy = (
            "Type --vllm_sync_backend nccl, or --vllm_sync_with_ray."
            if sync_backend == "gloo"
            else "Give the actor as many GPUs as the engines, leave out --colocate_all_models, or "
            "type --vllm_sync_with_ray."
        )
        raise ConfigError(
            "Weights can pass through host memory on one machine only, the GPUs are on several: "
            f"--vllm_sync_backend {sync_backend}. {remedy}"
        )
    return SHM_BACKEND


def make_transport(
    engines: Sequence[RolloutEngine],
    *,
    rank: int,
    tensor_parallel_size: int,
    device: torch.device,
    endpoint: Callable[[], tuple[str, int]],
) -> WeightTransport:
    """The transport that the engines were started with; every rank makes its own."""
    backends = {engine.weight_transfer_backend for engine in engines}
    assert len(backends) == 1, f"engines differ: {sorted(backends)}"
    [backend] = backends
    if backend == IPC_BACKEND:
        # Ranks and engine workers fill the bundles of their pool in the same order.
        has_reader = rank < len(engines) * tensor_parallel_size
        return IpcTransport(BUCKET_BYTES, GpuMemory(device), has_reader=has_reader)
    if backend == NCCL_BACKEND:
        open_group = partial(open_nccl_group, device)
        group = TransferGroup(endpoint, tensor_parallel_size, open_group)
        return NcclTransport(BUCKET_BYTES, GpuMemory(device), group=group)
    if backend == RAY_BACKEND:
        return ObjectStoreTransport(SHM_BUCKET_BYTES)
    assert backend == SHM_BACKEND, backend
    return SharedMemoryTransport(SHM_BUCKET_BYTES)


class SharedMemoryTransport:
    """Buckets in host memory that every engine of this machine can open.

    Parameters that live in such memory themselves are read there; all others are copied.
    """

    fills_ahead = True

    def __init__(self, bucket_bytes: int) -> None:
        self.writer = ShmBucketWriter(bucket_bytes)
        self.shared: SharedParameters | None = None
        self.num_updates = 0

    def connect(self, engines: Sequence[RolloutEngine]) -> None:
        """Nothing has to be agreed on."""

    def share(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Move the parameters to where engines can read them, those that can be moved."""
        self.shared = SharedParameters(parameters)

    def write(self, tensors: NamedTensors, fingerprints: dict[str, int]) -> Iterator[WeightBucket]:
        """See BucketWriter. What is shared comes as one bucket, at the end.

        Nothing can be lost on the way of what both sides read in the same memory: the checksums,
        over all of it the first time, are over a part of it then, another one at every update.
        """
        shared: list[tuple[str, torch.Tensor]] = []
        filling = Filling(part=self.num_updates % NUM_PARTS if self.num_updates else None)
        self.num_updates += 1

        def to_copy() -> NamedTensors:
            for name, tensor in tensors:
                begin = self.shared.offset_of(tensor) if self.shared else None
                if begin is None:
                    yield name, tensor
                else:
                    shared.append((name, tensor))
                    filling.add(name, tensor, begin)

        yield from self.writer.write(to_copy(), fingerprints)
        if shared and self.shared:
            yield filling.bucket(self.shared.segment)
            # While the engines read: the parameters do not change until all have acknowledged.
            fingerprints |= {name: checksum(tensor, filling.part) for name, tensor in shared}

    def push(self, bucket: WeightBucket) -> None:
        """Engines read for themselves."""

    def follow(self, tensors: NamedTensors) -> None:
        """Take part in the gathering."""
        drain(tensors)

    def close(self) -> None:
        """Keep the memory: taking it anew costs more than a copy. It ends with the process."""


class IpcTransport:
    """Each engine worker reads the buffer of the trainer rank on its own GPU.

    All ranks fill the same buckets at the same time; rank 0 tells the engines where they lie.
    `has_reader` is False on a rank whose GPU holds no engine.
    """

    fills_ahead = False

    def __init__(self, bucket_bytes: int, memory: GpuMemory, *, has_reader: bool) -> None:
        self.memory = memory
        self.buffer = DeviceBuffer(bucket_bytes, memory, is_used=has_reader)

    def connect(self, engines: Sequence[RolloutEngine]) -> None:
        """Say that tensors come packed."""
        _on_all(engines, [{"packed": True}] * len(engines))

    def share(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Nothing is gained: weights travel over the GPUs' own links."""

    def write(self, tensors: NamedTensors, fingerprints: dict[str, int]) -> Iterator[WeightBucket]:
        """See BucketWriter; every rank must iterate."""
        return self._write(noted(tensors, fingerprints))

    def _write(self, tensors: NamedTensors) -> Iterator[WeightBucket]:
        for packing in self.buffer.packed(tensors):
            if self.buffer.is_used:
                self.memory.synchronize()
            # No rank answers before all have filled their buffers.
            handles = {
                gpu: how
                for part in all_gather_object(self.buffer.exported())
                for gpu, how in part.items()
            }
            yield packing.bucket(
                packing.update_info(ipc_handles=handles, tensor_sizes=packing.sizes)
            )
            barrier()  # rank 0 is here once all engines have read

    def push(self, bucket: WeightBucket) -> None:
        """Engines read for themselves."""

    def follow(self, tensors: NamedTensors) -> None:
        """Fill the same buckets for the engine on this rank's GPU."""
        try:
            for _ in self._write(tensors):
                pass
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the buffer; CUDA frees it once the engine has done the same."""
        self.buffer.free()
        self.memory.collect()


class TransferGroup:
    """The NCCL group of the trainer's rank 0 and the workers of all engines.

    `open_group(host, port, world_size)` joins as rank 0 and answers what can broadcast.
    """

    def __init__(
        self,
        endpoint: Callable[[], tuple[str, int]],
        workers_per_engine: int,
        open_group: Callable[[str, int, int], Any],
    ) -> None:
        self.endpoint = endpoint
        self.workers_per_engine = workers_per_engine
        self.open_group = open_group
        self.communicator: Any = None

    def init_infos(self, num_engines: int, host: str, port: int) -> list[dict[str, object]]:
        """What each engine is told; its workers follow one another after those of the last."""
        return [
            {
                "master_address": host,
                "master_port": port,
                "rank_offset": 1 + index * self.workers_per_engine,
                "world_size": 1 + num_engines * self.workers_per_engine,
                "packed": False,
            }
            for index in range(num_engines)
        ]

    def connect(self, engines: Sequence[RolloutEngine]) -> None:
        """Open the group here while the engines join it; raises WeightSyncError without NCCL."""
        host, port = self.endpoint()
        world_size = 1 + len(engines) * self.workers_per_engine

        def join_too() -> None:
            self.communicator = self.open_group(host, port, world_size)

        _on_all(engines, self.init_infos(len(engines), host, port), meanwhile=join_too)
        if self.communicator.disabled:  # it would answer every broadcast by doing nothing
            raise WeightSyncError(
                "NCCL could not be loaded by the trainer. Type --vllm_sync_backend gloo."
            )


class NcclTransport:
    """Rank 0 broadcasts each tensor of a bucket to the workers of all engines."""

    fills_ahead = False

    def __init__(self, bucket_bytes: int, memory: GpuMemory, *, group: TransferGroup) -> None:
        self.memory = memory
        self.buffer = DeviceBuffer(bucket_bytes, memory)
        self.group = group

    def connect(self, engines: Sequence[RolloutEngine]) -> None:
        """Open the group with all engines."""
        self.group.connect(engines)

    def share(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Nothing is gained: weights travel over the GPUs' own links."""

    def write(self, tensors: NamedTensors, fingerprints: dict[str, int]) -> Iterator[WeightBucket]:
        """See BucketWriter; copies into the buffer wait on its stream for the last broadcast."""
        for packing in self.buffer.packed(noted(tensors, fingerprints)):
            yield packing.bucket(packing.update_info())

    def push(self, bucket: WeightBucket) -> None:
        """Queue the broadcasts of a bucket that every engine was told to receive."""
        assert self.buffer.bytes is not None
        stream = self.memory.stream()
        for tensor in tensors_in(self.buffer.bytes, bucket.dtypes, bucket.shapes, bucket.offsets):
            self.group.communicator.broadcast(tensor, src=0, stream=stream)

    def follow(self, tensors: NamedTensors) -> None:
        """Take part in the gathering."""
        drain(tensors)

    def close(self) -> None:
        """Let go of the buffer; the group stays."""
        self.buffer.free()


def noted(tensors: NamedTensors, fingerprints: dict[str, int]) -> NamedTensors:
    """The same tensors; the fingerprint of each is noted as it passes."""
    for name, tensor in tensors:
        fingerprints[name] = fingerprint(tensor)
        yield name, tensor


def open_nccl_group(device: torch.device, host: str, port: int, world_size: int) -> Any:
    """Join vLLM's transfer group as rank 0 with this GPU; waits for the engines."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init  # noqa: PLC0415 - seconds

    endpoint = {"master_address": host, "master_port": port, "world_size": world_size}
    with torch.cuda.device(device):  # each thread has a current device of its own
        return trainer_init(endpoint)


def _on_all(
    engines: Sequence[RolloutEngine],
    init_infos: Sequence[dict[str, object]],
    *,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Tell every engine how to meet the trainer and do the trainer's part at the same time."""
    pool = ThreadPoolExecutor(max_workers=len(engines) + 1)
    try:
        calls = [
            pool.submit(engine.init_weight_transfer, info)
            for engine, info in zip(engines, init_infos, strict=True)
        ]
        if meanwhile is not None:
            calls.append(pool.submit(meanwhile))
        all_results(calls)
    finally:
        pool.shutdown(wait=False)
