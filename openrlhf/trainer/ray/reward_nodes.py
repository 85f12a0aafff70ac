"""A reward function on every node of a run: an actor on each holds a pool of worker processes.

Batches go to the node with the most room. A run on one node has the pool of its controller alone.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from openrlhf.errors import ConfigError, EngineError, RewardError
from openrlhf.rewards.base import RewardBatch, RewardResult, handed_to, joined
from openrlhf.rewards.process_pool import FunctionPool, PoolSettings
from openrlhf.rewards.worker_process import LOAD_TIMEOUT_S
from openrlhf.trainer.ray.launcher import get, worker_environment
from openrlhf.trainer.ray.placement import Slot
from openrlhf.trainer.ray.utils import node_address
from openrlhf.utils.logging import warn
from openrlhf.utils.user_code import code_digest

GRACE_S = 30.0  # over what a pool may take for a batch, until its node is called lost


class PoolActor:
    """The pool of one node, in an actor."""

    def __init__(
        self, paths: Sequence[str], digest: str, settings: PoolSettings, log_dir: str | None
    ) -> None:
        """`paths` are places where the file may be here; raises ConfigError when it is at none of
        them, or is another file than the controller's.
        """
        path = same_file(paths, digest)
        settings = replace(settings, log_dir=Path(log_dir) if log_dir else None)
        self.pool = FunctionPool(path, settings)

    def address(self) -> str:
        """Of the node, once the file is loaded."""
        return node_address()

    def score(self, batch: RewardBatch) -> RewardResult:
        """See RewardSource."""
        return self.pool.score(batch)


def same_file(paths: Sequence[str], digest: str) -> str:
    """The first of the paths that is the controller's file here as well; raises ConfigError."""
    there = [path for path in paths if Path(path).expanduser().is_file()]
    for path in there:
        if code_digest(path) == digest:
            return path
    where = node_address()
    if there:
        raise ConfigError(
            f"{there[0]} is another file on node {where} than where the run was started. "
            "Copy it there, or keep it in a folder that all nodes share."
        )
    raise ConfigError(
        f"{paths[0]} is not there on node {where} (looked in {os.getcwd()}). Keep it in a folder "
        "that all nodes share, or submit it: ray job submit --runtime-env-json "
        '\'{"working_dir": "."}\''
    )


class ScoresParts(Protocol):
    """Whatever scores a batch on a node, and waits for it."""

    def score(self, batch: RewardBatch) -> RewardResult:
        """See RewardSource; raises EngineError when the node is lost."""


@dataclass(frozen=True)
class RemotePool:
    """The pool of another node, seen from the controller."""

    handle: Any
    name: str
    timeout_s: float

    def score(self, batch: RewardBatch) -> RewardResult:
        """See ScoresParts."""
        reference = self.handle.score.remote(batch)
        result: RewardResult = get(reference, self.name, self.timeout_s)
        return result


@dataclass(eq=False)
class _Node:
    pool: ScoresParts
    num_slots: int
    threads: ThreadPoolExecutor
    num_running: int = 0
    is_lost: bool = False

    @property
    def load(self) -> float:
        return self.num_running / self.num_slots


@dataclass(frozen=True)
class _Job:
    batch: RewardBatch
    future: Future[RewardResult] = field(default_factory=Future)


