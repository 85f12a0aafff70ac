"""Starts the groups and engines of a run: in this process, or in their places on a Ray cluster."""

from __future__ import annotations

from contextlib import AbstractContextManager

import ray
import torch
from ray.util.placement_group import remove_placement_group

from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.collectives import shut_down
from openrlhf.engines.base import SHARED_MEMORY, RolloutEngine, WeightRoute
from openrlhf.engines.vllm_engine import VLLMEngine, VLLMEngineConfig
from openrlhf.errors import ConfigError, OpenRLHFError
from openrlhf.models.loading import load_config, resolve_dtype
from openrlhf.rewards.base import RewardSource
from openrlhf.rewards.workers import FunctionPool
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.placement import (
    RoleCounts,
    place,
    reward_roles,
    role_counts,
    view_cluster,
)
from openrlhf.trainer.ray.reward_nodes import NodePools, on_every_node
from openrlhf.trainer.ray.utils import RankIdentity
from openrlhf.trainer.ray.vllm_engine import RayEngine, create_vllm_engines
from openrlhf.trainer.ray.watch import Watch, Watched
from openrlhf.utils.progress import progress

SEED_STRIDE = 1_000_003  # between the seeds of engines that start at one step and at the next


class LocalCluster(AbstractContextManager["LocalCluster"]):
    """One rank of every role and at most one engine, in this process."""

    def __init__(self, config: PPOConfig, run_dir: str, resume_step: int = 0) -> None:
        self.config = config
        self.run_dir = run_dir
        self.resume_step = resume_step
        self.policy_dtype = policy_dtype(config, has_gpus=torch.cuda.is_available())
        ranks = dict.fromkeys(["actor", "critic", "ref", *reward_roles(config)], 1)
        self.counts = RoleCounts(ranks, config.vllm.num_engines or 0)
        self.engine: VLLMEngine | None = None

    def __exit__(self, *raised: object) -> None:
        """End engines and the distributed runtime."""
        if self.engine is not None:
            self.engine.shutdown()
        shut_down()

    def start_group(self, role: str, worker_class: type) -> WorkerGroup:
        """Start the ranks of a role."""
        worker = worker_class(self.config, RankIdentity(role, 0, 1, self.run_dir))
        worker.setup()
        return WorkerGroup(worker)

    def start_engines(self) -> list[RolloutEngine]:
        """Start the vLLM engines; none when the policy generates itself."""
        if not self.counts.num_engines:
            return []
        if self.counts.num_engines > 1:
            raise ConfigError(
                f"--vllm_num_engines {self.counts.num_engines} without Ray: one process holds "
                "at most one engine. Use train_ppo_ray, or --vllm_num_engines 1."
            )
        config = engine_config(self.config, dtype=self.policy_dtype, resume_step=self.resume_step)
        self.engine = VLLMEngine(config)
        return [self.engine]

    def on_every_node(self, source: RewardSource) -> RewardSource:
        """Return a reward function with workers on every node of the run; any other source itself.

        Raise ConfigError for a node without the file.
        """
        return source

    def wait_until_up(self) -> None:
        """Wait for all processes; they start at the same time."""


class RayCluster(LocalCluster):
    """Groups and engines as actors on the connected cluster."""

    def __init__(self, config: PPOConfig, run_dir: str, resume_step: int = 0) -> None:
        self.config = config
        self.run_dir = run_dir
        self.resume_step = resume_step
        cluster = view_cluster()
        self.counts = role_counts(config, cluster)
        self.has_gpus = cluster.has_gpus
        self.policy_dtype = policy_dtype(config, has_gpus=self.has_gpus)
        self.groups: list[RayActorGroup] = []
        self.engines: list[RayEngine] = []
        self.rewards: RewardSource | None = None
        self.watch = Watch()
        # Phases take turns: one role at a time may use all cores. Engines and trainer, where both
        # run at once, share them.
        num_at_once = 2 if config.train.async_enable else 1
        self.slots = place(self.counts.demands, cluster, num_roles_at_once=num_at_once)

    def __exit__(self, *raised: object) -> None:
        """End all processes and give the places back; an error that came of ending one that did not
        get on is raised as that.
        """
        self.watch.close()
        if isinstance(self.rewards, NodePools):
            self.rewards.close()
        ranks = [handle for group in self.groups for handle in group.handles]
        for handle in [*ranks, *(engine.handle for engine in self.engines)]:
            ray.kill(handle)
        places = [slot.group for slots in self.slots.values() for slot in slots]
        for group in {group.id: group for group in places}.values():
            remove_placement_group(group)
        _, error, _ = raised
        if self.watch.failure is not None and isinstance(error, OpenRLHFError):
            raise self.watch.failure from error

    def start_group(self, role: str, worker_class: type) -> WorkerGroup:
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
        if self.counts.num_engines:
            config = engine_config(
                self.config,
                dtype=self.policy_dtype,
                weight_route=weight_route(self.config, self.counts),
                resume_step=self.resume_step,
                # The workers of an engine lie on devices that Ray placed; it places no CPU ones.
                executor="ray" if self.has_gpus else "mp",
            )
            self.engines = create_vllm_engines(config, self.slots["vllm"], run_dir=self.run_dir)
        return list(self.engines)

    def on_every_node(self, source: RewardSource) -> RewardSource:
        if isinstance(source, FunctionPool):
            places = [slot for slots in self.slots.values() for slot in slots]
            source = on_every_node(source, places)
        self.rewards = source
        return source

    def wait_until_up(self) -> None:
        with progress("starting workers", len(self.groups) + len(self.engines)) as advance:
            for group in self.groups:
                group.join()
                advance()
            for engine in self.engines:
                engine.ready()
                advance()
        limit_s = self.config.train.rank_timeout_s
        ranks = [
            Watched(group.who(rank), handle, limit_s, "--rank_timeout_s", has_bar=rank == 0)
            for group in self.groups
            for rank, handle in enumerate(group.handles)
        ]
        limit_s = self.config.vllm.timeout_s
        engines = [
            Watched(f"engine {engine.who}", engine.handle, limit_s, "--engine_timeout_s")
            for engine in self.engines
        ]
        self.watch.start([*ranks, *engines])


def weight_route(config: PPOConfig, counts: RoleCounts) -> WeightRoute:
    """Return how weights travel to the engines of this run: the fastest way that works.

    Two ranks of an NCCL group cannot share a GPU, so an engine that shares one with a rank of
    another place receives gloo's broadcast.
    """
    vllm, cluster = config.vllm, counts.cluster
    assert cluster is not None
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
    return VLLMEngineConfig(
        model=config.policy_path,
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
    facts = load_config(config.policy_path, trust_remote_code=config.trust_remote_code)
    return resolve_dtype(config.ds.param_dtype, facts, device_type="cuda" if has_gpus else "cpu")
