"""Placement of every role: its ranks, their placement groups, and a table of need and have when the
cluster has no room.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError

COLOCATED_POOL = "shared by all"
TRAINED_ROLES = ("actor", "critic")
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
FORWARDED_NAMES = ("TOKENIZERS_PARALLELISM", "CUDA_HOME", "LD_LIBRARY_PATH")
# Processes take turns on the cores: idle threads must sleep soon, but not between two kernels.
IDLE_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}
# Weights are packed into new memory at every sync: in small pages that takes twice as long.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True)
class RoleDemand:
    """The demand of one role; roles with the same `pool` share bundles."""

    role: str
    num_ranks: int
    pool: str
    bundles_per_rank: int = 1  # tensor-parallel engines take several devices


@dataclass(frozen=True)
class ClusterView:
    """The devices of the cluster."""

    num_gpus: int
    num_cpus: int
    max_gpus_per_node: int

    @property
    def has_gpus(self) -> bool:
        """Return True if ranks get GPUs."""
        return self.num_gpus > 0


def view_cluster() -> ClusterView:
    """Return the total resources of the connected cluster."""
    total = ray.cluster_resources()
    per_node = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    return ClusterView(
        num_gpus=int(total.get("GPU", 0)),
        num_cpus=int(total.get("CPU", 0)),
        max_gpus_per_node=max(per_node, default=0),
    )


def reward_roles(config: PPOConfig) -> dict[str, str]:
    """Return role and path of each local reward model: "reward", or "reward1" and on of several."""
    paths = config.reward.model_paths
    if len(paths) == 1:
        return {"reward": paths[0]}
    return {f"reward{k}": path for k, path in enumerate(paths, start=1)}


def role_demands(config: PPOConfig, cluster: ClusterView) -> list[RoleDemand]:
    """Return the demand of every role, engines last: as many ranks as asked for, else all GPUs of a
    node, else one CPU rank.

    A frozen model that nobody gave a number takes fewer where the others leave fewer.
    """
    ds = config.ds
    per_node = cluster.max_gpus_per_node if cluster.has_gpus else ds.ranks_per_share
    sections = {"actor": config.actor} if config.has_policy_ranks else {}
    if config.has_reference:
        sections["ref"] = config.ref
    sections |= dict.fromkeys(reward_roles(config), config.reward)
    if config.has_critic:
        sections["critic"] = config.critic
    ranks = {
        role: section.num_nodes * (section.num_gpus_per_node or per_node)
        for role, section in sections.items()
    }
    if config.train.colocate_all:
        ranks = dict.fromkeys(ranks, ranks["actor"])
    num_engines = config.vllm.num_engines
    if num_engines is None:
        tp = config.vllm.tensor_parallel_size
        num_engines = max(ranks["actor"] // tp, 1) if cluster.has_gpus else 1
    unset = [
        role
        for role, section in sections.items()
        if role not in TRAINED_ROLES and section.num_gpus_per_node is None
    ]
    pools = pools_of(config, ranks)
    demands = [RoleDemand(role, ranks[role], pools[role]) for role in ranks]
    if num_engines:
        pool = COLOCATED_POOL if config.engines_share_devices else "vllm"
        demands.append(RoleDemand("vllm", num_engines, pool, config.vllm.tensor_parallel_size))
    fitting = _ranks_that_fit(demands, unset, cluster, ds.ranks_per_share)
    demands = [replace(d, num_ranks=fitting.get(d.role, d.num_ranks)) for d in demands]
    for role, count in ((d.role, d.num_ranks) for d in demands if d.role != "vllm"):
        if count % ds.ranks_per_share:
            raise ConfigError(
                f"{role}: {count} rank(s) cannot be divided by --ring_attn_size "
                f"{ds.ring_attn_size} x --ds_tensor_parallel_size {ds.tensor_parallel_size}. Type "
                f"--{role.rstrip('0123456789')}_num_gpus_per_node {ds.ranks_per_share}."
            )
    return demands


def _ranks_that_fit(
    demands: Sequence[RoleDemand], unset: Sequence[str], cluster: ClusterView, ranks_per_share: int
) -> dict[str, int]:
    """Return fewer ranks for frozen models of unset size that have a place of their own: what the
    others leave, in equal shares. Empty when all fit as they are, or when that would not help.
    """
    sizes = pool_sizes(demands)
    own = {d.role: d.num_ranks for d in demands if d.role in unset and d.pool == d.role}
    num_left = cluster.num_gpus - sum(size for pool, size in sizes.items() if pool not in own)
    if sum(sizes.values()) <= cluster.num_gpus or not own or num_left < len(own):
        return {}
    num_each = num_left // len(own) // ranks_per_share * ranks_per_share
    return {role: min(num_ranks, num_each) for role, num_ranks in own.items()} if num_each else {}


def pools_of(config: PPOConfig, roles: Iterable[str]) -> dict[str, str]:
    """Return the pool of every role's devices: roles of one pool share them."""
    train = config.train
    pools = {role: role for role in roles}
    if train.colocate_actor_ref and "ref" in pools:
        pools["ref"] = "actor"
    if train.colocate_critic_reward and "critic" in pools:
        pools |= dict.fromkeys(reward_roles(config), "critic")
    if train.colocate_all:
        pools = dict.fromkeys(pools, COLOCATED_POOL)
    return pools


