"""A watch over the ranks that a launcher started: each hears from the next one now and then.

One that was stopped (SIGSTOP, a paused container) says nothing. It is warned of after a while. At
the deadline the rank that hears nothing leaves, for no signal gets it out of a collective, and the
launcher ends the others. On Ray the controller asks instead: `openrlhf/trainer/ray/watch.py`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from openrlhf.distributed.collectives import all_gather_object, world_size
from openrlhf.errors import EngineError
from openrlhf.utils.logging import warn

BEAT, GOODBYE = b"beat", b"goodbye"
BEAT_EVERY_S = 2.0
SAY_AFTER_S = 20.0  # then after twice as long, and so on


@contextmanager
def watching_ranks(deadline_s: float) -> Iterator[None]:
    """Have the ranks hear from one another during the block; all of them enter it."""
    if world_size() == 1:
        yield
        return
    rank, size = dist.get_rank(), world_size()
    with _own_socket() as own:
        who = f"rank {rank} of {size} on node {socket.gethostname()} (pid {os.getpid()})"
        ranks = all_gather_object((who, own.getsockname()))
        watched, listener = ranks[(rank + 1) % size][0], ranks[rank - 1][1]
        is_over = threading.Event()
        thread = threading.Thread(
            target=_watch, args=(own, listener, watched, deadline_s, is_over), daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            with suppress(OSError):
                own.sendto(GOODBYE, listener)


def _own_socket() -> socket.socket:
    """A socket for datagrams at this node's address, as the first rank reaches it."""
    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    family, *_, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        host = probe.getsockname()[0]
    own = socket.socket(family, socket.SOCK_DGRAM)
    own.settimeout(0)
    own.bind((host, 0))
    return own


def _watch(
    own: socket.socket, listener: Any, who: str, deadline_s: float, is_over: threading.Event
) -> None:
    """Tell one rank that this one is alive, and hear it of another, until the block is over."""
    quiet_s, say_after_s, before = 0.0, SAY_AFTER_S, time.monotonic()
    is_heard = False  # until its first beat: networks may keep datagrams back
    while True:
        with suppress(OSError):
            own.sendto(BEAT, listener)
        if is_over.wait(BEAT_EVERY_S):
            return
        beats, now = _received(own), time.monotonic()
        # A rank that was itself stopped for an hour has not seen the other one rest.
        quiet_s, before = quiet_s + min(now - before, 2 * BEAT_EVERY_S), now
        if beats:
            quiet_s, say_after_s, is_heard = 0.0, SAY_AFTER_S, GOODBYE not in beats
        if not is_heard:
            continue
        said = f"{who} has not answered for {quiet_s:.0f} s while the other ranks wait for it"
        if quiet_s >= deadline_s:
            message = f"{said} (--rank_timeout_s {deadline_s:g})"
            sys.stderr.write(f"error: {message}\n")
            sys.stderr.flush()
            os._exit(EngineError.exit_code)
        if quiet_s >= say_after_s:
            say_after_s *= 2
            warn(f"{said}; the run ends after {deadline_s:g} s (--rank_timeout_s).")


def _received(own: socket.socket) -> list[bytes]:
    beats = []
    with suppress(OSError):  # there is nothing more
        while True:
            beats.append(own.recv(len(GOODBYE)))
    return beats
