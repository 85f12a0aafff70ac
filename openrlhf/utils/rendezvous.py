"""The store in which ranks of a group meet, which listens no further than they are apart."""

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"


def open_store(
    host: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
    waits: bool = True,
) -> TCPStore:
    """Return the store at an address, which rank 0 serves; `waits` until all have opened it. Ranks
    that meet on loopback are all on this machine: there it listens, where torch would listen on
    every network.
    """
    host = LOOPBACK if host == "localhost" else host
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": waits}
    if rank > 0 or host != LOOPBACK:
        return TCPStore(host, port, world_size, is_master=rank == 0, **options)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((LOOPBACK, port))
    listener.listen()
    return TCPStore(
        host, port, world_size, is_master=True, master_listen_fd=listener.detach(), **options
    )


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
