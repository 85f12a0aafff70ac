"""Small collectives over named numbers and picklable objects; in a world of one each is the
identity.

Numbers travel as float64, in the order of their sorted names: every rank must bring the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from openrlhf.errors import CheckpointError

Thing = TypeVar("Thing")


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks in the group; 1 when no group was started."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank in the world."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this process is the first rank, the one that writes what is written once."""
    return not dist.is_initialized() or dist.get_rank() == 0


def all_reduce_sum(
    values: Mapping[str, float], *, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """The sum of every number over the ranks."""
    return _all_reduce(values, dist.ReduceOp.SUM, group)


def all_reduce_max(
    values: Mapping[str, float], *, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """The largest of every number over the ranks."""
    return _all_reduce(values, dist.ReduceOp.MAX, group)


def all_gather_object(thing: Thing, *, group: dist.ProcessGroup | None = None) -> list[Thing]:
    """Every rank's object, in the order of the ranks."""
    size = world_size(group)
    if size == 1:
        return [thing]
    gathered: list[Thing] = [thing] * size
    dist.all_gather_object(gathered, thing, group=group)
    return gathered


def broadcast_object(thing: Thing, *, source: int = 0) -> Thing:
    """The object of the source rank; what other ranks pass is ignored."""
    if world_size() == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=source)
    return box[0]


@contextmanager
def noting(problems: list[str]) -> Iterator[None]:
    """A block of work on files whose failure is noted, so that the ranks can agree on what to do.

    torch reports a full disk as RuntimeError.
    """
    try:
        yield
    except (OSError, RuntimeError, CheckpointError) as error:
        problems.append(str(error) or type(error).__name__)


def gather_problems(problems: Sequence[str]) -> list[str]:
    """What went wrong on any rank, each once: every rank answers the same, so all go on or none."""
    gathered = all_gather_object(list(problems))
    return list(dict.fromkeys(problem for part in gathered for problem in part))


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for every rank."""
    if world_size(group) > 1:
        dist.barrier(group)


def _all_reduce(
    values: Mapping[str, float], operation: dist.ReduceOp, group: dist.ProcessGroup | None
) -> dict[str, float]:
    if world_size(group) == 1 or not values:
        return {name: float(value) for name, value in values.items()}
    names = sorted(values)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    packed = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(packed, op=operation, group=group)
    return dict(zip(names, packed.tolist(), strict=True))
