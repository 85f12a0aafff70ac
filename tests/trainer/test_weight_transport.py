"""Which way weights take, and what travels on it; CUDA's part is played by plain classes."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from openrlhf.config.ppo import PPOConfig
from openrlhf.engines.base import (
    RAY_BACKEND,
    SHM_BACKEND,
    NamedTensors,
    SyncReceipt,
    WeightBucket,
)
from openrlhf.engines.shared_memory import ShmBucketReader, checksum
from openrlhf.errors import ConfigError, WeightSyncError
from openrlhf.trainer.ray import weight_transport
from openrlhf.trainer.ray.cluster import engine_config, role_counts, weight_transfer_backend
from openrlhf.trainer.ray.device_buffer import DeviceBuffer
from openrlhf.trainer.ray.object_store import FetchedBuckets, ObjectStoreTransport
from openrlhf.trainer.ray.placement import ClusterView
from openrlhf.trainer.ray.weight_sync import send_weights
from openrlhf.trainer.ray.weight_transport import (
    IPC_BACKEND,
    NCCL_BACKEND,
    IpcTransport,
    NcclTransport,
    SharedMemoryTransport,
    TransferGroup,
    check_one_machine,
    choose_transport,
    make_transport,
)
from openrlhf.utils.tensors import fingerprint

LAPTOP = ClusterView(num_gpus=0, num_cpus=2, max_gpus_per_node=0)
NODE = ClusterView(num_gpus=8, num_cpus=64, max_gpus_per_node=8)
TWO_NODES = ClusterView(num_gpus=16, num_cpus=128, max_gpus_per_node=8)

# With buckets of 40 bytes: 16 + 24 | 2 (another type) | 64 (alone) | 8
WEIGHTS = [
    ("a", torch.arange(4.0)),
    ("b", torch.ones(3, 2)),
    ("odd", torch.tensor([3.0], dtype=torch.bfloat16)),
    ("large", torch.full((4, 4), 2.0)),
    ("c", torch.zeros(2)),
]
BUCKETS = [("a", "b"), ("odd",), ("large",), ("c",)]


def backend(cluster: ClusterView, sync: str = "nccl", **train: object) -> str:
    sections = {"actor": {"model_name_or_path": "m"}, "vllm": {"sync_backend": sync}}
    return backend_of(cluster, sections | {"train": train})


def backend_of(cluster: ClusterView, sections: dict) -> str:
    config = PPOConfig.model_validate(sections)
    counts = role_counts(config, cluster, has_critic=False, has_reference=False)
    return weight_transfer_backend(config, counts)


def test_the_way_follows_from_the_devices():
    assert backend(LAPTOP) == backend(LAPTOP, "gloo") == SHM_BACKEND
    assert backend(LAPTOP, colocate_all=True) == SHM_BACKEND
    assert backend(NODE) == NCCL_BACKEND
    assert backend(NODE, colocate_all=True) == IPC_BACKEND
    assert backend(NODE, "gloo") == backend(NODE, "gloo", colocate_all=True) == SHM_BACKEND
    assert backend(TWO_NODES) == NCCL_BACKEND
    assert backend(TWO_NODES, colocate_all=True) == IPC_BACKEND


@pytest.mark.parametrize("cluster", [LAPTOP, NODE, TWO_NODES])
@pytest.mark.parametrize("colocate", [False, True])
def test_rays_object_store_is_a_way_on_every_cluster(cluster, colocate):
    model = {"model_name_or_path": "m", "num_gpus_per_node": 2}
    sections = {"actor": model, "vllm": {"num_engines": 4, "sync_with_ray": True}}
    assert backend_of(cluster, sections | {"train": {"colocate_all": colocate}}) == RAY_BACKEND


def test_an_engine_gpu_without_a_trainer_rank_goes_through_host_memory():
    sections = {
        "actor": {"model_name_or_path": "m", "num_gpus_per_node": 2},
        "vllm": {"num_engines": 4},
        "train": {"colocate_all": True},
    }
    assert backend_of(NODE, sections) == SHM_BACKEND
    with pytest.raises(ConfigError, match="as many GPUs as the engines"):
        backend_of(TWO_NODES, sections)


def test_host_memory_does_not_reach_other_machines():
    with pytest.raises(ConfigError, match="Type --vllm_sync_backend nccl"):
        choose_transport(
            "gloo",
            has_gpus=True,
            is_colocated=False,
            with_ray=False,
            is_one_machine=False,
            has_rank_on_every_engine_gpu=True,
        )
    check_one_machine(["10.0.0.1", "10.0.0.1"])
    with pytest.raises(
        ConfigError, match=r"are on 10\.0\.0\.1, 10\.0\.0\.2\. Type --vllm_sync_with_ray"
    ):
        check_one_machine(["10.0.0.2", "10.0.0.1"])


def test_the_engine_is_started_with_it(tiny_model_dir):
    config = PPOConfig.model_validate({"actor": {"model_name_or_path": str(tiny_model_dir)}})
    made = engine_config(config, dtype=torch.bfloat16, weight_transfer_backend=IPC_BACKEND)
    assert made.weight_transfer_backend == IPC_BACKEND
    assert engine_config(config, dtype=torch.float32).weight_transfer_backend == SHM_BACKEND


class FakeMemory:
    """Buffers in host memory; the handle holds the buffer itself."""

    def __init__(self, gpu: str = "GPU-0") -> None:
        self.gpu = gpu
        self.who = f"the engine on {gpu}"
        self.num_exports = 0

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def handle(self, buffer: Tensor) -> dict[str, tuple]:
        self.num_exports += 1
        return {self.gpu: (buffer,)}

    def synchronize(self) -> None: ...

    def collect(self) -> None: ...

    def stream(self) -> str:
        return "stream"


class FakeEngine:
    """What every engine does in an update; subclasses say how tensors come in."""

    weight_transfer_backend = ""

    who = "vllm-0"

    def __init__(self) -> None:
        self.init_info: dict = {}
        self.held: dict[str, Tensor] = {}
        self.buckets: list[tuple[str, ...]] = []

    def init_weight_transfer(self, init_info: dict) -> None:
        self.init_info = init_info

    def begin_weight_update(self, *, keep_running: bool = False) -> None:
        self.held.clear()

    def receive_bucket(self, bucket: WeightBucket) -> None:
        info = bucket.handle["update_info"]
        self.buckets.append(tuple(info["names"]))
        self.held |= self.receive(info)

    def receive(self, info: dict) -> dict[str, Tensor]:
        raise NotImplementedError

    def finish_weight_update(self, weight_version: int) -> SyncReceipt:
        prints = {name: fingerprint(tensor) for name, tensor in self.held.items()}
        return SyncReceipt(weight_version, prints, is_cache_reset=True)


class IpcEngine(FakeEngine):
    """Reads the buffer on its own GPU, and no other."""

    weight_transfer_backend = IPC_BACKEND

    def __init__(self, gpu: str = "GPU-0") -> None:
        super().__init__()
        self.gpu = gpu
        self.who = f"the engine on {gpu}"

    def receive(self, info: dict) -> dict[str, Tensor]:
        [buffer] = info["ipc_handles"][self.gpu]
        parts = buffer[: sum(info["tensor_sizes"])].split(info["tensor_sizes"])
        fields = zip(info["names"], info["dtype_names"], info["shapes"], parts, strict=True)
        return {
            name: part.view(getattr(torch, dtype)).view(shape).clone()
            for name, dtype, shape, part in fields
        }


class StoreEngine(FakeEngine):
    """Reads buckets out of Ray's object store as an engine actor does; may lose a value."""

    weight_transfer_backend = RAY_BACKEND

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.fetcher, self.reader = FetchedBuckets(), ShmBucketReader()

    def receive_bucket(self, bucket: WeightBucket) -> None:
        self.buckets.append(bucket.names)
        here = self.fetcher.fetched(bucket)
        self.held |= {name: tensor.clone() for name, tensor in self.reader.read(here)}
        if self.fault in self.held:
            self.held[self.fault].flatten()[0] += 1

    def finish_weight_update(self, weight_version: int) -> SyncReceipt:
        sums = {name: checksum(tensor) for name, tensor in self.held.items()}
        return SyncReceipt(weight_version, sums, is_cache_reset=True)


