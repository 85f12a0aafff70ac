"""Every role of an RL run in this very process: one rank each, no Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.backend import shut_down
from openrlhf.engines.base import RolloutEngine
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.errors import ConfigError
from openrlhf.rewards.base import RewardSource
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.cluster import RoleCounts, engine_config, policy_dtype, reward_roles
from openrlhf.trainer.ray.model_actor import RankIdentity

ROLES = ("actor", "critic", "ref")


class LocalGroup:
    """The one rank of a model, in this process."""

    num_shares = 1

    def __init__(self, worker: object) -> None:
        self.worker = worker

    def start(
        self, method: Callable[..., Any], shares: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        """Run `method` at once."""
        [share] = shares
        results = [method(self.worker, *share)]
        return lambda: results

    def call(self, method: Callable[..., Any], *args: object) -> list[Any]:
        """Run `method` with these arguments."""
        return [method(self.worker, *args)]


class LocalCluster:
    """Starts workers in this process; the policy generates itself."""

    def __init__(self, config: PPOConfig, run_dir: str) -> None:
        self.config = config
        self.run_dir = run_dir
        self.engines: list[RolloutEngine] = []
        self.resume_step = 0
        self.policy_dtype = policy_dtype(config, has_gpus=torch.cuda.is_available())
        ranks = dict.fromkeys([*ROLES, *reward_roles(config)], 1)
        self.counts = RoleCounts(ranks, config.vllm.num_engines or 0)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *error: object) -> None:
        """End engines and the distributed runtime."""
        for engine in self.engines:
            engine.shutdown()
        shut_down()

    def start_group(self, role: str, worker_class: type) -> WorkerGroup:
        """Set up the one rank of a role."""
        worker = worker_class(self.config, RankIdentity(role, 0, 1, self.run_dir))
        worker.setup()
        return LocalGroup(worker)

    def start_engines(self) -> list[RolloutEngine]:
        """Start one engine if --vllm_num_engines asks for it, else none: the policy generates."""
        if not self.config.vllm.num_engines:
            return []
        if self.config.vllm.num_engines > 1:
            raise ConfigError(
                f"--vllm_num_engines {self.config.vllm.num_engines} without Ray: one process holds "
                "at most one engine. Use train_ppo_ray, or --vllm_num_engines 1."
            )
        config = engine_config(self.config, dtype=self.policy_dtype, resume_step=self.resume_step)
        self.engines.append(VLLMEngine(config))
        return list(self.engines)

    def on_every_node(self, source: RewardSource) -> RewardSource:
        """Return the source itself: there is one node."""
        return source

    def wait_until_up(self) -> None:
        """Return at once: all of it is this process."""
