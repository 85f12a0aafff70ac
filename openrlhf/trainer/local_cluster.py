"""The groups and engines of a run, and how they are started in this process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from openrlhf.config.generation import GenerationRunConfig
from openrlhf.distributed.collectives import shut_down
from openrlhf.engines.base import RolloutEngine
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.models.loading import load_config, policy_processor, resolve_dtype
from openrlhf.trainer.ppo_utils.demands import TRAINED_ROLES, ClusterView, RoleDemand
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.utils.tensors import dtype_name

MAX_NUM_SEQS = 256  # that a worker of an engine on a CPU samples at once: vLLM's own number
SEED_STRIDE = 1_000_003  # between the seeds of engines that start at one step and at the next


class Recovery(Protocol):
    """Starts new engines in place of lost ones: EngineRecovery, on Ray."""

    @property
    def num_losses(self) -> int:
        """Return the losses of the run that were made good, of engines and ranks."""

    def prepare(
        self,
        device_lock: AbstractContextManager[object],
        update: Callable[[Any], None],
        *,
        sleeps: bool = False,
    ) -> None:
        """Have `update` send weights to each new engine, and let it be used then. `device_lock` is
        held while an engine takes its devices; one that `sleeps` gives them to the trainer while it
        waits for weights.
        """

    def close(self) -> None:
        """End all engines; start none any more."""


@dataclass(frozen=True)
class Cluster:
    """The processes of a run, which wait for their models.

    Example: `Cluster(demands, None, torch.float32, {"actor": group}, engines=[])`
    """

    demands: Sequence[RoleDemand]  # of its models and engines
    view: ClusterView | None  # None: this process
    policy_dtype: torch.dtype
    groups: Mapping[str, WorkerGroup]  # by role
    engines: Sequence[RolloutEngine]  # none when the policy generates itself
    recovery: Recovery | None = None  # of engines in other processes

    @property
    def updates_side_by_side(self) -> bool:
        """Return True if policy and critic have GPUs of their own. Cores are shared."""
        pools = [demand.pool for demand in self.demands if demand.role in TRAINED_ROLES]
        return self.view is not None and self.view.has_gpus and len(set(pools)) > 1


@contextmanager
def local_cluster(
    config: GenerationRunConfig, classes: Mapping[str, type], *, run_dir: str, resume_step: int
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
            settings = engine_config(config, dtype=dtype, resume_step=resume_step)
            engines = [VLLMEngine(settings, policy_processor(config))]
            stack.callback(engines[0].shutdown)
        yield Cluster(local_demands(config, classes), None, dtype, groups, engines)


def local_demands(config: GenerationRunConfig, roles: Iterable[str]) -> list[RoleDemand]:
    """Return the demands of all roles of a run in this process, and of its engine."""
    engines = ["vllm"] * (config.vllm.num_engines or 0)
    return [RoleDemand(role, 1, "this process") for role in [*roles, *engines]]


def engine_config(
    config: GenerationRunConfig, *, dtype: torch.dtype, resume_step: int = 0, executor: str = "mp"
) -> dict[str, Any]:
    """Return vLLM's settings for this run, with the trainer's type of the policy.

    A run that goes on from a step draws other numbers than its beginning drew.
    """
    vllm, num_samples = config.vllm, config.rollout.n_samples_per_prompt
    return {
        "model": config.policy_path,
        "dtype": dtype_name(dtype),
        "max_model_len": config.total_len,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        # The samples of a prompt share its prefix through the cache.
        "enable_prefix_caching": vllm.enable_prefix_caching or num_samples > 1,
        "enforce_eager": vllm.enforce_eager,
        "enable_sleep_mode": config.engines_share_devices and vllm.enable_sleep,
        "seed": config.train.seed + SEED_STRIDE * resume_step,
        "trust_remote_code": config.trust_remote_code,
        "distributed_executor_backend": executor,
    }


def policy_dtype(config: GenerationRunConfig, *, has_gpus: bool) -> torch.dtype:
    """Return the type in which ranks hold the policy, which may be on other machines."""
    model_config = load_config(config.policy_path, trust_remote_code=config.trust_remote_code)
    return resolve_dtype(
        config.ds.param_dtype, model_config, device_type="cuda" if has_gpus else "cpu"
    )
