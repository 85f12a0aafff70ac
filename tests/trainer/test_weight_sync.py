"""How weights travel, and that a sync is only over when every engine has shown what it holds."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
import torch

from openrlhf.config.ppo import PPOConfig
from openrlhf.engines.base import WeightBucket
from openrlhf.engines.weight_transfer import Broadcasts, BucketReader, HostMemory, fetched
from openrlhf.errors import EngineError, LostEngineError, NoRestartError, WeightSyncError
from openrlhf.trainer.workers import policy, weight_sync
from openrlhf.trainer.workers.weight_sync import (
    BroadcastTransport,
    HandleTransport,
    ObjectTransport,
    WeightTransport,
    weight_route,
)
from openrlhf.utils.tensors import NamedTensors, fingerprint
from tests.gpu.engines import endpoint

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


def route(device: str, *, num_engines: int = 2, colocate_all: bool = False, **vllm) -> tuple:
    config = PPOConfig.model_validate(
        {
            "actor": {"model_name_or_path": "m", "num_gpus_per_node": 2},
            "vllm": {"num_engines": num_engines, **vllm},
            "train": {"colocate_all": colocate_all},
        }
    )
    way, device_of = weight_route(
        config, torch.device(device), num_engines=num_engines, num_ranks=2
    )
    return way, device_of.type


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_colocated_engines_open_handles_and_separate_ones_receive_broadcasts(device):
    assert route(device, colocate_all=True) == (HandleTransport, device)
    assert route(device) == (BroadcastTransport, device)
    assert route(device, sync_backend="gloo", colocate_all=True) == (HandleTransport, "cpu")
    assert route(device, sync_backend="gloo") == (BroadcastTransport, "cpu")
    assert route(device, sync_with_ray=True) == (ObjectTransport, "cpu")
    assert route(device, sync_with_ray=True, colocate_all=True) == (ObjectTransport, "cpu")
    # Two ranks of NCCL cannot share a GPU.
    assert route(device, num_engines=4, colocate_all=True) == (BroadcastTransport, "cpu")


class FakeEngine:
    """Reads buckets as a worker of vLLM does and keeps copies; can be told to misbehave."""

    who = "vllm-0"
    hangs_s = 3.0

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.reader = BucketReader(CPU)
        self.held: dict[str, torch.Tensor] = {}
        self.buckets: list[tuple[str, ...]] = []

    def call(self, method, *args):
        return getattr(self, method.__name__)(*args)

    def memory_locations(self) -> list[str]:
        if self.fault == "absent":
            raise LostEngineError(f"{self.who} died: pid 7 was killed by SIGKILL")
        return [memory.location for memory in self.reader.memories]

    def init_weight_transfer(self, info: dict) -> None:
        self.info = info
        rank, size = info["rank_offset"], info["world_size"]
        if self.fault == "absent":
            raise LostEngineError(f"{self.who} died: pid 7 was killed by SIGKILL")
        group = Broadcasts(info["host"], info["port"], rank=rank, world_size=size)
        self.reader.join(group.join(CPU), CPU)

    def begin_weight_update(self, keep_running: bool) -> None:
        self.keeps_running = keep_running
        self.held.clear()

    def receive_bucket(self, bucket: WeightBucket) -> None:
        if self.fault == "broken":
            raise WeightSyncError(f"no room for {bucket.names[0]}")
        if self.fault == "dies" and len(self.buckets) == 1:
            raise LostEngineError(f"{self.who} died: pid 7 was killed by SIGKILL")
        if self.fault == "hangs" and len(self.buckets) == 1:
            time.sleep(self.hangs_s)
            return
        self.buckets.append(bucket.names)
        for name, tensor in self.reader.read(fetched(bucket, ray.get)):
            if not (self.fault == "drop" and name == "b"):
                self.held[name] = tensor + 1 if self.fault == "corrupt" else tensor.clone()

    def finish_weight_update(self, weight_version: int) -> dict[str, int]:
        self.reader.close()
        return {name: fingerprint(tensor) for name, tensor in self.held.items()}


def connected(
    engines: list[FakeEngine], way: type[WeightTransport] = HandleTransport
) -> WeightTransport:
    transport = way(CPU, engines, endpoint=endpoint)
    transport.bucket_bytes = 128
    return transport


@pytest.mark.parametrize("way", [HandleTransport, BroadcastTransport, ObjectTransport])
def test_every_bucket_arrives_as_it_was_sent_update_after_update(way, request, monkeypatch):
    if way is ObjectTransport:
        request.getfixturevalue("ray_cluster")
        monkeypatch.setattr(ObjectTransport, "put", ray.put, raising=False)
    engines = [FakeEngine(), FakeEngine()]
    transport = connected(engines, way)
    for version in (1, 2, 3):
        tensors = [(name, tensor + version) for name, tensor in WEIGHTS]
        transport.send(tensors, version)
        for engine in engines:
            assert all(torch.equal(engine.held[name], tensor) for name, tensor in tensors)
    assert engines[0].buckets == BUCKETS * 3


class FreedMemory(HostMemory):
    """Memory of a node that is given back after each update."""

    is_kept = False

    def __init__(self) -> None:
        self.num_collected = 0

    def collect(self) -> None:
        self.num_collected += 1


class FreeingTransport(HandleTransport):
    """A transport with memory of its own."""

    def own_memory(self, device: torch.device) -> HostMemory:
        return FreedMemory()


def test_a_transport_with_memory_of_its_own_gives_it_back_after_each_update():
    engine = FakeEngine()
    transport = connected([engine], FreeingTransport)
    for version in (1, 2):
        transport.send(WEIGHTS, version)
        assert all(torch.equal(engine.held[name], tensor) for name, tensor in WEIGHTS)
        assert transport.memory.num_collected == version and transport._buffers == []


@pytest.mark.parametrize("way", [HandleTransport, BroadcastTransport])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("drop", "vllm-1 on node n: 1 tensors differ .* or did not come, e.g. b"),
        ("corrupt", "vllm-1 on node n: 6 tensors differ from the trainer's .* e.g. a"),
        ("broken", "no room for a"),
    ],
)
def test_an_engine_without_proof_is_refused_by_name(way, fault, message):
    engine = FakeEngine(fault)
    engine.who = "vllm-1 on node n"
    engines = [FakeEngine(), engine]
    with pytest.raises(WeightSyncError, match=message):
        connected(engines, way).send(WEIGHTS, 3)


@pytest.mark.parametrize("way", [HandleTransport, BroadcastTransport])
@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_engines_hold_the_weights_though_a_peer_is_lost_on_the_way(way, fault):
    lost, other = FakeEngine(fault), FakeEngine()
    lost.who, other.who = "vllm-0", "vllm-1"
    transport = connected([lost, other], way)
    transport.wait_s = 1.0
    started = time.monotonic()
    transport.send(WEIGHTS, 3)
    assert time.monotonic() - started < 8
    why = {"dies": "vllm-0 died: pid 7 was killed by SIGKILL", "hangs": "vllm-0 took no weights"}
    reason, is_lost = transport.failed.pop(0)
    assert reason.startswith(why[fault]) and is_lost
    if way is BroadcastTransport:  # its group is broken: it takes them by another one
        assert [failure.is_lost for failure in transport.failed.values()] == [False]
        connected([other], way).send(WEIGHTS, 3)
    else:
        assert not transport.failed
    assert all(torch.equal(other.held[name], tensor) for name, tensor in WEIGHTS)


def test_an_engine_that_hangs_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(weight_sync, "LEAVE_S", 0.5)
    lost, other = FakeEngine("hangs"), FakeEngine()
    lost.hangs_s = 12.0
    transport = connected([lost, other])
    transport.wait_s = 4.0
    started = time.monotonic()
    transport.send(WEIGHTS, 3)
    assert 4 <= time.monotonic() - started < 7 and transport.failed[0].is_lost


def test_an_engine_that_never_comes_to_the_group_does_not_hold_the_others():
    lost, other = FakeEngine("absent"), FakeEngine()
    lost.who, other.who = "vllm-0", "vllm-1"
    started = time.monotonic()
    transport = connected([lost, other], BroadcastTransport)
    transport.send(WEIGHTS, 3)
    assert time.monotonic() - started < 8
    assert {k: failure.is_lost for k, failure in transport.failed.items()} == {0: True, 1: False}
    assert not other.buckets


class Unplugged(BroadcastTransport):
    """The trainer cannot send."""

    def start_sending(self, data: torch.Tensor) -> dict:
        def fail() -> None:
            raise EngineError("the broadcast of weights failed: NCCL error")

        return {weight_sync.TRAINER: self._pool.submit(fail)}


def test_engines_are_not_blamed_for_a_failure_of_the_trainer():
    transport = connected([FakeEngine(), FakeEngine()], Unplugged)
    transport.send(WEIGHTS, 3)
    why = weight_sync.SyncFailure("the broadcast of weights failed: NCCL error", is_lost=False)
    assert transport.failed == {0: why, 1: why}
    # An engine that dies is behind what the trainer feels of it.
    transport = connected([FakeEngine("dies"), FakeEngine()], Unplugged)
    transport.engines[0].buckets.append(("a",))
    transport.send(WEIGHTS, 3)
    assert transport.failed[0].is_lost and transport.own_error is None


def test_a_trainer_that_fails_twice_ends_the_run_instead_of_engines(monkeypatch):
    monkeypatch.setattr(policy, "weight_route", lambda *_, **__: (Unplugged, CPU))
    monkeypatch.setattr(policy, "stored_parameters", lambda _: WEIGHTS)
    trainer = SimpleNamespace(
        transport=None,
        has_own_process=True,
        config=PPOConfig(),
        engine=SimpleNamespace(module=torch.nn.Linear(2, 2), device=CPU),
        endpoint=endpoint,
        weight_version=3,
    )
    engines, send = [FakeEngine()], policy.PolicyModelActor.broadcast_to_vllm
    assert not send(trainer, engines)[0].is_lost
    with pytest.raises(NoRestartError, match="NCCL error"):
        send(trainer, engines, is_again=True)


class NodeMemory(HostMemory):
    """Shared memory that is said to be that of a node or GPU of its own."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self.name = node

    @property
    def location(self) -> str:
        return self.name


