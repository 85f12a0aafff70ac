"""The place of a rank in the world: the one module that reads RANK, WORLD_SIZE and LOCAL_RANK.

A rank has a place on three axes: dp (which data), cp (which slice of a sequence), tp (which slice
of a weight). Neighbours share a weight first, then a sequence: rank = (dp_rank * cp_size + cp_rank)
* tp_size + tp_rank.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from openrlhf.errors import ConfigError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Topology:
    """The place of one rank: of 8 = 2 dp x 2 cp x 2 tp, rank 5 is dp 1 (cp 0, tp 1).

    Example: `Topology(world_size=8, rank=5, local_rank=5, cp_size=2, tp_size=2)`
    """

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    cp_size: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size % (self.cp_size * self.tp_size):
            raise ConfigError(
                f"{self.world_size} ranks cannot be divided by --ring_attn_size {self.cp_size} x "
                f"--ds_tensor_parallel_size {self.tp_size}: start a multiple of "
                f"{self.cp_size * self.tp_size} ranks."
            )

    @classmethod
    def from_env(cls, *, cp_size: int = 1, tp_size: int = 1, local_rank: int = -1) -> "Topology":
        """Read what torchrun, deepspeed or Ray set; a process without a launcher is a world of one.

        `local_rank` is the launcher's argument and wins over the environment unless it is -1.
        """
        env = os.environ
        return cls(
            world_size=int(env.get("WORLD_SIZE", "1")),
            rank=int(env.get("RANK", "0")),
            local_rank=local_rank if local_rank != -1 else int(env.get("LOCAL_RANK", "0")),
            cp_size=cp_size,
            tp_size=tp_size,
        )

    @property
    def dp_size(self) -> int:
        """Return the number of ranks that hold different data."""
        return self.world_size // (self.cp_size * self.tp_size)

    @property
    def dp_rank(self) -> int:
        """Return the share of the data that this rank holds."""
        return self.rank // (self.cp_size * self.tp_size)

    @property
    def is_main(self) -> bool:
        """Return True on the rank that prints and writes."""
        return self.rank == 0

    def shard(self, items: Sequence[Item]) -> list[Item]:
        """Return this rank's share of the items, dealt like cards; shares differ by at most one."""
        return list(items[self.dp_rank :: self.dp_size])
