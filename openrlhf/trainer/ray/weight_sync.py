"""Weight sync: the trainer's weights to every engine in buckets, and proof that they arrived.

Every rank of the trainer takes part (gathering is collective under ZeRO-3 and tensor parallelism).
Buckets go through memory that engine and trainer share, by a broadcast, or through Ray's object
store; an engine that cannot show the fingerprints of what was sent fails the sync by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TypeVar

import ray
import torch

from openrlhf.distributed.collectives import all_gather_object, barrier, rank
from openrlhf.engines.base import (
    NamedTensors,
    RolloutEngine,
    SyncReceipt,
    WeightBucket,
)
from openrlhf.engines.weight_transfer import (
    BroadcastGroup,
    BucketBuffers,
    HostMemory,
    Packed,
    memory_of,
)
from openrlhf.errors import WeightSyncError
from openrlhf.utils.tensors import fingerprint

FETCH_TIMEOUT_S = 600.0  # for one bucket from another node

Result = TypeVar("Result")


class WeightTransport:
    """Packs weights into buckets that engines can read. All ranks of the trainer make one."""

    def __init__(self, buffers: BucketBuffers) -> None:
        self.buffers = buffers

    def buckets(self, tensors: NamedTensors) -> Iterator[tuple[WeightBucket, Packed]]:
        """Yield buckets and their bytes, which stay until the next but one is asked for."""
        for packed in self.buffers.pack(tensors):
            yield packed.bucket(self.address(packed)), packed

    def address(self, packed: Packed) -> dict[str, object]:
        """Return how engines find the bytes."""
        raise NotImplementedError

    def push(self, packed: Packed) -> None:
        """Send the bytes of a bucket that every engine was told to receive."""

    def wait_for_peers(self) -> None:
        """Wait until engines have read from all ranks."""

    def follow(self, tensors: NamedTensors) -> None:
        """Take part in the gathering, on a rank other than 0."""
        for _ in tensors:
            pass

    def close(self) -> None:
        """Give the memory back at the end of an update."""
        self.buffers.release()


class HandleTransport(WeightTransport):
    """Engine workers open the buffer of the trainer rank on their own GPU or node.

    All ranks pack the same buckets at the same time; rank 0 tells the engines of them.
    """

    def __init__(self, device: torch.device, *, num_readers: int) -> None:
        """`num_readers`: engine workers, which share devices with the first ranks."""
        memory = memory_of(device)
        is_first_here = all_gather_object(memory.place).index(memory.place) == rank()
        is_used = is_first_here and rank() < num_readers
        super().__init__(BucketBuffers(memory, is_used=is_used))

    def buckets(self, tensors: NamedTensors) -> Iterator[tuple[WeightBucket, Packed]]:
        """Yield buckets; every rank must iterate."""
        for bucket, packed in super().buckets(tensors):
            yield bucket, packed
            barrier()  # rank 0 is here once engines have read the bucket before this one

    def address(self, packed: Packed) -> dict[str, object]:
        """Return {place: handle} of all ranks; none returns before all have filled their buffer."""
        return {
            place: handle
            for part in all_gather_object(self.buffers.handle())
            for place, handle in part.items()
        }

    def wait_for_peers(self) -> None:
        """Meet the other ranks; rank 0 comes once engines have read the last bucket."""
        barrier()

    def follow(self, tensors: NamedTensors) -> None:
        """Pack the same buckets for the engine beside this rank."""
        try:
            for _ in self.buckets(tensors):
                pass
            self.wait_for_peers()
        finally:
            self.close()


class BroadcastTransport(WeightTransport):
    """Rank 0 broadcasts each bucket to the workers of all engines."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(BucketBuffers(memory_of(device)))
        self.group: BroadcastGroup | None = None

    def connect(
        self, engines: Sequence[RolloutEngine], *, host: str, port: int, workers_per_engine: int
    ) -> None:
        """Meet all engines as rank 0 of one group."""
        world_size = 1 + len(engines) * workers_per_engine
        device = self.buffers.memory.device

        def join() -> None:
            self.group = BroadcastGroup(device, host, port, rank=0, world_size=world_size)

        pool = ThreadPoolExecutor(max_workers=len(engines) + 1)
        try:
            calls = [pool.submit(join)]
            for index, engine in enumerate(engines):
                info: dict[str, object] = {
                    "device_type": device.type,
                    "host": host,
                    "port": port,
                    "rank_offset": 1 + index * workers_per_engine,
                    "world_size": world_size,
                }
                calls.append(pool.submit(engine.init_weight_transfer, info))
            all_results(calls)
        finally:
            pool.shutdown(wait=False)

    def address(self, packed: Packed) -> dict[str, object]:
        """Engines need no address: they wait for the broadcast."""
        return {}

    def push(self, packed: Packed) -> None:
        """Broadcast to the workers of all engines."""
        assert self.group is not None
        self.group.broadcast(packed.data)


