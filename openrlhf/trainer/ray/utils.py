"""The machine and the GPU of a process, as Ray knows them."""

from __future__ import annotations

import os
from typing import NamedTuple

import ray

from openrlhf.utils.gpus import VISIBLE, check_torch_uses


class Health(NamedTuple):
    """The progress of a process."""

    work: str | None  # what goes on step by step; None: nothing of that kind
    num_steps: int  # micro-batches of a rank, steps of an engine; since the start
    pid: int
    done_of: tuple[int, int | None] = (0, None)  # micro-batches of this work: done, and in all


def node_address() -> str:
    """Return the address of the machine this process runs on, as Ray knows it."""
    return str(ray.util.get_node_ip_address())


def own_gpu() -> int:
    """Return the index of this actor's GPU among those that it sees, 0 without one.

    Ray shows an actor its own GPUs only, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set,
    as it is in the driver of every submitted job. Raise ConfigError if torch cannot use the GPU.
    """
    own = [str(name) for name in ray.get_gpu_ids()]
    check_torch_uses(own, f"Ray gives out GPUs on node {node_address()}")
    if not own:
        return 0
    visible = os.environ.get(VISIBLE)
    return visible.split(",").index(own[0]) if visible else int(own[0])
