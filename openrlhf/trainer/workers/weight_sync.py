"""Weight sync: the trainer's weights to every engine in buckets, and proof that they arrived.

Every rank of the trainer takes part (gathering is collective under ZeRO-3 and tensor parallelism).
Buckets go through memory that engine and trainer share, by a broadcast, or through Ray's object
store; an engine that cannot show the fingerprints of what was sent fails the sync by name. One that
dies or hangs meanwhile is left out, and the others get everything.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.collectives import all_gather_object, barrier, rank
from openrlhf.engines.base import RolloutEngine, WeightBucket
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.engines.weight_transfer import (
    WAS_BROKEN_OFF,
    Broadcasts,
    CudaMemory,
    Handle,
    HostMemory,
    memory_of,
)
from openrlhf.errors import EngineError, LostEngineError, WeightSyncError
from openrlhf.utils.tensors import NamedTensors, align, as_bytes, both_sums, dtype_name, read_sums

NUM_BUFFERS = 2  # one is filled while the other one is read
# Of a large model, at most: each is a call to every engine, which takes 64 for an update. Beyond
# that size of a bucket there are more.
MAX_BUCKETS, MAX_BUCKET_BYTES = 61, 5 << 30
LEAVE_S = 10.0  # for those that took too long, after the transfer was broken off
WAIT_S = 600.0  # for an engine to take a bucket, where nobody says otherwise
TRAINER = -1  # stands for the trainer's part of a call among the engines' indices


class SyncFailure(NamedTuple):
    """Why an engine does not hold the weights.

    Example: `SyncFailure("vllm-0 did not respond in 300 s", is_lost=True)`
    """

    reason: str
    is_lost: bool  # dead or hung; else it takes the weights when they are sent again


class WeightTransport:
    """The trainer's side of a transport: tensors are packed into two buffers, which alternate.

    A rank that nobody reads from packs nothing, but walks through the same buckets. Rank 0 calls
    the engines. A subclass says how to `connect`, how readers find the bytes of a bucket
    (`address`), and what is sent besides (`start_sending`); BucketReader is the engine's side.
    """

    is_opened = False  # True if readers open the buffers by a handle

    def __init__(
        self,
        device: torch.device,
        engines: Sequence[RolloutEngine],
        *,
        workers_per_engine: int = 1,
        endpoint: Callable[[], tuple[str, int]] | None = None,
        wait_s: float = WAIT_S,
        num_bytes: int = 0,
    ) -> None:
        """Connect to the engines; every rank calls.

        `endpoint` returns the address at which a group with them meets. An engine may take `wait_s`
        seconds for a bucket. `num_bytes` is the size of all weights.
        """
        self.engines, self.endpoint, self.wait_s = list(engines), endpoint, wait_s
        self.workers_per_engine = workers_per_engine
        self.failed: dict[int, SyncFailure] = {}  # engines by index; nothing is sent to them
        self.own_error: BaseException | None = None  # of the trainer, if no engine caused it
        self.memory = self.own_memory(device)
        # Two neighbours hold more than this together: a tensor begins the next one where it does
        # not fit into what is left.
        fitting = min(2 * num_bytes // (MAX_BUCKETS - 1), MAX_BUCKET_BYTES)
        self.bucket_bytes = max(self.memory.bucket_bytes, fitting)
        self._buffers: list[tuple[Tensor, Handle]] = []  # the one that is filled comes last
        self._pool = ThreadPoolExecutor(max_workers=len(engines) + 1)
        self.is_used = rank() == 0  # True if somebody reads from this rank
        self.connect()

    def own_memory(self, device: torch.device) -> HostMemory | CudaMemory:
        """Return the memory that the buffers are in."""
        return memory_of(device)

    def connect(self) -> None:
        """Get ready to send; every rank calls."""

    def address(self, data: Tensor) -> dict[str, Any]:
        """Return the address at which engines find a bucket's bytes, (n,) uint8; all ranks call."""
        raise NotImplementedError

    def start_sending(self, data: Tensor) -> dict[int, Future[Any]]:
        """Send bytes that no address leads to; rank 0 calls."""
        return {}

    def break_off(self, why: str) -> None:
        """Release engines that wait for a peer which has failed."""

    def buckets(self, tensors: NamedTensors) -> Iterator[tuple[WeightBucket, Tensor]]:
        """Yield buckets of about `bucket_bytes` and their bytes; a larger tensor travels alone. The
        bytes are overwritten when the next bucket but one is asked for. Do not keep them: they hold
        the buffer.
        """
        entries: list[tuple[str, str, tuple[int, ...], int]] = []
        num_bytes = 0
        for name, tensor in tensors:
            begin = align(num_bytes)
            if entries and begin + tensor.nbytes > self.bucket_bytes:
                yield self._finished(entries, num_bytes)
                barrier()  # rank 0 is here once engines have read the bucket before this one
                entries, begin = [], 0
            if self.is_used and not entries:
                self._next_buffer(tensor.nbytes)
            num_bytes = begin + tensor.nbytes
            if self.is_used:
                self._buffers[-1][0][begin:num_bytes].copy_(as_bytes(tensor))
            entries.append((name, dtype_name(tensor.dtype), tuple(tensor.shape), begin))
        if entries:
            yield self._finished(entries, num_bytes)

    def finish(self) -> None:
        """Give device memory back until the next update."""
        barrier()  # rank 0 is here once engines have let go of the last bucket
        if not self.memory.is_kept:
            self._buffers = []
            self.memory.collect()

    def _finished(
        self, entries: list[tuple[str, str, tuple[int, ...], int]], num_bytes: int
    ) -> tuple[WeightBucket, Tensor]:
        names, dtypes, shapes, offsets = zip(*entries, strict=True)
        data = torch.empty(0, dtype=torch.uint8)
        if self.is_used:
            self.memory.finish_copies()
            data = self._buffers[-1][0][:num_bytes]
        address = self.address(data)
        return WeightBucket(names, dtypes, shapes, offsets, num_bytes, address), data

    def _next_buffer(self, num_bytes: int) -> None:
        """Take the other buffer, or a new one where there is none or it is too small."""
        if len(self._buffers) == NUM_BUFFERS:
            oldest = self._buffers.pop(0)
            if len(oldest[0]) >= num_bytes:
                self._buffers.append(oldest)
                return
        size = max(num_bytes, self.bucket_bytes)
        self._buffers.append(self.memory.allocate(size, is_opened=self.is_opened))

    def send(
        self, tensors: NamedTensors, weight_version: int, *, keep_running: bool = False
    ) -> dict[str, int]:
        """Send full named tensors to all engines and compare the fingerprints of what each
        received; every rank calls. Return the fingerprint of each tensor on rank 0, which notes the
        engines that have `failed`; then another transport sends the weights again.

        Raise WeightSyncError naming the first difference, and when requests run, unless
        `keep_running`: then they go on under the new weights.
        """
        sums: dict[str, Tensor] = {}
        if rank() > 0:
            for _ in self.buckets(tensors):
                pass
            self.finish()
            return {}
        self._results(self._on_all(VLLMEngine.begin_weight_update, keep_running))
        pending: dict[int, Future[Any]] = {}
        for bucket, data in self.buckets(_noted(tensors, sums)):
            self._results(pending)
            pending = self._on_all(VLLMEngine.receive_bucket, bucket)
            pending |= self.start_sending(data) if pending else {}
        self._results(pending)
        receipts = self._results(self._on_all(VLLMEngine.finish_weight_update, weight_version))
        self.finish()
        sent = {name: n for name, (n, _) in zip(sums, read_sums([*sums.values()]), strict=True)}
        for index, received in receipts.items():
            wrong = [name for name, value in sent.items() if received.get(name) != value]
            if wrong:
                raise WeightSyncError(
                    f"{self.engines[index].who}: {len(wrong)} tensors differ from the trainer's or "
                    f"did not come, e.g. {wrong[0]}"
                )
        return sent

    def _on_all(self, method: Callable[..., Any], *args: object) -> dict[int, Future[Any]]:
        """Make a call on all engines that have not failed; return it by the engine's index."""
        return {
            index: self._pool.submit(engine.call, method, *args)
            for index, engine in enumerate(self.engines)
            if index not in self.failed
        }

    def _results(self, calls: Mapping[int, Future[Any]]) -> dict[int, Any]:
        """Return the results of calls, by engine; note those that die, hang or break off.

        Raise any other error at once: peers of a failed call may hang.
        """
        done, late = wait(calls.values(), self.wait_s, FIRST_EXCEPTION)
        errors = [error for call in done if (error := call.exception())]
        for error in errors:
            if not isinstance(error, EngineError):
                raise error
        own_error = calls[TRAINER].exception() if calls.get(TRAINER) in done else None
        if errors or late:
            self.break_off(str(own_error or "its peer failed"))
            wait(late, self.wait_s if errors else min(LEAVE_S, self.wait_s))
        results = {}
        for index, call in calls.items():
            error = call.exception() if call.done() else None
            if call.done() and error is None:
                results[index] = call.result()
            elif index != TRAINER and WAS_BROKEN_OFF not in str(error):
                own_error = None
                late_by = f"{self.engines[index].who} took no weights for {self.wait_s:g} s"
                is_lost = error is None or isinstance(error, LostEngineError)
                self.failed[index] = SyncFailure(str(error or late_by), is_lost)
        self.own_error = self.own_error or own_error
        return results


