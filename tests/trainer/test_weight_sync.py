"""How weights travel, and that a sync is only over when every engine has shown what it holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from openrlhf.config.ppo import PPOConfig
from openrlhf.engines.base import NamedTensors, WeightBucket, WeightRoute
from openrlhf.engines.weight_transfer import BroadcastGroup, BucketReader, HostMemory
from openrlhf.errors import WeightSyncError
from openrlhf.trainer.ray import weight_sync
from openrlhf.trainer.ray.cluster import weight_route
from openrlhf.trainer.ray.placement import ClusterView, role_counts
from openrlhf.trainer.ray.weight_sync import (
    HandleTransport,
    WeightTransport,
    fetched,
    make_transport,
    send_weights,
)
from openrlhf.utils.tensors import fingerprint
from tests.gpu.engines import endpoint

LAPTOP = ClusterView(num_gpus=0, num_cpus=2, max_gpus_per_node=0)
NODE = ClusterView(num_gpus=8, num_cpus=64, max_gpus_per_node=8)
TWO_NODES = ClusterView(num_gpus=16, num_cpus=128, max_gpus_per_node=8)

CPU = torch.device("cpu")
# In buckets of 128 bytes, at multiples of 64: a, b | odd, c | large (alone) | d
WEIGHTS = [
    ("a", torch.arange(4.0)),
    ("b", torch.ones(3, 2)),
    ("odd", torch.tensor([3.0], dtype=torch.bfloat16)),
    ("c", torch.zeros(2)),
    ("large", torch.full((8, 8), 2.0)),
    ("d", torch.arange(6.0).view(2, 3).T),
]
BUCKETS = [("a", "b"), ("odd", "c"), ("large",), ("d",)]


def route(cluster: ClusterView, *, num_engines: int = 2, num_ranks: int = 2, **flags) -> tuple:
    vllm = {"num_engines": num_engines} | {k: v for k, v in flags.items() if k != "colocate_all"}
    config = PPOConfig.model_validate(
        {
            "actor": {"model_name_or_path": "m", "num_gpus_per_node": num_ranks},
            "vllm": vllm,
            "train": {"colocate_all": flags.get("colocate_all", False)},
        }
    )
    counts = role_counts(config, cluster)
    found = weight_route(config, counts)
    return found.way, found.device_type


@pytest.mark.parametrize(("cluster", "device"), [(LAPTOP, "cpu"), (NODE, "cuda")])
def test_colocated_engines_open_handles_and_separate_ones_receive_broadcasts(cluster, device):
    assert route(cluster, colocate_all=True) == ("handles", device)
    assert route(cluster) == ("broadcast", device)
    assert route(cluster, sync_backend="gloo", colocate_all=True) == ("handles", "cpu")
    assert route(cluster, sync_backend="gloo") == ("broadcast", "cpu")
    assert route(cluster, sync_with_ray=True) == ("objects", "cpu")
    assert route(cluster, sync_with_ray=True, colocate_all=True) == ("objects", "cpu")
    assert route(TWO_NODES) == ("broadcast", "cuda")
    # Two ranks of NCCL cannot share a GPU.
    assert route(cluster, num_engines=4, colocate_all=True) == ("broadcast", "cpu")


class FakeEngine:
    """Reads buckets as a worker of vLLM does and keeps copies; can be told to misbehave."""

    who = "vllm-0"

    def __init__(self, way: str = "handles", fault: str = "") -> None:
        self.weight_route = WeightRoute(way)
        self.fault = fault
        self.reader = BucketReader(CPU)
        self.held: dict[str, torch.Tensor] = {}
        self.buckets: list[tuple[str, ...]] = []

    def init_weight_transfer(self, info: dict) -> None:
        self.info = info
        rank, size = info["rank_offset"], info["world_size"]
        group = BroadcastGroup(CPU, info["host"], info["port"], rank=rank, world_size=size)
        self.reader.join(group)

    def begin_weight_update(self, *, keep_running: bool = False) -> None:
        self.keeps_running = keep_running
        self.held.clear()

    def receive_bucket(self, bucket: WeightBucket) -> None:
        if self.fault == "broken":
            raise WeightSyncError(f"no room for {bucket.names[0]}")
        self.buckets.append(bucket.names)
        for name, tensor in self.reader.read(fetched(bucket)):
            if not (self.fault == "drop" and name == "b"):
                self.held[name] = tensor + 1 if self.fault == "corrupt" else tensor.clone()

    def finish_weight_update(self, weight_version: int) -> dict[str, int]:
        self.reader.close()
        return {name: fingerprint(tensor) for name, tensor in self.held.items()}


def connected(engines: list[FakeEngine]) -> WeightTransport:
    transport = make_transport(engines, workers_per_engine=1, device=CPU, endpoint=endpoint)
    transport.buffers.bucket_bytes = 128
    return transport


@pytest.mark.parametrize("way", ["handles", "broadcast", "objects"])
def test_every_bucket_arrives_as_it_was_sent_update_after_update(way, request):
    if way == "objects":
        request.getfixturevalue("ray_cluster")
    engines = [FakeEngine(way), FakeEngine(way)]
    transport = connected(engines)
    for version in (1, 2, 3):
        tensors = [(name, tensor + version) for name, tensor in WEIGHTS]
        send_weights(tensors, engines, version, transport=transport)
        for engine in engines:
            assert all(torch.equal(engine.held[name], tensor) for name, tensor in tensors)
    assert engines[0].buckets == BUCKETS * 3


@pytest.mark.parametrize("way", ["handles", "broadcast"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("drop", "vllm-1 on node n: 1 tensors differ .* or did not come, e.g. b"),
        ("corrupt", "vllm-1 on node n: 6 tensors differ from the trainer's .* e.g. a"),
        ("broken", "no room for a"),
    ],
)
def test_an_engine_without_proof_is_refused_by_name(way, fault, message):
    engine = FakeEngine(way, fault)
    engine.who = "vllm-1 on node n"
    engines = [FakeEngine(way), engine]
    with pytest.raises(WeightSyncError, match=message):
        send_weights(WEIGHTS, engines, 3, transport=connected(engines))


class Place(HostMemory):
    """Shared memory that is said to be that of a node or GPU of its own."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.name = place

    @property
    def place(self) -> str:
        return self.name


