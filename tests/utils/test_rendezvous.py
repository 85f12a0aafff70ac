"""The store of ranks on one machine is not reached from another."""

from datetime import timedelta

import psutil
import pytest

from openrlhf.utils.rendezvous import open_store
from tests.integration.heads import free_ports


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_on_loopback_listens_there_alone(host: str) -> None:
    [port], timeout = free_ports(1), timedelta(seconds=10)
    own = open_store(host, port, rank=0, world_size=1, timeout=timeout)
    own.set("key", "value")
    other = open_store(host, port, rank=1, world_size=1, timeout=timeout)
    assert other.get("key") == b"value"
    sockets = [c for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    assert [c.laddr.ip for c in sockets if c.laddr.port == port] == ["127.0.0.1"]
