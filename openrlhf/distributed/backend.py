"""Process start-up: which device and which collective backend, and the import of DeepSpeed in the
right order.

Everything here works without a launcher (a world of one needs no port) and without CUDA (gloo,
DeepSpeed on CPU).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from openrlhf.distributed.topology import Topology
from openrlhf.errors import EngineError, first_line

logger = logging.getLogger(__name__)

RANK_TIMEOUT_S = 600.0
PATIENCE = 3.0  # of ranks with one another: while one of them writes a model the others wait

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


def device_of(topology: Topology) -> torch.device:
    """Return the device of this rank; Ray may show a process one GPU, whatever its local rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", topology.local_rank % torch.cuda.device_count())


def init_process_group(
    topology: Topology, *, rank_timeout_s: float = RANK_TIMEOUT_S
) -> torch.device:
    """Join the world (NCCL on CUDA, gloo on CPU) and return this rank's device; a second call only
    returns it. A collective fails after three times `rank_timeout_s`.
    """
    timeout = timedelta(seconds=PATIENCE * rank_timeout_s)
    device = device_of(topology)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deepspeed = import_deepspeed()
    backend = "nccl" if device.type == "cuda" else "gloo"
    # DeepSpeed makes groups of its own without a word about time: they get what torch gives then.
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout
    os.environ.setdefault("LOCAL_RANK", str(topology.local_rank))  # DeepSpeed insists on it
    if not dist.is_initialized():
        # A world of one meets in its own memory: no port to race for.
        store = dist.HashStore() if topology.world_size == 1 else None
        dist.init_process_group(
            backend,
            store=store,
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timeout,
        )
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
def naming_lost_ranks() -> Iterator[None]:
    """Turn the failure of a collective in the block into an error that names the rank."""
    try:
        yield
    except RuntimeError as error:
        is_lost = "gloo/transport" in str(error) or isinstance(error, dist.DistError)
        if not is_lost or not dist.is_initialized():
            raise
        own = f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}"
        raise EngineError(
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
        import_deepspeed().comm.destroy_process_group()
