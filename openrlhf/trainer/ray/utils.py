"""The machine and the GPU of a Ray worker."""

import os

import ray

from openrlhf.utils.gpus import VISIBLE, check_torch_uses


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