@pytest.mark.usefixtures("ray_cluster")
def test_buckets_go_through_rays_object_store_and_are_proven():
    transport = ObjectStoreTransport(64)
    engines = [StoreEngine(), StoreEngine()]
    for version in (1, 2):
        report = send_weights(WEIGHTS, engines, version, writer=transport)
        assert report.num_buckets > 1
    for engine in engines:
        assert all(torch.equal(engine.held[name], tensor) for name, tensor in WEIGHTS)
    with pytest.raises(WeightSyncError, match=r"1 tensors differ .*e\.g\. large"):
        send_weights(WEIGHTS, [StoreEngine("large")], 3, writer=transport)


class Wire:
    """A communicator and the workers at its other end."""

    disabled = False

    def __init__(self, num_workers: int) -> None:
        self.queues = [queue.Queue() for _ in range(num_workers)]
        self.streams: set[str] = set()

    def broadcast(self, tensor: Tensor, src: int, stream: str) -> None:
        assert src == 0
        self.streams.add(stream)
        for line in self.queues:
            line.put(tensor.clone())


class NcclEngine(FakeEngine):
    """Waits for every tensor it was told of."""

    weight_transfer_backend = NCCL_BACKEND

    def __init__(self, wire: Wire, index: int) -> None:
        super().__init__()
        self.line = wire.queues[index]

    def receive(self, info: dict) -> dict[str, Tensor]:
        return {name: self.line.get(timeout=20) for name in info["names"]}


