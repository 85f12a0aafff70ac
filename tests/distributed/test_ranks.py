"""The place of a rank in the world, and what ranks hear of one another while they wait."""

import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from openrlhf.distributed import collectives
from openrlhf.distributed.collectives import BEAT, all_or_none, gather_by_store
from openrlhf.distributed.topology import Topology
from openrlhf.errors import CheckpointError, ConfigError, MachineError
from openrlhf.utils.rendezvous import open_store
from tests.distributed.spawn import run_ranks
from tests.integration.heads import free_ports


def test_a_process_without_a_launcher_is_a_world_of_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    topology = Topology.from_env()
    assert (topology.world_size, topology.rank, topology.dp_size, topology.dp_rank) == (1, 0, 1, 0)
    assert topology.is_main


def test_ranks_that_share_weights_or_rows_read_the_same_data():
    places = [Topology(world_size=8, rank=rank, cp_size=2, tp_size=2) for rank in range(8)]
    assert [place.dp_rank for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert places[5].shard("abcde") == ["b", "d"]


def test_a_world_that_cannot_be_divided_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"6 ranks .*multiple of 4"):
        Topology(world_size=6, cp_size=2, tp_size=2)


def test_ranks_that_do_not_come_are_awaited_aloud_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("openrlhf.utils.progress.SAY_AFTER_S", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_ports(1)[0]))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # it sets them for good
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    with pytest.raises(MachineError, match=r"WORLD_SIZE 2 ranks joined \(this is RANK 0\): Timed"):
        collectives.init_process_group(Topology(world_size=2), rank_timeout_s=0.5)
    assert "s for WORLD_SIZE 2 ranks to join (this is RANK 0)" in capfd.readouterr().out


def hearing(monkeypatch: pytest.MonkeyPatch, *said: bytes, deadline_s: float) -> list[int]:
    """Watch a rank that says so much and then nothing; the exit codes of half a second."""
    monkeypatch.setattr(collectives, "BEAT_EVERY_S", 0.02)
    monkeypatch.setattr("openrlhf.utils.progress.SAY_AFTER_S", 0.1)
    codes, is_over = list[int](), threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), is_over.set()))
    with (
        socket.socket(type=socket.SOCK_DGRAM) as own,
        socket.socket(type=socket.SOCK_DGRAM) as peer,
    ):
        for end in (own, peer):
            end.settimeout(0)
            end.bind(("127.0.0.1", 0))
        for word in said:
            peer.sendto(word, own.getsockname())
        arguments = (own, peer.getsockname(), "rank 1 of 2", deadline_s, is_over)
        thread = threading.Thread(target=collectives._watch, args=arguments)
        thread.start()
        time.sleep(0.5)
        is_over.set()
        thread.join()
        assert peer.recv(10) == BEAT
    return codes


def test_a_rank_that_falls_silent_is_named_and_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert hearing(monkeypatch, BEAT, deadline_s=0.2) == [3]
    said = capfd.readouterr().err
    assert "warning: rank 1 of 2 has not responded for 0 s" in said
    waits = "while the other ranks wait for it"
    assert f"error: rank 1 of 2 has not responded for 0 s {waits} (--rank_timeout_s 0.2)" in said


def test_a_rank_that_cannot_be_heard_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert hearing(monkeypatch, deadline_s=0.2) == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_on_loopback_listens_there_alone(host: str) -> None:
    [port], timeout = free_ports(1), timedelta(seconds=10)
    own = open_store(host, port, rank=0, world_size=1, timeout=timeout)
    own.set("key", "value")
    other = open_store(host, port, rank=1, world_size=1, timeout=timeout)
    assert other.get("key") == b"value"
    sockets = [c for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    assert [c.laddr.ip for c in sockets if c.laddr.port == port] == ["127.0.0.1"]


class CountingStore:
    """The store of the world, and how many keys were looked for."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.num_looked_for = store, 0

    def check(self, keys: list[str]) -> bool:
        self.num_looked_for += len(keys)
        return self.store.check(keys)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


def tell_by_store(folder: Path) -> dict[str, object]:
    """Say something three times, once of them late; fail on one rank."""
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), CountingStore(distributed_c10d._get_default_store())
    distributed_c10d._get_default_store = lambda: store
    dist.barrier()
    num_before = store.num_keys()
    dist.barrier()
    told = [gather_by_store([f"{word} of {rank}"]) for word in ("one", "two")]
    if rank == 2:
        time.sleep(2)
    store.num_looked_for = 0
    gather_by_store(rank)
    num_looked_for = store.num_looked_for
    try:
        all_or_none(lambda: {0: 0, 2: 2}[rank], gather_by_store)
        error = ""
    except CheckpointError as problem:
        error = str(problem)
    dist.barrier()
    num_left = store.num_keys() - num_before
    dist.barrier()
    return {"told": told, "looked for": num_looked_for, "error": error, "left": num_left}


def test_threads_of_ranks_tell_one_another_with_few_looks_and_leave_nothing(
    tmp_path: Path,
) -> None:
    found = run_ranks(tell_by_store, 3, tmp_path)
    for rank in found:
        assert rank["told"] == [
            [[f"{word} of {rank}"] for rank in range(3)] for word in ("one", "two")
        ]
        assert rank["error"] == "KeyError(1)"
        assert rank["left"] == 1  # the last result, which nobody knows to be read
    # Ranks that look every 0.2 s for three keys each look for 30 in two seconds.
    assert [rank["looked for"] < 15 for rank in found] == [True] * 3