class Ranks:
    """Collectives among threads; one that does not come fails the others."""

    def __init__(self, size: int) -> None:
        self.meeting = threading.Barrier(size, timeout=20)
        self.things: dict[int, object] = {}
        self.local = threading.local()
        self.nodes: list[str] = []

    def rank(self) -> int:
        return self.local.rank

    def memory_of(self, device: torch.device) -> HostMemory:
        rank = getattr(self.local, "rank", None)  # None: an engine asks
        return HostMemory() if rank is None else NodeMemory(self.nodes[rank])

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
    for name in ("rank", "barrier", "all_gather_object"):
        monkeypatch.setattr(weight_sync, name, getattr(three, name))
    monkeypatch.setattr(weight_sync, "memory_of", three.memory_of)
    yield three


def engine_at(node: str) -> FakeEngine:
    engine = FakeEngine()
    engine.who = f"the engine on {node}"
    engine.reader.memories = [NodeMemory(node)]
    return engine


def sync_from(ranks: Ranks, engines: list[FakeEngine], nodes: list[str], of_rank: dict) -> list:
    """Two updates from ranks at these nodes; return which of them packed anything."""

    ranks.nodes = nodes

    def run(rank: int) -> bool:
        ranks.local.rank = rank
        transport = HandleTransport(CPU, engines)
        transport.bucket_bytes = 128
        tensors = of_rank.get(rank, WEIGHTS)
        for version in (1, 2):
            transport.send(tensors, version)
        return transport.is_used

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(run, range(3)))


@pytest.mark.parametrize(
    ("nodes", "used"),
    [
        (["GPU-0", "GPU-1", "GPU-2"], [True, True, False]),  # no engine reads the third rank
        (["GPU-0", "GPU-1", "GPU-0"], [True, True, False]),  # nodes: the first rank of each packs
        (["GPU-2", "GPU-1", "GPU-0"], [False, True, True]),  # whatever the ranks on them
    ],
)
def test_every_engine_reads_the_rank_beside_it(ranks, nodes, used):
    engines = [engine_at("GPU-0"), engine_at("GPU-1")]
    assert sync_from(ranks, engines, nodes, {}) == used
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
    with pytest.raises(WeightSyncError, match="Type --vllm_sync_with_ray, or give"):
        connected([engine]).send(WEIGHTS, 1)


def test_a_failed_engine_is_named_while_its_peers_still_wait():
    never = threading.Event()

    class Stuck(FakeEngine):
        def receive_bucket(self, bucket: WeightBucket) -> None:
            never.wait(20)

    engines = [Stuck(), FakeEngine(fault="broken")]
    try:
        with pytest.raises(WeightSyncError, match="no room"):
            connected(engines).send(WEIGHTS, 1)
        assert not never.is_set()
    finally:
        never.set()
