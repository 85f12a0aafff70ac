"""Where every role runs: demand against the cluster, placement groups, and a table instead of an
endless wait.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from openrlhf.errors import ConfigError

# On machines without GPUs ranks share the cores: Ray only needs a token amount to place them.
CPU_SHARE_OF_A_RANK = 0.01
POLL_S = 0.1
COLOCATED_SHARE = 0.2  # of a GPU, for each of the models that share it; less for more than five


@dataclass(frozen=True)
class RoleDemand:
    """The demand of one role; roles with the same `pool` share bundles."""

    role: str
    num_ranks: int
    pool: str
    bundles_per_rank: int = 1  # tensor-parallel engines take several devices


@dataclass(frozen=True)
class Slot:
    """The place of one rank of a role, and its share of the bundle."""

    group: PlacementGroup
    bundle_index: int
    num_cpus: float
    num_gpus: float  # on each of its bundles
    num_threads: int  # of each of its processes
    bundles: tuple[int, ...] = ()  # of a rank whose own workers sit on several; else empty


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


def pool_sizes(demands: Sequence[RoleDemand]) -> dict[str, int]:
    """Return the bundles of every pool: the largest of the roles that share it."""
    sizes: dict[str, int] = {}
    for demand in demands:
        size = demand.num_ranks * demand.bundles_per_rank
        sizes[demand.pool] = max(sizes.get(demand.pool, 0), size)
    return sizes


def check_demand(demands: Sequence[RoleDemand], cluster: ClusterView) -> None:
    """Raise ConfigError with a table when the cluster can never hold the demand."""
    if not cluster.has_gpus:
        return
    need = sum(pool_sizes(demands).values())
    if need > cluster.num_gpus:
        raise ConfigError(
            f"Not enough GPUs: need {need}, have {cluster.num_gpus}. Ask for fewer ranks, share "
            f"devices with --colocate_all_models, or add nodes.\n{demand_table(demands, cluster)}"
        )
    if need > cluster.num_cpus:  # every GPU comes with a core
        raise ConfigError(
            f"Not enough CPUs: need {need}, one for each GPU, have {cluster.num_cpus}. "
            f"Start Ray with more --num-cpus.\n{demand_table(demands, cluster)}"
        )


def demand_table(
    demands: Sequence[RoleDemand], cluster: ClusterView, *, num_held: int | None = None
) -> str:
    """Return need and have, role by role; others hold `num_held` devices, where known."""
    kind = "GPU" if cluster.has_gpus else "CPU rank"
    rows = [f"  {'role':<10}{'ranks':>6}{'devices':>9}  placement"]
    for d in demands:
        rows.append(
            f"  {d.role:<10}{d.num_ranks:>6}{d.num_ranks * d.bundles_per_rank:>9}  {d.pool}"
        )
    have = cluster.num_gpus if cluster.has_gpus else cluster.num_cpus
    held = "" if num_held is None else f", held by others {num_held}"
    rows.append(f"  need {sum(pool_sizes(demands).values())} x {kind}, have {have}{held}")
    return "\n".join(rows)


def place(
    demands: Sequence[RoleDemand],
    cluster: ClusterView,
    *,
    num_roles_at_once: int = 1,
    deadline_s: float = 8.0,
) -> dict[str, list[Slot]]:
    """Return the slots of every role, one a rank. The processes of `num_roles_at_once` roles share
    the cores of their node.

    Raise ConfigError with the table when the cluster is too small or busy.
    """
    check_demand(demands, cluster)
    bundle = {"GPU": 1.0, "CPU": 1.0} if cluster.has_gpus else {"CPU": CPU_SHARE_OF_A_RANK}
    groups = {
        pool: placement_group([bundle] * size, strategy="PACK")
        for pool, size in pool_sizes(demands).items()
    }
    _wait_until_ready(groups, demands, cluster, deadline_s)
    roles_in_pool = {pool: sum(d.pool == pool for d in demands) for pool in groups}
    cores = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes()}
    nodes = {pool: placement_group_table(g)["bundles_to_node_id"] for pool, g in groups.items()}
    slots: dict[str, list[Slot]] = {}
    for demand in demands:
        width = demand.bundles_per_rank
        bundles = range(demand.num_ranks * width)
        node_of = nodes[demand.pool]
        num_on_node = Counter(node_of[bundle] for bundle in bundles)
        num_roles = roles_in_pool[demand.pool]
        share = min(COLOCATED_SHARE, 1 / num_roles) if num_roles > 1 else 1.0
        slots[demand.role] = [
            Slot(
                groups[demand.pool],
                first,
                num_cpus=bundle["CPU"] * share,
                num_gpus=bundle.get("GPU", 0.0) * share,
                num_threads=max(
                    cores[node_of[first]] // (num_roles_at_once * num_on_node[node_of[first]]), 1
                ),
                bundles=_spread(first, width),
            )
            for first in bundles[::width]
        ]
    return slots


def _spread(first: int, width: int) -> tuple[int, ...]:
    return tuple(range(first, first + width)) if width > 1 else ()


def _wait_until_ready(
    groups: dict[str, PlacementGroup],
    demands: Sequence[RoleDemand],
    cluster: ClusterView,
    deadline_s: float,
) -> None:
    """Wait for all groups; at the deadline give every one back and raise ConfigError."""
    # `PlacementGroup.wait` cuts its timeout to whole seconds and would give up early.
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if all(map(_is_placed, groups.values())):
            return
        time.sleep(POLL_S)
    num_held = _held_by_others(groups, cluster)
    for group in groups.values():
        remove_placement_group(group)
    raise ConfigError(
        f"The cluster did not free the devices in {deadline_s:.0f} s: another job holds them. "
        "Wait for it, end it (`ray status` shows what is in use), or ask for fewer ranks.\n"
        f"{demand_table(demands, cluster, num_held=num_held)}"
    )


def _is_placed(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group)["state"] == "CREATED")


def _held_by_others(groups: dict[str, PlacementGroup], cluster: ClusterView) -> int:
    """Return the devices in use, less those of our own groups that found a place."""
    kind, have = ("GPU", cluster.num_gpus) if cluster.has_gpus else ("CPU", cluster.num_cpus)
    placed = [
        bundle for group in groups.values() if _is_placed(group) for bundle in group.bundle_specs
    ]
    in_use = have - ray.available_resources().get(kind, 0.0)
    return max(round(in_use - sum(bundle[kind] for bundle in placed)), 0)
