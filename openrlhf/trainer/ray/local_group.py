"""The calls of a worker group answered in this very process: no Ray.

Started under torchrun or deepspeed, every process runs the same controller; each works on its own
share and the results are exchanged, so that all controllers see the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.backend import init_process_group, shut_down
from openrlhf.distributed.collectives import all_gather_object, broadcast_object
from openrlhf.distributed.topology import Topology
from openrlhf.engines.base import RolloutEngine
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.base import StreamingSource
from openrlhf.trainer.ppo_utils.samples_generator import ScoringStarter
from openrlhf.trainer.ppo_utils.scoring import Group, ScoredGroups, Scoring
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.cluster import RoleCounts, engine_config, policy_dtype, reward_roles
from openrlhf.trainer.ray.model_actor import RankIdentity
from openrlhf.utils.stopping import Interrupted

ROLES = ("actor", "critic", "ref")


class LocalGroup:
    """One rank of a model in this process; its peers are the other processes of the launch."""

    def __init__(self, worker: object, topology: Topology) -> None:
        self.worker = worker
        self.rank = topology.rank
        self.num_shares = topology.world_size

    def start(
        self, method: Callable[..., Any], shares: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        """Run `method` on this rank's share at once; the answer exchanges the results."""
        assert len(shares) == self.num_shares, "one piece of work a share"
        result = method(self.worker, *shares[self.rank])
        return lambda: all_gather_object(result)

    def call(self, method: Callable[..., Any], *args: object) -> list[Any]:
        """Run `method` with the same arguments on every rank."""
        return self.start(method, [args] * self.num_shares)()


class MainRankScorer:
    """Scores in the main process; the others take its answer, or its error.

    User code may answer differently from process to process, and all controllers must agree.
    """

    def __init__(self, scorer: ScoringStarter, topology: Topology) -> None:
        self.scorer = scorer
        self.is_main = topology.is_main

    def begin(self) -> Scoring:
        """See ScoringStarter."""
        return MainRankScoring(self.scorer.begin(), is_main=self.is_main)


class MainRankScoring:
    """The scoring of one step, done by one process for all; models are asked by all together."""

    def __init__(self, scoring: Scoring, *, is_main: bool) -> None:
        self.scoring = scoring
        self.is_main = is_main

    @property
    def is_streaming(self) -> bool:
        """See Scoring."""
        return self.scoring.is_streaming

    def add(self, group: Group) -> None:
        """See Scoring."""
        if self.is_main or not self.is_streaming:
            self.scoring.add(group)

    def finish(self) -> ScoredGroups:
        """See Scoring."""
        if not self.is_streaming:
            return self.scoring.finish()
        answer: ScoredGroups | RewardError = ScoredGroups([])
        if self.is_main:
            try:
                answer = self.scoring.finish()
            except RewardError as error:
                answer = error
        answer = broadcast_object(answer)
        if isinstance(answer, RewardError):
            raise answer
        return answer


class LocalCluster:
    """Starts workers in this process; the policy generates itself."""

    def __init__(self, config: PPOConfig, run_dir: str, topology: Topology) -> None:
        self.config = config
        self.run_dir = run_dir
        self.topology = topology
        self.engines: list[RolloutEngine] = []
        self.resume_step = 0
        self.is_main = topology.is_main
        self.policy_dtype = policy_dtype(config, has_gpus=torch.cuda.is_available())
        ranks = dict.fromkeys([*ROLES, *reward_roles(config)], topology.world_size)
        self.counts = RoleCounts(ranks, config.vllm.num_engines or 0)

    def __enter__(self) -> LocalCluster:
        # All agree on what to go on from before they load it.
        init_process_group(self.topology, rank_timeout_s=self.config.train.rank_timeout_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End engines; leave the world together, unless a peer may be waiting elsewhere."""
        for engine in self.engines:
            engine.shutdown()
        if kind is None or issubclass(kind, Interrupted):
            shut_down()

    def start_group(self, role: str, worker_class: type) -> WorkerGroup:
        """This rank of a role."""
        identity = RankIdentity(role, self.topology.rank, self.topology.world_size, self.run_dir)
        worker = worker_class(self.config, identity)
        worker.setup()
        return LocalGroup(worker, self.topology)

    def start_engines(self) -> list[RolloutEngine]:
        """One engine in this process when --vllm_num_engines asks for it, else none: the policy
        generates itself.
        """
        if not self.config.vllm.num_engines:
            return []
        if self.topology.world_size > 1 or self.config.vllm.num_engines > 1:
            raise ConfigError(
                f"--vllm_num_engines {self.config.vllm.num_engines} without Ray on "
                f"{self.topology.world_size} process(es): only a single process can hold an "
                "engine, and at most one. Use train_ppo_ray, or --vllm_num_engines 0."
            )
        config = engine_config(self.config, dtype=self.policy_dtype, resume_step=self.resume_step)
        self.engines.append(VLLMEngine(config))
        return list(self.engines)

    def on_every_node(self, source: StreamingSource) -> StreamingSource:
        """The source itself: a process scores where it is."""
        return source

    def shared(self, scorer: ScoringStarter) -> ScoringStarter:
        """A scorer whose answer is the same for all controllers."""
        return MainRankScorer(scorer, self.topology) if self.topology.world_size > 1 else scorer

    def wait_until_up(self) -> None:
        """Nothing to wait for: all of it is this process."""