class NodePools:
    """Pools of several nodes as one source; see StreamingSource. A batch waits here until a node
    has room for it, and goes to another node when its own is lost.
    """

    def __init__(self, pools: Sequence[ScoresParts], settings: PoolSettings, path: str) -> None:
        self.path = path
        self.settings = settings
        slots = settings.num_workers
        self._nodes = [_Node(pool, slots, ThreadPoolExecutor(slots, "reward")) for pool in pools]
        self._lock = threading.RLock()  # what is done with a result may submit again
        self._waiting: deque[_Job] = deque()
        self._is_closed = False

    @property
    def has_room(self) -> bool:
        """See SaysRoom."""
        with self._lock:
            return any(not n.is_lost and n.num_running < n.num_slots for n in self._nodes)

    def score(self, batch: RewardBatch) -> RewardResult:
        """See RewardSource."""
        return self.submit(batch).result()

    def submit(self, batch: RewardBatch) -> Future[RewardResult]:
        """See StreamingSource."""
        jobs = [_Job(part) for part in batch.parts(self.settings.batch_size)]
        with self._lock:
            if self._is_closed:
                raise RewardError(f"{self.path}: the pools of workers were closed")
            self._waiting += jobs
            self._hand_out()
        return joined([job.future for job in jobs], source=self.path)

    def close(self) -> None:
        """Give up what waits; what runs ends with the pools, which belong to others."""
        with self._lock:
            self._is_closed = True
            self._give_up(RewardError(f"{self.path}: the pools of workers were closed"))
        for node in self._nodes:
            node.threads.shutdown(wait=False)

    def _hand_out(self) -> None:
        """Give waiting jobs to nodes with room, the emptiest first; called under the lock."""
        while self._waiting:
            nodes = [n for n in self._nodes if not n.is_lost and n.num_running < n.num_slots]
            if not nodes:
                return
            node = min(nodes, key=lambda n: n.load)
            node.num_running += 1
            node.threads.submit(self._run, node, self._waiting.popleft())

    def _run(self, node: _Node, job: _Job) -> None:
        lost: EngineError | None = None
        with handed_to(job.future):
            try:
                job.future.set_result(node.pool.score(job.batch))
            except EngineError as error:
                lost = error
        with self._lock:
            node.num_running -= 1
            if lost is not None:
                self._lose(node, job, lost)
            if not self._is_closed:
                self._hand_out()

    def _lose(self, node: _Node, job: _Job, error: EngineError) -> None:
        """Leave a node out from now on; its jobs go to the others, or fail with the last node."""
        if not node.is_lost:
            warn(f"no reward functions on a lost node any more: {error}")
        node.is_lost = True
        self._waiting.appendleft(job)
        if self._is_closed or all(n.is_lost for n in self._nodes):
            self._give_up(RewardError(f"{self.path}: {error}"))

    def _give_up(self, error: RewardError) -> None:
        while self._waiting:
            self._waiting.popleft().future.set_exception(error)


def run_nodes(slots: Sequence[Slot]) -> list[str]:
    """Ids of the nodes that a run has places on, the controller's own first."""
    own = ray.get_runtime_context().get_node_id()
    groups = {slot.group.id: slot.group for slot in slots}.values()
    tables = [placement_group_table(group)["bundles_to_node_id"] for group in groups]
    placed = {node for table in tables for node in table.values()}
    return [own, *sorted(placed - {own})]


def start_pool_actors(pool: FunctionPool, nodes: Sequence[str]) -> list[Any]:
    """An actor with a pool like this one on each of the nodes, none of which has to be up yet."""
    settings = pool.settings
    log_dir = str(settings.log_dir.resolve()) if settings.log_dir else None
    paths = list(dict.fromkeys([pool.path, str(Path(pool.path).expanduser().resolve())]))
    return [
        ray.remote(PoolActor)
        .options(
            num_cpus=0,  # its workers compete with the run's own processes, as they do on one node
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            max_concurrency=settings.num_workers + 1,
            runtime_env={"env_vars": worker_environment(1)},
        )
        .remote(paths, code_digest(pool.path), settings, log_dir and f"{log_dir}/node-{node[:8]}")
        for node in nodes
    ]


def spread(pool: FunctionPool, handles: Sequence[Any]) -> NodePools:
    """The local pool and those of the actors as one; raises ConfigError for a node without the
    file.
    """
    addresses = [get(h.address.remote(), "reward workers", LOAD_TIMEOUT_S) for h in handles]
    limit_s = LOAD_TIMEOUT_S + pool.settings.limits.timeout_s + GRACE_S
    others = [
        RemotePool(handle, f"reward workers on node {address}", limit_s)
        for handle, address in zip(handles, addresses, strict=True)
    ]
    return NodePools([pool, *others], pool.settings, pool.path)
