"""The ranks of a run: how they meet, what they tell one another, and who notices that one is gone.

Everything here works without a launcher (a world of one needs no port, and each collective is the
identity there) and without CUDA (gloo, DeepSpeed on CPU). Every rank must bring the same names of
numbers.
"""

import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from openrlhf.distributed.topology import Topology
from openrlhf.errors import (
    CheckpointError,
    EngineError,
    LostRankError,
    MachineError,
    first_line,
)
from openrlhf.utils.console import warn
from openrlhf.utils.progress import Quiet, saying_what_is_awaited
from openrlhf.utils.rendezvous import open_store

Thing = TypeVar("Thing")
Gather = Callable[[list[str]], list[list[str]]]

RANK_TIMEOUT_S = 600.0
PATIENCE = 3.0  # of ranks with one another: while one of them writes a model the others wait
BEAT = b"beat"
BEAT_EVERY_S = 2.0
LOOK_S, MAX_LOOK_S = 0.05, 1.0  # between looks into the store: each time twice as long

# DeepSpeed looks for an accelerator when it is first imported, be it by transformers.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed, told which accelerator to use: it decides while it is imported."""
    import deepspeed  # noqa: PLC0415 - DS_ACCELERATOR must be set before this import
    from deepspeed.utils import logger as deepspeed_logger  # noqa: PLC0415 - as above

    deepspeed_logger.setLevel(logging.WARNING)
    # A shared-memory all-reduce for CPU inference, which nothing here calls: it would be compiled
    # at start-up.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def init_process_group(topology: Topology, *, rank_timeout_s: float) -> torch.device:
    """Join the world (NCCL on CUDA, gloo on CPU) and return this rank's device; a second call only
    returns it. A collective fails after three times `rank_timeout_s`.
    """
    timeout = timedelta(seconds=PATIENCE * rank_timeout_s)
    device = torch.device("cpu")
    if torch.cuda.is_available():  # Ray may show a process one GPU, whatever its local rank
        device = torch.device("cuda", topology.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    deepspeed = import_deepspeed()
    backend = "nccl" if device.type == "cuda" else "gloo"
    # DeepSpeed makes groups of its own without a word about time: they get what torch gives then.
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout
    # DeepSpeed insists on it, and takes this device.
    os.environ["LOCAL_RANK"] = str(topology.local_rank if device.index is None else device.index)
    if not dist.is_initialized():
        with _joining(topology):
            dist.init_process_group(
                backend,
                store=_world_store(topology, timeout),
                rank=topology.rank,
                world_size=topology.world_size,
                timeout=timeout,
            )
    # vLLM, in an engine of this process, closes and opens worlds without DeepSpeed's knowing of it.
    groups = deepspeed.utils.groups
    if (
        groups._WORLD_GROUP is not None
        and groups._WORLD_GROUP not in distributed_c10d._world.pg_map
    ):
        groups._release_process_group_references()
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(
            dist_backend=backend,
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timeout,
            rank=topology.rank,
            world_size=topology.world_size,
        )
    return device


@contextmanager
def _joining(topology: Topology) -> Iterator[None]:
    """Say now and then, while ranks join, who is awaited; raise MachineError if not all come."""
    rank, size = topology.rank, topology.world_size
    # Rank 1 says it too, for rank 0 may be the one that is missing.
    awaited = saying_what_is_awaited(f"WORLD_SIZE {size} ranks to join (this is RANK {rank})")
    try:
        with awaited if rank <= 1 else nullcontext():
            yield
    except dist.DistError as error:
        raise MachineError(
            f"not all of WORLD_SIZE {size} ranks joined (this is RANK {rank}): "
            f"{first_line(error).removesuffix('.')}. Start all of them, or unset WORLD_SIZE and "
            "RANK where this process is to run alone."
        ) from error


def _world_store(topology: Topology, timeout: timedelta) -> dist.Store:
    """Return the store of the ranks, torchrun's own where it has one."""
    if topology.world_size == 1:  # in its own memory: no port to race for
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    size = topology.world_size
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
        # It knows the addresses of ranks before a restart (--max_restarts), too.
        return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    return open_store(host, port, rank=topology.rank, world_size=size, timeout=timeout)


def is_broken_collective(error: BaseException) -> bool:
    """Return True for the error of a collective whose other ranks are gone, or late."""
    return "gloo/transport" in str(error) or isinstance(error, dist.DistError)


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Turn the failure of a collective in the block into an error that names the rank."""
    try:
        yield
    except RuntimeError as error:
        if not is_broken_collective(error) or not dist.is_initialized():
            raise
        own = f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}"
        raise LostRankError(
            f"{own} (pid {os.getpid()}) waited for another rank, which has stopped, ended or taken "
            f"longer than {PATIENCE:g} times --rank_timeout_s: {first_line(error)}"
        ) from error


def shut_down() -> None:
    """Leave the world together: a rank that just exits can tear down the sockets of one still
    working.
    """
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            dist.barrier()
        comm = import_deepspeed().comm
        # A world that vLLM opened, in an engine of this process, is unknown to DeepSpeed.
        (comm if comm.is_initialized() else dist).destroy_process_group()


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks in the group; 1 when no group was started."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank in the world."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Return True on the first rank, the one that writes what is written once."""
    return not dist.is_initialized() or dist.get_rank() == 0


def all_gather_object(thing: Thing, *, group: dist.ProcessGroup | None = None) -> list[Thing]:
    """Return every rank's object, in the order of the ranks."""
    size = world_size(group)
    if size == 1:
        return [thing]
    gathered: list[Thing] = [thing] * size
    dist.all_gather_object(gathered, thing, group=group)
    return gathered


_number = itertools.count()


def gather_by_store(thing: Thing) -> list[Thing]:
    """Return every rank's object, which is JSON, without a collective: for a second thread, whose
    collectives would mix with those of the first. One thread of each rank calls at a time.
    """
    if world_size() == 1:
        return [thing]
    store, number = distributed_c10d._get_default_store(), next(_number)
    name = f"openrlhf/{number}"
    keys = [f"{name}/{rank}" for rank in range(world_size())]
    store.set(keys[rank()], json.dumps(thing))
    if is_main():  # one looks for the others, who would look for one another
        store.set(name, json.dumps([json.loads(_found(store, key)) for key in keys]))
        for key in (*keys, f"openrlhf/{number - 1}"):  # all who are here have read the last one
            store.delete_key(key)
    things: list[Thing] = json.loads(_found(store, name))
    return things


def _found(store: dist.Store, key: str) -> bytes:
    """Return a value once there is one; waiting in the store would hold up other threads."""
    pause_s = LOOK_S
    while not store.check([key]):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_LOOK_S)
    return store.get(key)


