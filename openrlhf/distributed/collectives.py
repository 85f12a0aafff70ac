"""Small collectives over named numbers, picklable objects and work on files; in a world of one each
is the identity.

Numbers travel as float64, in the order of their sorted names: every rank must bring the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from openrlhf.errors import CheckpointError

Thing = TypeVar("Thing")


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks in the group; 1 when no group was started."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank in the world."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Return True on the first rank, the one that writes what is written once."""
    return not dist.is_initialized() or dist.get_rank() == 0


def all_reduce_sum(
    values: Mapping[str, float], *, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Return the sum of every number over the ranks."""
    return _all_reduce(values, dist.ReduceOp.SUM, group)


def all_reduce_max(
    values: Mapping[str, float], *, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Return the largest of every number over the ranks."""
    return _all_reduce(values, dist.ReduceOp.MAX, group)


def all_gather_object(thing: Thing, *, group: dist.ProcessGroup | None = None) -> list[Thing]:
    """Return every rank's object, in the order of the ranks."""
    size = world_size(group)
    if size == 1:
        return [thing]
    gathered: list[Thing] = [thing] * size
    dist.all_gather_object(gathered, thing, group=group)
    return gathered


def broadcast_object(thing: Thing, *, source: int = 0) -> Thing:
    """Return the object of the source rank; what other ranks pass is ignored."""
    if world_size() == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def together(work: Callable[[], Thing]) -> Thing:
    """Return what this rank's work on files returns; raise CheckpointError on every rank if it
    failed on any, so that all go on or none.

    torch reports a full disk as RuntimeError.
    """
    problems, result = [], None
    try:
        result = work()
    except (OSError, RuntimeError, CheckpointError) as error:
        problems.append(str(error) or type(error).__name__)
    everyones = [problem for part in all_gather_object(problems) for problem in part]
    if everyones:
        raise CheckpointError(" ".join(dict.fromkeys(everyones)))
    return result  # type: ignore[return-value] - without a problem there is a result


def on_main(work: Callable[[], Thing]) -> Thing:
    """Return, on every rank, what the main rank's work on files returns; as `together`."""
    return broadcast_object(together(lambda: work() if is_main() else None))  # type: ignore[return-value]


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