def pool_sizes(demands: Sequence[RoleDemand]) -> dict[str, int]:
    """Return the bundles of every pool: the largest of the roles that share it."""
    sizes: dict[str, int] = {}
    for demand in demands:
        size = demand.num_ranks * demand.bundles_per_rank
        sizes[demand.pool] = max(sizes.get(demand.pool, 0), size)
    return sizes


def check_demand(demands: Sequence[RoleDemand], cluster: ClusterView) -> None:
    """Raise ConfigError with a table when the cluster can never hold the demand."""
    need = sum(pool_sizes(demands).values())
    if cluster.has_gpus and need > cluster.num_gpus:
        raise ConfigError(
            f"Not enough GPUs: need {need}, have {cluster.num_gpus}. Ask for fewer ranks, share "
            f"devices with --colocate_all_models, or add nodes.\n{demand_table(demands, cluster)}"
        )


def demand_table(demands: Sequence[RoleDemand], cluster: ClusterView) -> str:
    """Return need and have, role by role."""
    rows = [f"  {'role':<10}{'ranks':>6}{'devices':>9}  placement"]
    for d in demands:
        num_devices = d.num_ranks * d.bundles_per_rank
        rows.append(f"  {d.role:<10}{d.num_ranks:>6}{num_devices:>9}  {d.pool}")
    have = f"GPU, have {cluster.num_gpus}" if cluster.has_gpus else f"CPU, have {cluster.num_cpus}"
    rows.append(f"  need {sum(pool_sizes(demands).values())} x {have}")
    return "\n".join(rows)


def place(
    demands: Sequence[RoleDemand],
    cluster: ClusterView,
    *,
    num_roles_at_once: int = 1,
    deadline_s: int = 8,
) -> tuple[dict[str, list[dict[str, Any]]], list[PlacementGroup]]:
    """Return the options of the actors of every role, one a rank, and the groups they lie in. The
    processes of `num_roles_at_once` roles share the cores of their node.

    Raise ConfigError with the table when the cluster is too small or busy.
    """
    check_demand(demands, cluster)
    bundle = {"GPU": 1.0, "CPU": 1.0} if cluster.has_gpus else {"CPU": CPU_SHARE_OF_A_RANK}
    groups = {
        pool: placement_group([bundle] * size, strategy="PACK")
        for pool, size in pool_sizes(demands).items()
    }
    if not all(group.wait(deadline_s) for group in groups.values()):
        for group in groups.values():
            remove_placement_group(group)
        raise ConfigError(
            f"The cluster did not free the devices in {deadline_s} s: another job holds them. "
            "Wait for it, end it (`ray status` shows what is in use), or ask for fewer ranks.\n"
            f"{demand_table(demands, cluster)}"
        )
    cores = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes()}
    nodes = {pool: placement_group_table(g)["bundles_to_node_id"] for pool, g in groups.items()}
    slots: dict[str, list[dict[str, Any]]] = {}
    for demand in demands:
        width, node_of = demand.bundles_per_rank, nodes[demand.pool]
        bundles = range(demand.num_ranks * width)
        num_on_node = Counter(node_of[bundle] for bundle in bundles)
        num_roles = sum(other.pool == demand.pool for other in demands)
        share = min(COLOCATED_SHARE, 1 / num_roles) if num_roles > 1 else 1.0
        resources = {"num_cpus": bundle["CPU"] * share, "num_gpus": bundle.get("GPU", 0.0) * share}
        slots[demand.role] = []
        for first in bundles[::width]:
            num_at_once = num_roles_at_once * num_on_node[node_of[first]]
            slots[demand.role].append(
                actor_options(
                    groups[demand.pool],
                    range(first, first + width),
                    resources,
                    num_threads=max(cores[node_of[first]] // num_at_once, 1),
                )
            )
    return slots, list(groups.values())


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
        if name.startswith(FORWARDED_PREFIXES) or name in FORWARDED_NAMES
    }
    defaults = IDLE_THREADS | HUGE_PAGES
    environment |= {name: os.environ.get(name, value) for name, value in defaults.items()}
    environment["OMP_NUM_THREADS"] = str(num_threads)
    # An actor that leads workers on GPUs asks for none itself, and must see them all the same.
    environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    return environment
