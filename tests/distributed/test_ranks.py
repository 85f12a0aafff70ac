"""The place of a rank in the world, and what ranks hear of one another while they wait."""

import os
import socket
import threading
import time
from datetime import timedelta

import psutil
import pytest

from openrlhf.distributed import collectives
from openrlhf.distributed.collectives import BEAT
from openrlhf.distributed.topology import Topology
from openrlhf.errors import ConfigError
from openrlhf.utils.rendezvous import open_store
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