def nccl(wire: Wire, bucket_bytes: int = 40) -> NcclTransport:
    group = TransferGroup(lambda: ("10.0.0.1", 1234), 2, lambda *_: wire)
    return NcclTransport(bucket_bytes, FakeMemory(), group=group)


def test_tensors_lie_one_behind_another_in_buckets_of_one_type():
    buffer = DeviceBuffer(40, FakeMemory())
    found = []
    for packing in buffer.packed(WEIGHTS):
        found.append((tuple(packing.names), packing.offsets, packing.num_bytes))
        if packing.names == ["a", "b"]:
            expected = torch.tensor([0.0, 1.0, 2.0, 3.0] + [1.0] * 6)
            assert torch.equal(buffer.bytes[:40].view(torch.float32), expected)
    assert found == [
        (("a", "b"), [0, 16], 40),
        (("odd",), [0], 2),
        (("large",), [0], 64),
        (("c",), [0], 8),
    ]


def test_ipc_lends_the_buffer_once_and_again_when_it_is_a_new_one():
    memory, engine = FakeMemory(), IpcEngine()
    transport = IpcTransport(40, memory, has_reader=True)
    transport.connect([engine])
    report = send_weights(WEIGHTS, [engine], 1, writer=transport)
    assert engine.init_info == {"packed": True}
    assert engine.buckets == BUCKETS
    assert report.num_bytes == 114
    assert memory.num_exports == 2  # the second for the tensor that is larger than a bucket
    send_weights(WEIGHTS, [engine], 2, writer=transport)
    assert memory.num_exports == 4


class Ranks:
    """Collectives among threads; one that does not come fails the others."""

    def __init__(self, size: int) -> None:
        self.meeting = threading.Barrier(size, timeout=20)
        self.things: dict[int, object] = {}
        self.local = threading.local()

    def barrier(self) -> None:
        self.meeting.wait()

    def all_gather_object(self, thing: object) -> list[object]:
        self.things[self.local.rank] = thing
        self.meeting.wait()
        everything = [self.things[rank] for rank in sorted(self.things)]
        self.meeting.wait()
        return everything


def test_every_engine_reads_the_rank_on_its_own_gpu(monkeypatch):
    ranks = Ranks(3)
    monkeypatch.setattr(weight_transport, "barrier", ranks.barrier)
    monkeypatch.setattr(weight_transport, "all_gather_object", ranks.all_gather_object)
    engines = [IpcEngine("GPU-0"), IpcEngine("GPU-1")]
    memories = [FakeMemory(f"GPU-{rank}") for rank in range(3)]

    def run(rank: int) -> None:
        ranks.local.rank = rank
        transport = IpcTransport(40, memories[rank], has_reader=rank < len(engines))
        for version in (1, 2):
            if rank == 0:
                send_weights(WEIGHTS, engines, version, writer=transport)
            else:
                transport.follow(WEIGHTS)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    for engine in engines:
        assert engine.buckets == BUCKETS * 2
        assert all(torch.equal(engine.held[name], tensor) for name, tensor in WEIGHTS)
    assert [memory.num_exports for memory in memories] == [4, 4, 0]


