"""How many ranks every role gets, and the Ray cluster that gives them their places."""

from __future__ import annotations

from dataclasses import dataclass, field

import ray
from ray.util.placement_group import remove_placement_group

from openrlhf.config.ppo import PPOConfig
from openrlhf.engines.base import SHM_BACKEND, RolloutEngine
from openrlhf.engines.vllm_engine import VLLMEngineConfig
from openrlhf.trainer.ppo_utils.samples_generator import Scorer
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.placement import ClusterView, RoleDemand, place
from openrlhf.trainer.ray.vllm_engine import RayEngine, create_vllm_engines
from openrlhf.trainer.ray.weight_transport import choose_transport
from openrlhf.utils.logging import notice

COLOCATED_POOL = "shared by all"


@dataclass(frozen=True)
class RoleCounts:
    """Ranks of every role and number of vLLM engines."""

    ranks: dict[str, int] = field(default_factory=dict)
    num_engines: int = 0
    demands: tuple[RoleDemand, ...] = ()
    cluster: ClusterView | None = None

    def describe(self) -> str:
        """Devices in words."""
        if self.cluster is None:
            return "this process"
        if self.cluster.has_gpus:
            return f"{self.cluster.num_gpus} GPU(s)"
        return f"CPU ranks on {self.cluster.num_cpus} core(s)"


def role_counts(
    config: PPOConfig, cluster: ClusterView, *, has_critic: bool, has_reference: bool
) -> RoleCounts:
    """Ranks of this run's roles: as asked for, else all GPUs of a node, else one CPU rank."""
    per_node = cluster.max_gpus_per_node if cluster.has_gpus else 1
    sections = {"actor": config.actor}
    if has_reference:
        sections["ref"] = config.ref
    if config.reward.model_name_or_path:
        sections["reward"] = config.reward
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
    demands = tuple(_demands(config, ranks, num_engines))
    return RoleCounts(ranks, num_engines, demands, cluster)


def _demands(config: PPOConfig, ranks: dict[str, int], num_engines: int) -> list[RoleDemand]:
    train = config.train
    pools = {role: role for role in ranks}
    if train.colocate_actor_ref and "ref" in pools:
        pools["ref"] = "actor"
    if train.colocate_critic_reward and "reward" in pools and "critic" in pools:
        pools["reward"] = "critic"
    if train.colocate_all:
        pools = dict.fromkeys(pools, COLOCATED_POOL)
    demands = [RoleDemand(role, ranks[role], pools[role]) for role in ranks]
    if num_engines:
        pool = COLOCATED_POOL if train.colocate_all else "vllm"
        demands.append(RoleDemand("vllm", num_engines, pool, config.vllm.tensor_parallel_size))
    return demands


class RayCluster:
    """Starts groups and engines in their places on the connected cluster."""

    def __init__(self, config: PPOConfig, counts: RoleCounts, *, run_dir: str) -> None:
        assert counts.cluster is not None
        self.config = config
        self.counts = counts
        self.run_dir = run_dir
        self.groups: list[RayActorGroup] = []
        self.engines: list[RayEngine] = []
        self.weight_transfer_backend = weight_transfer_backend(config, counts)
        self.slots = place(counts.demands, counts.cluster)
        busiest = max([*counts.ranks.values(), counts.num_engines])
        self.has_gpus = counts.cluster.has_gpus
        if not self.has_gpus and busiest > counts.cluster.num_cpus:
            notice(
                f"{busiest} ranks share {counts.cluster.num_cpus} core(s): right, but not faster"
            )

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes and give the places back."""
        for handle in [h for g in self.groups for h in g.handles] + [
            e.handle for e in self.engines
        ]:
            ray.kill(handle)
        for group in {
            slot.group.id: slot.group for s in self.slots.values() for slot in s
        }.values():
            remove_placement_group(group)

    def start_group(self, role: str, worker_class: type) -> WorkerGroup:
        """Start the ranks of a role."""
        group = RayActorGroup(
            worker_class,
            (self.config,),
            self.slots[role],
            role=role,
            run_dir=self.run_dir,
            num_threads=self._threads_of(self.counts.ranks[role]),
        )
        self.groups.append(group)
        return group

    def start_engines(self) -> list[RolloutEngine]:
        """Start the vLLM engines; none when the policy generates itself."""
        if not self.counts.num_engines:
            return []
        engines = create_vllm_engines(
            engine_config(
                self.config,
                has_gpus=self.has_gpus,
                weight_transfer_backend=self.weight_transfer_backend,
            ),
            self.slots["vllm"],
            run_dir=self.run_dir,
            num_threads=self._threads_of(self.counts.num_engines),
        )
        self.engines += engines
        return list(engines)

    def shared(self, scorer: Scorer) -> Scorer:
        """The scorer itself: there is one controller."""
        return scorer

    def wait_until_up(self) -> None:
        """Wait for all processes; they start at the same time."""
        for group in self.groups:
            group.join()
        for engine in self.engines:
            engine.ready()

    def _threads_of(self, num_ranks: int) -> int:
        # Phases take turns: one role at a time may use all cores.
        assert self.counts.cluster is not None
        return max(self.counts.cluster.num_cpus // num_ranks, 1)


def weight_transfer_backend(config: PPOConfig, counts: RoleCounts) -> str:
    """How weights travel to the engines of this run; raises ConfigError when there is no way."""
    cluster = counts.cluster
    if cluster is None or not counts.num_engines:
        return SHM_BACKEND
    num_engine_gpus = counts.num_engines * config.vllm.tensor_parallel_size
    return choose_transport(
        config.vllm.sync_backend,
        has_gpus=cluster.has_gpus,
        is_colocated=config.train.colocate_all,
        is_one_machine=cluster.num_gpus == cluster.max_gpus_per_node,
        has_rank_on_every_engine_gpu=num_engine_gpus <= counts.ranks["actor"],
    )


def engine_config(
    config: PPOConfig, *, has_gpus: bool, weight_transfer_backend: str = SHM_BACKEND
) -> VLLMEngineConfig:
    """The engine's settings for this run."""
    assert config.actor.model_name_or_path is not None
    return VLLMEngineConfig(
        model=config.actor.model_name_or_path,
        dtype=_engine_dtype(config.ds.param_dtype, has_gpus=has_gpus),
        max_model_len=config.data.max_len
        or config.data.prompt_max_len + config.rollout.max_new_tokens,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        # The samples of a prompt share its prefix through the cache.
        enable_prefix_caching=config.vllm.enable_prefix_caching
        or config.rollout.n_samples_per_prompt > 1,
        enforce_eager=config.vllm.enforce_eager,
        enable_sleep=config.vllm.enable_sleep and config.train.colocate_all,
        seed=config.train.seed,
        trust_remote_code=config.trust_remote_code,
        weight_transfer_backend=weight_transfer_backend,
        distributed_executor_backend="ray" if config.vllm.tensor_parallel_size > 1 else None,
    )


def _engine_dtype(param_dtype: str, *, has_gpus: bool) -> str:
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    if param_dtype == "auto":
        return "auto" if has_gpus else "float32"
    return names[param_dtype]
