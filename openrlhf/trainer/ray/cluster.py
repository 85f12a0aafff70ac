"""The groups and engines of a run: started in this process or in their places on a Ray cluster, and
who of them holds device memory in which phase.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.util.placement_group import remove_placement_group

from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.collectives import shut_down
from openrlhf.engines.base import RolloutEngine
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.models.loading import load_config, resolve_dtype
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.launcher import RayActorGroup, ray_session
from openrlhf.trainer.ray.model_actor import TrainedWorker
from openrlhf.trainer.ray.placement import (
    ClusterView,
    RoleDemand,
    place,
    role_demands,
    view_cluster,
)
from openrlhf.trainer.ray.vllm_engine import RayEngine, create_vllm_engines
from openrlhf.trainer.ray.watch import Watch, Watched
from openrlhf.utils.progress import progress

MAX_NUM_SEQS = 256  # that an engine samples at once
SEED_STRIDE = 1_000_003  # between the seeds of engines that start at one step and at the next


@dataclass(frozen=True)
class Cluster:
    """The processes of a run, which wait for their models."""

    demands: Sequence[RoleDemand]  # of its models and engines
    view: ClusterView | None  # None: this process
    policy_dtype: torch.dtype
    groups: Mapping[str, WorkerGroup]  # by role
    engines: Sequence[RolloutEngine]  # none when the policy generates itself


@contextmanager
def local_cluster(
    config: PPOConfig, classes: Mapping[str, type], *, run_dir: str, resume_step: int
) -> Iterator[Cluster]:
    """Start one rank of every role and at most one engine in this process; end them at last."""
    dtype = policy_dtype(config, has_gpus=torch.cuda.is_available())
    with ExitStack() as stack:
        stack.callback(shut_down)
        groups, engines = {}, []
        for role, kind in classes.items():
            worker = kind(config, role, run_dir)
            worker.setup()
            groups[role] = WorkerGroup(worker)
        if config.vllm.num_engines:
            engines = [VLLMEngine(engine_config(config, dtype=dtype, resume_step=resume_step))]
            stack.callback(engines[0].shutdown)
        yield Cluster(local_demands(config, classes), None, dtype, groups, engines)


def local_demands(config: PPOConfig, roles: Iterable[str]) -> list[RoleDemand]:
    """Return what the roles of a run in this process need, and its engine."""
    engines = ["vllm"] * (config.vllm.num_engines or 0)
    return [RoleDemand(role, 1, "this process") for role in [*roles, *engines]]


@contextmanager
def ray_cluster(
    config: PPOConfig, classes: Mapping[str, type], *, run_dir: str, resume_step: int
) -> Iterator[Cluster]:
    """Start groups and engines as actors on the Ray cluster; end them at last, and give their
    places back.
    """
    with ray_session(), ExitStack() as stack:
        view = view_cluster()
        demands = role_demands(config, view)
        dtype = policy_dtype(config, has_gpus=view.has_gpus)
        # Phases take turns: one role at a time may use all cores. Engines and trainer, where both
        # run at once, share them.
        num_at_once = 2 if config.train.async_enable else 1
        slots, place_groups = place(demands, view, num_roles_at_once=num_at_once)
        for place_group in place_groups:
            stack.callback(remove_placement_group, place_group)
        groups = {
            role: RayActorGroup(kind, config, slots[role], role=role, run_dir=run_dir)
            for role, kind in classes.items()
        }
        engines = []
        if "vllm" in slots:
            # The workers of an engine lie on devices that Ray placed; it places no CPU ones.
            executor = "ray" if view.has_gpus else "mp"
            settings = engine_config(
                config, dtype=dtype, resume_step=resume_step, executor=executor
            )
            engines = create_vllm_engines(settings, slots["vllm"], run_dir=run_dir)
        handles = [handle for group in groups.values() for handle in group.handles]
        for handle in [*handles, *(engine.handle for engine in engines)]:
            stack.callback(ray.kill, handle)
        with progress("starting workers", len(groups) + len(engines)) as advance:
            for group in groups.values():
                group.join()
                advance()
            for engine in engines:
                engine.ready()
                advance()
        stack.enter_context(Watch(_watched(config, groups.values(), engines)))
        yield Cluster(demands, view, dtype, groups, engines)


def _watched(
    config: PPOConfig, groups: Iterable[RayActorGroup], engines: Iterable[RayEngine]
) -> Iterator[Watched]:
    limit_s, engine_limit_s = config.train.rank_timeout_s, config.vllm.timeout_s
    for group in groups:
        for rank, handle in enumerate(group.handles):
            yield Watched(group.who(rank), handle, limit_s, "--rank_timeout_s", has_bar=rank == 0)
    for engine in engines:
        who = f"engine {engine.who}"
        yield Watched(who, engine.handle, engine_limit_s, "--engine_timeout_s")


def engine_config(
    config: PPOConfig, *, dtype: torch.dtype, resume_step: int = 0, executor: str = "mp"
) -> dict[str, Any]:
    """Return vLLM's settings for this run, with the trainer's type of the policy.

    A run that goes on from a step draws other numbers than its beginning drew.
    """
    vllm, data, num_samples = config.vllm, config.data, config.rollout.n_samples_per_prompt
    return {
        "model": config.policy_path,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": data.max_len or data.prompt_max_len + config.rollout.max_new_tokens,
        "max_num_seqs": MAX_NUM_SEQS,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        # The samples of a prompt share its prefix through the cache.
        "enable_prefix_caching": vllm.enable_prefix_caching or num_samples > 1,
        "enforce_eager": vllm.enforce_eager,
        "enable_sleep_mode": vllm.enable_sleep and config.engines_share_devices,
        "seed": config.train.seed + SEED_STRIDE * resume_step,
        "trust_remote_code": config.trust_remote_code,
        "distributed_executor_backend": executor,
    }


def policy_dtype(config: PPOConfig, *, has_gpus: bool) -> torch.dtype:
    """Return the type in which ranks hold the policy, which may be on other machines."""
    facts = load_config(config.policy_path, trust_remote_code=config.trust_remote_code)
    return resolve_dtype(config.ds.param_dtype, facts, device_type="cuda" if has_gpus else "cpu")


class DevicePhases:
    """Holders of device memory by phase: wakes and sleeps engines and training states around
    rollout, update and sync.

    A sleeping engine forgets its weights: they are sent anew before it is used again. Without sleep
    flags every phase is entered and left for free.
    """

    def __init__(
        self,
        engines: Iterable[RolloutEngine],
        *,
        engines_sleep: bool,
        training_sleeps: bool,
        turn: AbstractContextManager[object] | None = None,
    ) -> None:
        """`turn`: held while training or a sync has the devices, by whoever else computes there
        too.
        """
        self.turn = nullcontext() if turn is None else turn
        self.engines = list(engines) if engines_sleep else []
        self.training_sleeps = training_sleeps
        self.awake: set[str] = {"weights", "kv_cache"}

    @property
    def needs_weights(self) -> bool:
        """Return True if the engines hold no weights and wait for a sync."""
        return "weights" not in self.awake

    def put_away(self, group: WorkerGroup) -> None:
        """Move the group's training states off the device until its update."""
        if self.training_sleeps:
            group.call(TrainedWorker.offload_states)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Wake the engines wholly; they stay awake until training needs the memory."""
        assert not self.needs_weights, "engines were put to sleep and got no weights since"
        self._wake("kv_cache")
        yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Have the engines sleep inside."""
        with self.turn:
            self.sleep()
            yield

    @contextmanager
    def update(self, group: WorkerGroup) -> Iterator[None]:
        """Hold the group's training states on the device inside."""
        if self.training_sleeps:
            group.call(TrainedWorker.reload_states)
        try:
            yield
        finally:
            self.put_away(group)

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Give the engines room for their weights inside."""
        with self.turn:
            self._wake("weights")
            yield

    def _wake(self, tag: str) -> None:
        if tag not in self.awake:
            self._on_all(VLLMEngine.wake_up, tag)
            self.awake.add(tag)

    def sleep(self) -> None:
        """Put the engines to sleep; at first before any model is loaded."""
        if self.engines and self.awake:
            self._on_all(VLLMEngine.sleep)
            self.awake.clear()

    def _on_all(self, method: Callable[..., None], *args: object) -> None:
        """Make the call on all engines at once: each may take a second."""
        with ThreadPoolExecutor(max_workers=max(len(self.engines), 1)) as pool:
            list(pool.map(lambda engine: engine.call(method, *args), self.engines))
