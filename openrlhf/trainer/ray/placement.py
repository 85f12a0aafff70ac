"""Placement of every role: its ranks and their placement groups."""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf.config.generation import AgentsConfig
from openrlhf.errors import ConfigError, LostEngineError, LostRankError, NoRestartError
from openrlhf.trainer.ppo_utils.demands import (
    ClusterView,
    RoleDemand,
    check_demand,
    demand_table,
    pool_sizes,
)
from openrlhf.utils.console import warn
from openrlhf.utils.progress import Quiet
from openrlhf.utils.threads import waiting_of_threads

LOOK_EVERY_S = 2.0
FREE_S = 20  # for devices to be free
# On machines without GPUs ranks share the cores: Ray only needs a token amount to place them.
CPU_SHARE_OF_A_RANK = 0.01
COLOCATED_SHARE = 0.2  # of a GPU, for each of the models that share it; less for more than five
FORWARDED_PREFIXES = (
    "HF_",
    "WANDB_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",  # libfabric, under NCCL on some clouds
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "TRITON_",
    "VLLM_",
    "OPENRLHF_",
    "RAY_EXPERIMENTAL_NOSET_",
)
# Of one machine alone, which each node has of its own:
NOT_FORWARDED = ("VLLM_HOST_IP", "VLLM_HOST_PORT", "VLLM_NIXL_SIDE_CHANNEL_HOST")
FORWARDED_NAMES = ("TOKENIZERS_PARALLELISM", "CUDA_HOME", "LD_LIBRARY_PATH")


def view_cluster() -> ClusterView:
    """Return the total resources of the connected cluster."""
    total = ray.cluster_resources()
    return ClusterView(
        num_gpus=int(total.get("GPU", 0)),
        num_cpus=int(total.get("CPU", 0)),
        max_gpus_per_node=max(_gpus_of_nodes(), default=0),
    )


def _gpus_of_nodes() -> list[int]:
    return [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]