def test_a_rank_whose_copy_differs_is_found(monkeypatch):
    handles = {"GPU-1": (torch.zeros(64, dtype=torch.uint8),)}
    monkeypatch.setattr(weight_transport, "all_gather_object", lambda own: [own, handles])
    transport = IpcTransport(40, FakeMemory("GPU-0"), has_reader=True)
    with pytest.raises(WeightSyncError, match=r"^the engine on GPU-1: 4 tensors differ"):
        send_weights(WEIGHTS, [IpcEngine("GPU-0"), IpcEngine("GPU-1")], 1, writer=transport)


def test_nccl_broadcasts_while_the_engines_receive():
    wire = Wire(2)
    engines = [NcclEngine(wire, 0), NcclEngine(wire, 1)]
    transport = nccl(wire)
    transport.connect(engines)
    shared = {
        "master_address": "10.0.0.1",
        "master_port": 1234,
        "world_size": 5,  # the trainer and two engines of two workers
        "packed": False,
    }
    assert [engine.init_info for engine in engines] == [
        shared | {"rank_offset": 1},
        shared | {"rank_offset": 3},
    ]
    for version in (1, 2):
        send_weights(WEIGHTS, engines, version, writer=transport)
    assert engines[1].buckets == BUCKETS * 2
    assert wire.streams == {"stream"}


def test_a_trainer_without_nccl_says_so():
    wire = Wire(1)
    wire.disabled = True
    with pytest.raises(WeightSyncError, match="--vllm_sync_backend gloo"):
        nccl(wire).connect([NcclEngine(wire, 0)])


def test_a_failed_engine_is_named_while_its_peers_still_wait():
    never = threading.Event()

    class Stuck(NcclEngine):
        def receive(self, info: dict) -> dict[str, Tensor]:
            never.wait(20)
            return {}

    class Broken(NcclEngine):
        def receive(self, info: dict) -> dict[str, Tensor]:
            raise WeightSyncError("no room [vllm-1]")

    wire = Wire(2)
    transport = nccl(wire)
    engines = [Stuck(wire, 0), Broken(wire, 1)]
    transport.connect(engines)
    try:
        with pytest.raises(WeightSyncError, match="no room"):
            send_weights(WEIGHTS, engines, 1, writer=transport)
        assert not never.is_set()
    finally:
        never.set()


@pytest.mark.parametrize(
    ("name", "rank", "kind"),
    [
        (SHM_BACKEND, 0, SharedMemoryTransport),
        (RAY_BACKEND, 0, ObjectStoreTransport),
        (IPC_BACKEND, 3, IpcTransport),
        (IPC_BACKEND, 4, IpcTransport),
        (NCCL_BACKEND, 0, NcclTransport),
    ],
)
def test_the_trainer_speaks_what_the_engines_were_started_with(name, rank, kind):
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        engine.weight_transfer_backend = name
    made = make_transport(
        engines,
        rank=rank,
        tensor_parallel_size=2,
        device=torch.device("cuda"),
        endpoint=lambda: ("h", 1),
    )
    assert isinstance(made, kind)
    if isinstance(made, IpcTransport):
        assert made.buffer.is_used is (rank < 4)


def test_what_is_told_is_what_vllm_reads():
    nccl_engine = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    ipc_engine = pytest.importorskip("vllm.distributed.weight_transfer.ipc_engine")
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    for info in TransferGroup(lambda: ("h", 1), 2, lambda *_: None).init_infos(2, "h", 1):
        nccl_engine.NCCLWeightTransferInitInfo(**info)
    ipc_engine.IPCWeightTransferInitInfo(packed=True)
    for bucket in nccl(Wire(1)).write(WEIGHTS, {}):
        nccl_engine.NCCLWeightTransferUpdateInfo(**bucket.handle["update_info"])
    received: NamedTensors = []
    for bucket in IpcTransport(40, FakeMemory(), has_reader=True).write(WEIGHTS, {}):
        told = ipc_engine.IPCWeightTransferUpdateInfo(**bucket.handle["update_info"])
        [buffer] = told.ipc_handles["GPU-0"]
        dtypes = [getattr(torch, name) for name in told.dtype_names]
        packed = buffer[: sum(told.tensor_sizes)]
        parts = unpack_tensor(packed, told.names, told.shapes, dtypes, told.tensor_sizes)
        received += [(name, tensor.clone()) for name, tensor in parts]
    assert [name for name, _ in received] == [name for name, _ in WEIGHTS]
    for (_, got), (_, sent) in zip(received, WEIGHTS, strict=True):
        assert got.dtype == sent.dtype and torch.equal(got, sent)
