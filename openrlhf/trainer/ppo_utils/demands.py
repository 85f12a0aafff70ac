"""The devices that each role of a run needs; a table of need and have when there are too few."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from openrlhf.config.base import is_given, value_at, with_value
from openrlhf.config.generation import GenerationRunConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.utils.console import notice

COLOCATED_POOL = "shared by all"
TRAINED_ROLES = ("actor", "critic")
# What a run on the GPUs of one machine has where nobody said who is to have which.
SHARED = {
    "train.colocate_all": True,
    "vllm.enable_sleep": True,
    "ds.enable_sleep": True,
    "vllm.gpu_memory_utilization": 0.5,
}
PLACEMENT = (
    *("train.colocate_all", "train.colocate_actor_ref", "train.colocate_critic_reward"),
    *("train.async_enable", "vllm.num_engines"),
    *(f"{role}.num_nodes" for role in ("actor", "critic", "ref", "reward")),
    *(f"{role}.num_gpus_per_node" for role in ("actor", "critic", "ref", "reward")),
)


@dataclass(frozen=True)
class RoleDemand:
    """The demand of one role; roles with the same `pool` share bundles.

    Example: `RoleDemand("ref", 4, pool="actor")`
    """

    role: str
    num_ranks: int
    pool: str
    bundles_per_rank: int = 1  # tensor-parallel engines take several devices


@dataclass(frozen=True)
class ClusterView:
    """The devices of the cluster.

    Example: `ClusterView(num_gpus=16, num_cpus=128, max_gpus_per_node=8)`
    """

    num_gpus: int
    num_cpus: int
    max_gpus_per_node: int

    @property
    def has_gpus(self) -> bool:
        """Return True if ranks get GPUs."""
        return self.num_gpus > 0


def role_demands(config: GenerationRunConfig, cluster: ClusterView) -> list[RoleDemand]:
    """Return the demand of every role, engines last: as many ranks as asked for, else all GPUs of a
    node, else one CPU rank.

    A frozen model that nobody gave a number takes fewer where the others leave fewer.
    """
    ds = config.ds
    per_node = cluster.max_gpus_per_node if cluster.has_gpus else ds.ranks_per_share
    ranks = {
        role: section.num_nodes * (section.num_gpus_per_node or per_node)
        for role, section in config.placed.items()
    }
    if config.colocates_all:
        ranks = dict.fromkeys(ranks, ranks["actor"])
    num_engines = config.vllm.num_engines
    if num_engines is None:
        tp = config.vllm.tensor_parallel_size
        num_engines = max(ranks["actor"] // tp, 1) if cluster.has_gpus else 1
    unset = [
        role
        for role, section in config.placed.items()
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
                f"--{section_of(role)}_num_gpus_per_node {ds.ranks_per_share}."
            )
    return demands


def sharing_one_machine(config: PPOConfig, view: Callable[[], ClusterView]) -> PPOConfig:
    """Return the config of a run whose models and engines share the GPUs of the only machine in
    turns, unless somebody placed one of them.
    """
    if any(is_given(config, path) for path in PLACEMENT):
        return config
    cluster = view()
    if not cluster.has_gpus or cluster.num_gpus > cluster.max_gpus_per_node:
        return config
    for path, value in SHARED.items():
        if not is_given(config, path):
            config = with_value(config, path, value)
    words = " ".join(f"--{path} {str(value_at(config, path)).lower()}" for path in SHARED)
    notice(
        f"note: models and engines share the GPUs of one machine in turns ({words}); "
        "--actor_num_gpus_per_node and the like give each its own"
    )
    return config


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


def pools_of(config: GenerationRunConfig, roles: Iterable[str]) -> dict[str, str]:
    """Return the pool of every role's devices: roles of one pool share them."""
    first_of = {name: first for first, *others in config.colocated_groups() for name in others}
    pools = {role: first_of.get(section_of(role), role) for role in roles}
    return dict.fromkeys(pools, COLOCATED_POOL) if config.colocates_all else pools


def section_of(role: str) -> str:
    """Return the section of the config that a role is of: "reward" for "reward2"."""
    return role.rstrip("0123456789")


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
            f"Not enough GPUs: need {need}, have {cluster.num_gpus}. Have all models share them "
            "with --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep "
            "--vllm_gpu_memory_utilization 0.5, ask for fewer ranks, or add nodes.\n"
            f"{demand_table(demands, cluster)}"
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