class HandleTransport(WeightTransport):
    """Engine workers open the buffer of the trainer rank on their own GPU or node. All ranks pack
    the same buckets at the same time.
    """

    is_opened = True

    def connect(self) -> None:
        """Find the ranks that are read: the first on each node or GPU where engine workers are."""
        calls = self._on_all(VLLMEngine.memory_locations) if rank() == 0 else {}
        read = {place for places in self._results(calls).values() for place in places}
        own = self.memory.location
        (_, read), *_ = places = all_gather_object((own, read))
        self.is_used = own in read and [place for place, _ in places].index(own) == rank()

    def address(self, data: Tensor) -> dict[str, Any]:
        own = {self.memory.location: self._buffers[-1][1]} if self.is_used else {}
        return dict(ChainMap(*all_gather_object(own)))  # none goes on before all have filled theirs


class BroadcastTransport(WeightTransport):
    """Rank 0 broadcasts each bucket to the workers of all engines."""

    _group: Broadcasts | None = None

    def connect(self) -> None:
        """Meet all engines as rank 0 of one group."""
        if rank() > 0:
            return
        assert self.endpoint is not None
        (host, port), device = self.endpoint(), self.memory.device
        world_size = 1 + len(self.engines) * self.workers_per_engine
        info: dict[str, object] = {"device_type": device.type, "host": host, "port": port}
        info["world_size"] = world_size
        submit, join = self._pool.submit, VLLMEngine.init_weight_transfer
        self._group = Broadcasts(host, port, rank=0, world_size=world_size)
        calls: dict[int, Future[Any]] = {TRAINER: submit(self._group.join, device)}
        for index, engine in enumerate(self.engines):
            offset = {"rank_offset": 1 + index * self.workers_per_engine}
            calls[index] = submit(engine.call, join, info | offset)
        self._results(calls)

    def address(self, data: Tensor) -> dict[str, Any]:
        return {}

    def start_sending(self, data: Tensor) -> dict[int, Future[Any]]:
        assert self._group is not None
        return {TRAINER: self._pool.submit(self._group.broadcast, data)}

    def break_off(self, why: str) -> None:
        if self._group is not None:
            self._group.break_off()
        for index in set(range(len(self.engines))) - self.failed.keys():
            self.failed[index] = SyncFailure(why, is_lost=False)


