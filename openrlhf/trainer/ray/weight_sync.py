"""Weight sync: the trainer's weights to every engine in buckets, and proof that they arrived.

Every rank of the trainer takes part (gathering is collective under ZeRO-3 and tensor parallelism).
Buckets go through memory that engine and trainer share, by a broadcast, or through Ray's object
store; an engine that cannot show the fingerprints of what was sent fails the sync by name.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import ray
import torch
from torch import Tensor

from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.collectives import all_gather_object, barrier, rank
from openrlhf.engines.base import NamedTensors, RolloutEngine, WeightBucket
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.engines.weight_transfer import BroadcastGroup, WeightTransport
from openrlhf.errors import WeightSyncError
from openrlhf.utils.tensors import fingerprint

Result = TypeVar("Result")


class HandleTransport(WeightTransport):
    """Engine workers open the buffer of the trainer rank on their own GPU or node.

    All ranks pack the same buckets at the same time; rank 0 tells the engines of them.
    """

    def __init__(self, device: torch.device, *, num_readers: int) -> None:
        """`num_readers`: engine workers, which share devices with the first ranks."""
        super().__init__(device)
        place = self.memory.place
        is_first_here = all_gather_object(place).index(place) == rank()
        self.is_used = is_first_here and rank() < num_readers

    def buckets(self, tensors: NamedTensors) -> Iterator[tuple[WeightBucket, Tensor]]:
        for bucket, data in super().buckets(tensors):
            yield bucket, data
            barrier()  # rank 0 is here once engines have read the bucket before this one

    def address(self, data: Tensor) -> dict[str, Any]:
        """Return {place: handle} of all ranks; none returns before all have filled their buffer."""
        return dict(ChainMap(*all_gather_object(super().address(data))))

    def finish(self) -> None:
        barrier()  # rank 0 is here once engines have let go of the last bucket
        super().finish()


class BroadcastTransport(WeightTransport):
    """Rank 0 broadcasts each bucket to the workers of all engines."""

    def connect(
        self, engines: Sequence[RolloutEngine], *, host: str, port: int, workers_per_engine: int
    ) -> None:
        """Meet all engines as rank 0 of one group."""
        world_size = 1 + len(engines) * workers_per_engine
        device = self.memory.device

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
                calls.append(pool.submit(engine.call, VLLMEngine.init_weight_transfer, info))
            all_results(calls)
        finally:
            pool.shutdown(wait=False)

    def address(self, data: Tensor) -> dict[str, Any]:
        """Engines need no address: they wait for the broadcast."""
        return {}

    def push(self, data: Tensor) -> None:
        self.group.broadcast(data)


class ObjectTransport(WeightTransport):
    """Each bucket is an object of Ray's store, for nodes between which no group can form."""

    def address(self, data: Tensor) -> dict[str, Any]:
        """Put a copy into the store; Ray takes it once to every other node with an engine."""
        return {"object": ray.put(data.numpy())} if self.is_used else {}


def weight_route(
    config: PPOConfig, device: torch.device, *, num_engines: int, num_ranks: int
) -> tuple[str, torch.device]:
    """Return how weights travel to engines in other processes, and where buckets lie: the fastest
    way that works.

    Two ranks of an NCCL group cannot share a GPU, so an engine that shares one with a rank of
    another place receives gloo's broadcast.
    """
    vllm, cpu = config.vllm, torch.device("cpu")
    if vllm.sync_with_ray:
        return "objects", cpu
    fastest = cpu if vllm.sync_backend == "gloo" else device
    is_colocated = config.engines_share_devices
    if is_colocated and num_engines * vllm.tensor_parallel_size <= num_ranks:
        return "handles", fastest
    return "broadcast", cpu if is_colocated else fastest


def make_transport(
    way: str,
    device: torch.device,
    engines: Sequence[RolloutEngine],
    *,
    workers_per_engine: int,
    endpoint: Callable[[], tuple[str, int]],
) -> WeightTransport:
    """Return the transport of this way, with buckets on the device; every rank calls."""
    if way == "objects":
        return ObjectTransport(device, is_used=rank() == 0)
    if way == "handles":
        return HandleTransport(device, num_readers=len(engines) * workers_per_engine)
    transport = BroadcastTransport(device, is_used=rank() == 0)
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
    """Send full named tensors to all engines and compare the fingerprints of what each received;
    every rank calls. Return the fingerprint of each tensor on rank 0.

    Raise WeightSyncError naming the first difference, and when requests run, unless `keep_running`:
    then they go on under the new weights.
    """
    sent: dict[str, int] = {}
    if rank() > 0:
        for _ in transport.buckets(tensors):
            pass
        transport.finish()
        return sent
    pool = ThreadPoolExecutor(max_workers=len(engines) + 1)
    try:
        all_results(
            [pool.submit(e.call, VLLMEngine.begin_weight_update, keep_running) for e in engines]
        )
        pending: list[Future[None]] = []
        for bucket, data in transport.buckets(_noted(tensors, sent)):
            all_results(pending)
            pending = [pool.submit(e.call, VLLMEngine.receive_bucket, bucket) for e in engines]
            pending.append(pool.submit(transport.push, data))
        all_results(pending)
        receipts = all_results(
            [pool.submit(e.call, VLLMEngine.finish_weight_update, weight_version) for e in engines]
        )
        transport.finish()
    finally:
        pool.shutdown(wait=False)
    for engine, received in zip(engines, receipts, strict=True):
        wrong = [name for name, value in sent.items() if received.get(name) != value]
        if wrong:
            raise WeightSyncError(
                f"{engine.who}: {len(wrong)} tensors differ from the trainer's or did not come, "
                f"e.g. {wrong[0]}"
            )
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


def _noted(tensors: NamedTensors, fingerprints: dict[str, int]) -> NamedTensors:
    """Yield the same tensors; note the fingerprint of each in the trainer's own memory."""
    for name, tensor in tensors:
        fingerprints[name] = fingerprint(tensor)
        yield name, tensor