def place(
    demands: Sequence[RoleDemand],
    cluster: ClusterView,
    *,
    num_roles_at_once: int = 1,
) -> tuple[dict[str, list[dict[str, Any]]], list[PlacementGroup]]:
    """Return the options of the actors of every role, one a rank, and the groups they lie in. The
    processes of `num_roles_at_once` roles share the cores of their node.

    Raise ConfigError with the table when the cluster is too small or busy.
    """
    check_demand(demands, cluster)
    bundle = {"GPU": 1.0, "CPU": 1.0} if cluster.has_gpus else {"CPU": CPU_SHARE_OF_A_RANK}
    pools: dict[str, list[PlacementGroup]] = {}
    for demand in demands:
        if _has_whole_nodes(demand, demands):
            pools[demand.pool] = [
                placement_group([bundle] * demand.bundles_per_rank, strategy="STRICT_PACK")
                for _ in range(demand.num_ranks)
            ]
    deadline = time.monotonic() + FREE_S
    # What needs room on one node is there before anything else takes part of that node.
    is_placed = _wait_for_groups(pools, deadline)
    for pool, size in pool_sizes(demands).items() if is_placed else ():
        if pool not in pools:
            pools[pool] = [placement_group([bundle] * size, strategy="PACK")]
    groups = [group for of_pool in pools.values() for group in of_pool]
    if not is_placed or not _wait_for_groups(pools, deadline):
        for group in groups:
            remove_placement_group(group)
        raise ConfigError(
            f"The cluster did not free the devices in {FREE_S} s: another job holds them. "
            "Wait for it, end it (`ray status` shows what is in use), or ask for fewer ranks.\n"
            f"{demand_table(demands, cluster)}"
        )
    cores = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes()}
    slots: dict[str, list[dict[str, Any]]] = {}
    for demand in demands:
        ranks = _bundles_of_ranks(demand, pools[demand.pool])
        num_on_node = Counter(node for _, _, nodes in ranks for node in nodes)
        num_roles = sum(other.pool == demand.pool for other in demands)
        share = min(COLOCATED_SHARE, share_of(num_roles)) if num_roles > 1 else 1.0
        resources = {"num_cpus": bundle["CPU"] * share, "num_gpus": bundle.get("GPU", 0.0) * share}
        slots[demand.role] = []
        for group, bundles, nodes in ranks:
            num_threads = max(cores[nodes[0]] // (num_roles_at_once * num_on_node[nodes[0]]), 1)
            slots[demand.role].append(
                actor_options(group, bundles, resources, num_threads=num_threads)
            )
    return slots, groups


def _wait_for_groups(pools: Mapping[str, Sequence[PlacementGroup]], deadline: float) -> bool:
    """Return False if a group of the pools has no place at the deadline of `time.monotonic()`."""
    return all(
        group.wait(max(round(deadline - time.monotonic()), 1))  # Ray counts whole seconds
        for of_pool in pools.values()
        for group in of_pool
    )


def _has_whole_nodes(demand: RoleDemand, demands: Sequence[RoleDemand]) -> bool:
    """Return True for engines on several GPUs each, which they share with nobody, if the nodes of
    the cluster have room for each engine on one of them.
    """
    width = demand.bundles_per_rank
    if width == 1 or any(d.pool == demand.pool and d is not demand for d in demands):
        return False
    return sum(count // width for count in _gpus_of_nodes()) >= demand.num_ranks


def _bundles_of_ranks(
    demand: RoleDemand, groups: Sequence[PlacementGroup]
) -> list[tuple[PlacementGroup, Sequence[int], Sequence[str]]]:
    """Return the group, the bundles in it and their nodes of each rank: ranks of a node are
    neighbours, and a rank has bundles of one node as far as there are enough.
    """
    width = demand.bundles_per_rank
    whole, rest = [], []
    for group in groups:
        node_of: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
        for node in dict.fromkeys(node_of[bundle] for bundle in sorted(node_of)):
            bundles = [bundle for bundle in sorted(node_of) if node_of[bundle] == node]
            cut = len(bundles) // width * width
            whole += [(group, bundles[i : i + width], [node] * width) for i in range(0, cut, width)]
            rest += [(group, bundle, node) for bundle in bundles[cut:]]
    for first in range(0, len(rest) - width + 1, width):
        (group, *_), *_ = part = rest[first : first + width]
        whole.append((group, [bundle for _, bundle, _ in part], [node for *_, node in part]))
    ranks = whole[: demand.num_ranks]
    if num_apart := sum(len(set(nodes)) > 1 for *_, nodes in ranks):
        warn(
            f"{demand.role}: {num_apart} of {demand.num_ranks} have their {width} GPUs on several "
            "nodes, and each layer waits for the network between them. Type a "
            "--vllm_tensor_parallel_size that divides the GPUs of a node."
        )
    return ranks


def share_of(num_roles: int) -> float:
    """Return the part of a device for each of its roles, in the steps of 1e-4 that Ray counts in,
    rounded down: six times 0.1667 would not fit.
    """
    return 10_000 // num_roles / 10_000


def wait_for_node(
    handle: Any,
    slot: Mapping[str, Any],
    who: str,
    limits: AgentsConfig,
    *,
    lost: type[LostEngineError | LostRankError] = LostRankError,
) -> None:
    """Wait until a new actor is up. If the node of its slot is gone, Ray moves the slot to another
    one; raise NoRestartError if none has room for `node_wait_s` seconds, `lost` if the node is
    there and the process is not up in `restart_timeout_s`.
    """
    group, reference = slot["scheduling_strategy"].placement_group, handle.health.remote()
    quiet, placed_s = Quiet(), 0.0
    while True:
        is_up = bool(ray.wait([reference], timeout=LOOK_EVERY_S)[0])
        is_placed = placement_group_table(group)["state"] == "CREATED"
        if is_up and is_placed:  # the bundles of the workers that it leads, too
            return
        if is_up:
            time.sleep(LOOK_EVERY_S)
        if is_placed:
            quiet.reset()
            placed_s += LOOK_EVERY_S
        elif quiet.add(LOOK_EVERY_S):
            warn(f"{who} has waited {quiet.seconds:.0f} s for a node: the one it was on is gone.")
        if placed_s >= limits.restart_timeout_s:
            raise lost(f"{who} did not start in {placed_s:.0f} s (--restart_timeout_s)")
        if quiet.seconds >= limits.node_wait_s:
            raise NoRestartError(
                f"{who} was on a node that is gone, and no other had room for it in "
                f"{limits.node_wait_s:g} s "
                "(--node_wait_s). Start one, or go on with fewer ranks: type fewer, and "
                "--load_checkpoint --use_ds_universal_ckpt."
            )


def actor_options(
    group: PlacementGroup, bundles: Sequence[int], resources: dict[str, float], *, num_threads: int
) -> dict[str, Any]:
    """Return Ray's options of the actor on some bundles of a group."""
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group,
        placement_group_bundle_index=bundles[0],
        placement_group_capture_child_tasks=True,
    )
    environment = worker_environment(num_threads)
    if len(bundles) > 1:  # vLLM starts a worker on each of them; the actor itself only leads
        environment["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, bundles))
        environment["VLLM_RAY_PER_WORKER_GPUS"] = str(resources["num_gpus"])
        resources = resources | {"num_gpus": 0}
    runtime_env = {"env_vars": environment}
    return {**resources, "scheduling_strategy": strategy, "runtime_env": runtime_env}


def worker_environment(num_threads: int) -> dict[str, str]:
    """Return the caller's credentials and switches for a worker, and threads for the cores."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(FORWARDED_PREFIXES) and name not in NOT_FORWARDED)
        or name in FORWARDED_NAMES
    }
    environment |= waiting_of_threads()
    environment["OMP_NUM_THREADS"] = str(num_threads)
    # An actor that leads workers on GPUs asks for none itself, and must see them all the same.
    environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    return environment
