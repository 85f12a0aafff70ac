"""Real gloo ranks for tests: one start-up serves many checks, results come back by name.

Ranks are forked from a server that has imported the heavy libraries and computed nothing. Where
there is a GPU they are spawned: DeepSpeed asks for devices when it is imported, and CUDA refuses to
start in a fork of a process that has.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import SystemRandom

import torch

PRELOADED = ("deepspeed", "peft", "transformers", "openrlhf.trainer.sft_trainer")
Worker = Callable[[Path], object]
NUM_MEETINGS = 160  # of one world, at most


def run_ranks(worker: Worker, world_size: int, folder: Path) -> list[object]:
    """Run `worker(folder)` as every rank of a new world; return what each rank returned."""
    port = _free_port()
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    torch.multiprocessing.start_processes(
        _rank_main,
        args=(worker, world_size, port, str(folder)),
        nprocs=world_size,
        start_method="spawn" if torch.cuda.is_available() else "forkserver",
    )
    return [
        torch.load(folder / f"world{world_size}-rank{rank}.pt", weights_only=False)
        for rank in range(world_size)
    ]


def _rank_main(rank: int, worker: Worker, world_size: int, port: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    result = worker(Path(folder))
    torch.save(result, Path(folder) / f"world{world_size}-rank{rank}.pt")


def meet_elsewhere() -> None:
    """A world that meets anew needs another port: one rank may still know the last one's. All
    ranks call this alike.
    """
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def _free_port() -> int:
    """A port with free ones behind it, below those that the system hands out by itself."""
    for _ in range(100):
        first = SystemRandom().randrange(22_000, 32_000)
        with ExitStack() as probes, suppress(OSError):
            for port in range(first, first + NUM_MEETINGS):
                probe = probes.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")
