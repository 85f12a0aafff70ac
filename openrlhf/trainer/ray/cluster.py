"""The number of ranks of every role, and the Ray cluster that places them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
import torch
from ray.util.placement_group import remove_placement_group

from openrlhf.config.ppo import PPOConfig
from openrlhf.engines.base import SHARED_MEMORY, RolloutEngine, WeightRoute
from openrlhf.engines.vllm_engine import VLLMEngineConfig
from openrlhf.errors import ConfigError, OpenRLHFError
from openrlhf.models.loading import load_config, resolve_dtype
from openrlhf.rewards.base import RewardSource
from openrlhf.rewards.workers import FunctionPool
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.placement import ClusterView, RoleDemand, place, pool_sizes
from openrlhf.trainer.ray.reward_nodes import NodePools, run_nodes, spread, start_pool_actors
from openrlhf.trainer.ray.vllm_engine import RayEngine, create_vllm_engines
from openrlhf.trainer.ray.watch import Watch, Watched
from openrlhf.utils.logging import notice
from openrlhf.utils.progress import progress

COLOCATED_POOL = "shared by all"
TRAINED_ROLES = ("actor", "critic")
SEED_STRIDE = 1_000_003  # between the seeds of engines that start at one step and at the next


@dataclass(frozen=True)
class RoleCounts:
    """Ranks of every role and number of vLLM engines."""

    ranks: dict[str, int] = field(default_factory=dict)
    num_engines: int = 0
    demands: tuple[RoleDemand, ...] = ()
    cluster: ClusterView | None = None

    def describe(self) -> str:
        """Return the devices in words."""
        if self.cluster is None:
            return "this process"
        if self.cluster.has_gpus:
            return f"{self.cluster.num_gpus} GPU(s)"
        return f"CPU ranks on {self.cluster.num_cpus} core(s)"


def reward_roles(config: PPOConfig) -> dict[str, str]:
    """Role and path of every local reward model: "reward", or "reward1" and on of several."""
    paths = config.reward.model_paths
    if len(paths) == 1:
        return {"reward": paths[0]}
    return {f"reward{k}": path for k, path in enumerate(paths, start=1)}


def role_counts(
    config: PPOConfig, cluster: ClusterView, *, has_critic: bool, has_reference: bool
) -> RoleCounts:
    """Return the ranks of every role: as asked for, else all GPUs of a node, else one CPU rank.

    A frozen model that nobody gave a number takes fewer where the others leave fewer.
    """
    ranks_per_share = config.ds.ranks_per_share
    per_node = cluster.max_gpus_per_node if cluster.has_gpus else ranks_per_share
    sections = {"actor": config.actor}
    if has_reference:
        sections["ref"] = config.ref
    sections |= dict.fromkeys(reward_roles(config), config.reward)
    if has_critic:
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
    demands = _demands(config, ranks, num_engines)
    unset = {
        role
        for role, section in sections.items()
        if role not in TRAINED_ROLES and section.num_gpus_per_node is None
    }
    left = _ranks_that_fit(demands, unset, cluster, ranks_per_share)
    if left:
        ranks |= left
        demands = _demands(config, ranks, num_engines)
    _check_shares(config, ranks)
    return RoleCounts(ranks, num_engines, tuple(demands), cluster)


def _check_shares(config: PPOConfig, ranks: dict[str, int]) -> None:
    """Raise ConfigError for a role whose ranks cannot be divided into groups that share samples."""
    ds = config.ds
    if wrong := [role for role, count in ranks.items() if count % ds.ranks_per_share]:
        role = wrong[0]
        raise ConfigError(
            f"{role}: {ranks[role]} rank(s) cannot be divided by --ring_attn_size "
            f"{ds.ring_attn_size} x --ds_tensor_parallel_size {ds.tensor_parallel_size}. Type "
            f"--{role.rstrip('0123456789')}_num_gpus_per_node {ds.ranks_per_share}."
        )


def _ranks_that_fit(
    demands: Sequence[RoleDemand], unset: set[str], cluster: ClusterView, ranks_per_share: int
) -> dict[str, int]:
    """Fewer ranks for frozen models of unset size that have a place of their own: what the others
    leave, in equal shares. Empty when all fit as they are, or when that would not help.
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


def _demands(config: PPOConfig, ranks: dict[str, int], num_engines: int) -> list[RoleDemand]:
    pools = pools_of(config, ranks)
    demands = [RoleDemand(role, ranks[role], pools[role]) for role in ranks]
    if num_engines:
        pool = COLOCATED_POOL if config.engines_share_devices else "vllm"
        demands.append(RoleDemand("vllm", num_engines, pool, config.vllm.tensor_parallel_size))
    return demands