class ObjectTransport(WeightTransport):
    """Each bucket is an object of Ray's store, for nodes between which no group can form."""

    def __init__(self) -> None:
        super().__init__(BucketBuffers(HostMemory()))

    def address(self, packed: Packed) -> dict[str, object]:
        """Put a copy into the store; Ray takes it once to every other node with an engine."""
        return {"object": ray.put(packed.data.numpy())}


class FetchedBuckets:
    """The engine's side of `ObjectTransport`: lays objects where its workers can open them."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self._buffer: torch.Tensor | None = None

    def fetched(self, bucket: WeightBucket) -> WeightBucket:
        """Return the bucket in memory of this node; valid until the next one is fetched."""
        try:
            content = ray.get(bucket.handle["object"], timeout=FETCH_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise WeightSyncError(f"a bucket of weights did not come: {error}") from error
        if self._buffer is None or len(self._buffer) < bucket.num_bytes:
            self._buffer = self.memory.allocate(max(bucket.num_bytes, HostMemory.bucket_bytes))
        self._buffer.numpy()[: bucket.num_bytes] = content
        return replace(bucket, handle={self.memory.place: self.memory.export(self._buffer)})


def make_transport(
    engines: Sequence[RolloutEngine],
    *,
    workers_per_engine: int,
    device: torch.device,
    endpoint: Callable[[], tuple[str, int]],
) -> WeightTransport:
    """Return the transport that the engines were started for; every rank calls."""
    [route] = {engine.weight_route for engine in engines}
    buffers_on = device if route.device_type == "cuda" else torch.device("cpu")
    if route.way == "objects":
        return ObjectTransport()
    if route.way == "handles":
        return HandleTransport(buffers_on, num_readers=len(engines) * workers_per_engine)
    transport = BroadcastTransport(buffers_on)
    if rank() == 0:
        host, port = endpoint()
        transport.connect(engines, host=host, port=port, workers_per_engine=workers_per_engine)
    return transport


def send_weights(
    tensors: NamedTensors,
    engines: Sequence[RolloutEngine],
    weight_version: int,
    *,
    transport: WeightTransport,
    keep_running: bool = False,
) -> dict[str, int]:
    """Send full named tensors to all engines and check every receipt; return the fingerprint of
    each tensor.

    Raise WeightSyncError for a receipt that does not show them, and when requests run, unless
    `keep_running`: then they go on under the new weights.
    """
    sent: dict[str, int] = {}
    pool = ThreadPoolExecutor(max_workers=len(engines) + 1)
    try:
        all_results(
            [pool.submit(e.begin_weight_update, keep_running=keep_running) for e in engines]
        )
        pending: list[Future[None]] = []
        for bucket, packed in transport.buckets(_noted(tensors, sent)):
            all_results(pending)
            pending = [pool.submit(engine.receive_bucket, bucket) for engine in engines]
            pending.append(pool.submit(transport.push, packed))
        all_results(pending)
        transport.wait_for_peers()
        receipts = all_results(
            [pool.submit(engine.finish_weight_update, weight_version) for engine in engines]
        )
    finally:
        transport.close()
        pool.shutdown(wait=False)
    for engine, receipt in zip(engines, receipts, strict=True):
        check_receipt(receipt, sent, weight_version, engine_name=engine.who)
    return sent


def all_results(calls: Sequence[Future[Result]]) -> list[Result]:
    """Return what the calls return, or raise the first error at once: peers of a failed call may
    hang.
    """
    done, _ = wait(calls, return_when=FIRST_EXCEPTION)
    for call in calls:
        if call in done:
            call.result()
    return [call.result() for call in calls]


def check_receipt(
    receipt: SyncReceipt, sent: dict[str, int], weight_version: int, *, engine_name: str
) -> None:
    """Raise WeightSyncError, naming the first difference, unless the receipt proves the update."""
    if receipt.weight_version != weight_version:
        raise WeightSyncError(
            f"{engine_name} holds weight version {receipt.weight_version}, sent {weight_version}"
        )
    if not receipt.is_cache_reset:
        raise WeightSyncError(f"{engine_name} kept its prefix cache over a weight update")
    missing = sent.keys() - receipt.fingerprints.keys()
    if missing:
        raise WeightSyncError(
            f"{engine_name} did not receive {len(missing)} tensors, e.g. {sorted(missing)[0]}"
        )
    wrong = [name for name, value in sent.items() if receipt.fingerprints[name] != value]
    if wrong:
        raise WeightSyncError(
            f"{engine_name}: {len(wrong)} tensors differ from the trainer's, e.g. {wrong[0]}"
        )


def _noted(tensors: NamedTensors, fingerprints: dict[str, int]) -> NamedTensors:
    """Yield the same tensors; note the fingerprint of each in the trainer's own memory."""
    for name, tensor in tensors:
        fingerprints[name] = fingerprint(tensor)
        yield name, tensor