def ranks_on_node(*, is_counted: bool) -> list[int]:
    """Return the ranks on the node of this one that are counted; all ranks call."""
    hosts = all_gather_object(socket.gethostname() if is_counted else None)
    return [rank for rank, host in enumerate(hosts) if host == socket.gethostname()]


def broadcast_object(thing: Thing) -> Thing:
    """Return the object of the main rank; what other ranks pass is ignored."""
    if world_size() == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box)
    return box[0]


def problem_of(error: BaseException) -> str:
    """Return the text of an error that every rank raises; with its class unless it is of files."""
    is_of_files = isinstance(error, (OSError, RuntimeError, CheckpointError)) and str(error)
    return str(error) if is_of_files else repr(error)


def all_or_none(work: Callable[[], Thing], gather: Gather = all_gather_object) -> Thing:
    """Return the result of this rank's work on files; raise CheckpointError on every rank if it
    failed on any, so that all go on or none. The ranks exchange their errors by `gather`.

    Errors that count are those of files; torch reports a full disk as RuntimeError. Any other error
    is raised on its rank alone and ends that process, which the others notice. With
    `gather_by_store` the work is in a thread, whose errors end no process: there every error
    counts, except that of a lost rank.
    """
    problems, result = [], None
    try:
        result = work()
    except (OSError, RuntimeError, CheckpointError) as error:
        problems.append(problem_of(error))
    except Exception as error:
        if gather is not gather_by_store or isinstance(error, LostRankError):
            raise
        problems.append(problem_of(error))
    everyones = [problem for part in gather(problems) for problem in part]
    if everyones:
        raise CheckpointError(" ".join(dict.fromkeys(everyones)))
    return result  # type: ignore[return-value] - without a problem there is a result


def on_main(work: Callable[[], Thing]) -> Thing:
    """Return, on every rank, what the main rank's work on files returns; raise as `all_or_none`."""
    return broadcast_object(all_or_none(lambda: work() if is_main() else None))  # type: ignore[return-value]


def barrier() -> None:
    """Wait for every rank."""
    if world_size() > 1:
        dist.barrier()


@contextmanager
def watching_ranks(deadline_s: float) -> Iterator[None]:
    """Have each rank hear from the next one during the block; all of them enter it.

    One that was stopped (SIGSTOP, a paused container) says nothing. It is warned of after a while.
    At the deadline the rank that hears nothing leaves, for no signal gets it out of a collective,
    and the launcher ends the others. On Ray the controller asks instead.
    """
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


def _own_socket() -> socket.socket:
    """Return a socket for datagrams at this node's address, as the first rank reaches it."""
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
    quiet, before = Quiet(), time.monotonic()
    is_heard = False  # until its first beat: networks may keep datagrams back
    while True:
        with suppress(OSError):
            own.sendto(BEAT, listener)
        if is_over.wait(BEAT_EVERY_S):
            return
        is_beating, now = False, time.monotonic()
        with suppress(OSError):  # there is nothing more
            while True:
                is_beating = bool(own.recv(len(BEAT)))
        # A rank that was itself stopped for an hour has not seen the other one rest.
        is_due, before = quiet.add(min(now - before, 2 * BEAT_EVERY_S)), now
        if is_beating:
            quiet.reset()
            is_heard, is_due = True, False
        if not is_heard:
            continue
        waits = "while the other ranks wait for it"
        said = f"{who} has not responded for {quiet.seconds:.0f} s {waits}"
        if quiet.seconds >= deadline_s:
            message = f"{said} (--rank_timeout_s {deadline_s:g})"
            sys.stderr.write(f"error: {message}\n")
            sys.stderr.flush()
            os._exit(EngineError.exit_code)
        if is_due:
            warn(f"{said}; the run ends after {deadline_s:g} s (--rank_timeout_s).")