class Ranks:
    """Collectives among threads; one that does not come fails the others."""

    def __init__(self, size: int) -> None:
        self.meeting = threading.Barrier(size, timeout=20)
        self.things: dict[int, object] = {}
        self.local = threading.local()
        self.places: list[str] = []

    def rank(self) -> int:
        return self.local.rank

    def memory_of(self, device: torch.device) -> Place:
        return Place(self.places[self.local.rank])

    def barrier(self) -> None:
        self.meeting.wait()

    def all_gather_object(self, thing: object) -> list[object]:
        self.things[self.local.rank] = thing
        self.meeting.wait()
        everything = [self.things[rank] for rank in sorted(self.things)]
        self.meeting.wait()
        return everything


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Three ranks of a trainer."""
    three = Ranks(3)
    for name in ("rank", "barrier", "all_gather_object", "memory_of"):
        monkeypatch.setattr(weight_sync, name, getattr(three, name))
    yield three


def engine_at(place: str) -> FakeEngine:
    engine = FakeEngine()
    engine.who = f"the engine on {place}"
    engine.reader.memories = {"cpu": Place(place)}
    return engine


def sync_from(ranks: Ranks, engines: list[FakeEngine], places: list[str], of_rank: dict) -> list:
    """Two updates from ranks at these places; return which of them packed anything."""

    ranks.places = places

    def run(rank: int) -> bool:
        ranks.local.rank = rank
        transport = HandleTransport(CPU, num_readers=len(engines))
        transport.buffers.bucket_bytes = 128
        tensors = of_rank.get(rank, WEIGHTS)
        for version in (1, 2):
            send_weights(tensors, engines, version, transport=transport)
        return transport.buffers.is_used

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(run, range(3)))


@pytest.mark.parametrize(
    ("places", "used"),
    [
        (["GPU-0", "GPU-1", "GPU-2"], [True, True, False]),  # no engine reads the third rank
        (["GPU-0", "GPU-1", "GPU-0"], [True, True, False]),  # nodes: the first rank of each packs
    ],
)
def test_every_engine_reads_the_rank_beside_it(ranks, places, used):
    engines = [engine_at("GPU-0"), engine_at("GPU-1")]
    assert sync_from(ranks, engines, places, {}) == used
    for engine in engines:
        assert engine.buckets == BUCKETS * 2
        assert all(torch.equal(engine.held[name], tensor) for name, tensor in WEIGHTS)


def differing() -> NamedTensors:
    return [(name, tensor + 1 if name == "a" else tensor) for name, tensor in WEIGHTS]


def test_a_rank_whose_copy_differs_is_found(ranks, monkeypatch):
    engines = [engine_at("GPU-0"), engine_at("GPU-1")]
    monkeypatch.setattr(ranks.meeting, "_timeout", 3)
    with pytest.raises(WeightSyncError, match=r"^the engine on GPU-1: 1 tensors differ .* a$"):
        sync_from(ranks, engines, ["GPU-0", "GPU-1", "GPU-2"], {1: differing()})


def test_an_engine_without_a_rank_beside_it_says_what_to_type():
    engine = engine_at("another node")
    with pytest.raises(WeightSyncError, match="type --vllm_sync_with_ray"):
        send_weights(WEIGHTS, [engine], 1, transport=connected([engine]))


def test_a_failed_engine_is_named_while_its_peers_still_wait():
    never = threading.Event()

    class Stuck(FakeEngine):
        def receive_bucket(self, bucket: WeightBucket) -> None:
            never.wait(20)

    engines = [Stuck(), FakeEngine(fault="broken")]
    try:
        with pytest.raises(WeightSyncError, match="no room"):
            send_weights(WEIGHTS, engines, 1, transport=connected(engines))
        assert not never.is_set()
    finally:
        never.set()