class RayCluster:
    """Starts groups and engines in their places on the connected cluster."""

    def __init__(
        self, config: PPOConfig, counts: RoleCounts, *, run_dir: str, resume_step: int = 0
    ) -> None:
        assert counts.cluster is not None
        self.resume_step = resume_step
        self.config = config
        self.counts = counts
        self.run_dir = run_dir
        self.groups: list[RayActorGroup] = []
        self.engines: list[RayEngine] = []
        self.reward_pools: NodePools | None = None
        self.reward_actors: list[Any] = []
        self.watch = Watch()
        self.weight_route = weight_route(config, counts)
        # Phases take turns: one role at a time may use all cores. Engines and trainer, where both
        # run at once, share them.
        num_at_once = 2 if config.train.async_enable else 1
        self.slots = place(counts.demands, counts.cluster, num_roles_at_once=num_at_once)
        self.policy_dtype = policy_dtype(config, has_gpus=counts.cluster.has_gpus)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End all processes and give the places back; an error that came of ending one that did not
        get on is raised as that.
        """
        self.watch.close()
        if self.reward_pools is not None:
            self.reward_pools.close()
        for handle in self.reward_actors:
            ray.kill(handle)
        for handle in [h for g in self.groups for h in g.handles] + [
            e.handle for e in self.engines
        ]:
            ray.kill(handle)
        for group in {
            slot.group.id: slot.group for s in self.slots.values() for slot in s
        }.values():
            remove_placement_group(group)
        if self.watch.failure is not None and isinstance(error, OpenRLHFError):
            raise self.watch.failure from error

    def start_group(self, role: str, worker_class: type) -> WorkerGroup:
        """Start the ranks of a role."""
        group = RayActorGroup(
            worker_class,
            (self.config,),
            self.slots[role],
            role=role,
            run_dir=self.run_dir,
            ranks_per_share=self.config.ds.ranks_per_share,
        )
        self.groups.append(group)
        return group

    def start_engines(self) -> list[RolloutEngine]:
        """Start the vLLM engines; none when the policy generates itself."""
        cluster = self.counts.cluster
        if not self.counts.num_engines:
            return []
        assert cluster is not None
        engines = create_vllm_engines(
            engine_config(
                self.config,
                dtype=self.policy_dtype,
                weight_route=self.weight_route,
                resume_step=self.resume_step,
                # The workers of an engine lie on devices that Ray placed; it places no CPU ones.
                executor="ray" if cluster.has_gpus else "mp",
            ),
            self.slots["vllm"],
            run_dir=self.run_dir,
        )
        self.engines += engines
        return list(engines)

    def on_every_node(self, source: RewardSource) -> RewardSource:
        """Return a reward function with workers on every node of the run; any other source itself.

        Raise ConfigError for a node without the file.
        """
        nodes = run_nodes([slot for slots in self.slots.values() for slot in slots])
        if not isinstance(source, FunctionPool) or len(nodes) == 1:
            return source
        self.reward_actors += start_pool_actors(source, nodes[1:])
        self.reward_pools = spread(source, self.reward_actors)
        notice(f"reward function on {len(nodes)} nodes, {source.settings.num_workers} workers each")
        return self.reward_pools

    def wait_until_up(self) -> None:
        """Wait for all processes; they start at the same time."""
        with progress("starting workers", len(self.groups) + len(self.engines)) as advance:
            for group in self.groups:
                group.join()
                advance()
            for engine in self.engines:
                engine.ready()
                advance()
        self._watch_all()

    def _watch_all(self) -> None:
        limit_s = self.config.train.rank_timeout_s
        for group in self.groups:
            for rank, handle in enumerate(group.handles):
                who = partial(group.who, rank)
                self.watch.add(Watched(who, handle, limit_s, "--rank_timeout_s", has_bar=rank == 0))
        limit_s = self.config.vllm.timeout_s
        for engine in self.engines:
            who = partial(str, f"engine {engine.who}")
            self.watch.add(Watched(who, engine.handle, limit_s, "--engine_timeout_s"))
        self.watch.start()


def weight_route(config: PPOConfig, counts: RoleCounts) -> WeightRoute:
    """Return how weights travel to the engines of this run: the fastest way that works.

    Two ranks of an NCCL group cannot share a GPU, so an engine that shares one with a rank of
    another place receives gloo's broadcast.
    """
    vllm, cluster = config.vllm, counts.cluster
    if cluster is None or not counts.num_engines:
        return SHARED_MEMORY
    if vllm.sync_with_ray:
        return WeightRoute("objects", "cpu")
    can_use_gpus = cluster.has_gpus and vllm.sync_backend != "gloo"
    is_colocated = config.engines_share_devices
    if is_colocated and counts.num_engines * vllm.tensor_parallel_size <= counts.ranks["actor"]:
        return WeightRoute("handles", "cuda" if can_use_gpus else "cpu")
    return WeightRoute("broadcast", "cuda" if can_use_gpus and not is_colocated else "cpu")


def engine_config(
    config: PPOConfig,
    *,
    dtype: torch.dtype,
    weight_route: WeightRoute = SHARED_MEMORY,
    resume_step: int = 0,
    executor: str = "mp",
) -> VLLMEngineConfig:
    """Return the engine's settings for this run, with the trainer's type of the policy.

    A run that goes on from a step draws other numbers than its beginning drew.
    """
    assert config.actor.model_name_or_path is not None
    return VLLMEngineConfig(
        model=config.actor.model_name_or_path,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=config.data.max_len
        or config.data.prompt_max_len + config.rollout.max_new_tokens,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        # The samples of a prompt share its prefix through the cache.
        enable_prefix_caching=config.vllm.enable_prefix_caching
        or config.rollout.n_samples_per_prompt > 1,
        enforce_eager=config.vllm.enforce_eager,
        enable_sleep=config.vllm.enable_sleep and config.engines_share_devices,
        seed=config.train.seed + SEED_STRIDE * resume_step,
        trust_remote_code=config.trust_remote_code,
        weight_route=weight_route,
        distributed_executor_backend=executor,
    )


def policy_dtype(config: PPOConfig, *, has_gpus: bool) -> torch.dtype:
    """Return the type in which ranks hold the policy, which may be on other machines."""
    path = config.actor.model_name_or_path
    assert path is not None, "checked by the configuration"
    facts = load_config(path, trust_remote_code=config.trust_remote_code)
    return resolve_dtype(config.ds.param_dtype, facts, device_type="cuda" if has_gpus else "cpu")