class ObjectTransport(WeightTransport):
    """Each bucket is an object of Ray's store, which takes it once to every other node; for nodes
    between which no group can form.
    """

    put: Callable[[Any], Any]  # into the store; set where a rank is an actor of Ray

    def address(self, data: Tensor) -> dict[str, Any]:
        return {"object": type(self).put(data.numpy())} if self.is_used else {}


def weight_route(
    config: PPOConfig, device: torch.device, *, num_engines: int, num_ranks: int
) -> tuple[type[WeightTransport], torch.device]:
    """Return the fastest transport of weights to engines in other processes that works, and the
    device of its buckets.

    Two ranks of an NCCL group cannot share a GPU, so an engine that shares one with a rank of
    another node receives gloo's broadcast.
    """
    vllm, cpu = config.vllm, torch.device("cpu")
    if vllm.sync_with_ray:
        return ObjectTransport, cpu
    fastest = cpu if vllm.sync_backend == "gloo" else device
    is_colocated = config.engines_share_devices
    if is_colocated and num_engines * vllm.tensor_parallel_size <= num_ranks:
        return HandleTransport, fastest
    return BroadcastTransport, cpu if is_colocated else fastest


def _noted(tensors: NamedTensors, sums: dict[str, Tensor]) -> NamedTensors:
    """Yield the same tensors; note the sums of each in the trainer's own memory."""
    for name, tensor in tensors:
        sums[name] = both_sums(tensor)
        yield name, tensor
