"""A reward function on every node of a run: an actor on each holds a pool of worker processes.

A batch goes to the worker that has been free the longest. A run on one node has the pool of its
controller alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from openrlhf.errors import ConfigError, RewardError
from openrlhf.rewards.base import RewardBatch, RewardResult, RewardSource
from openrlhf.rewards.workers import LOAD_TIMEOUT_S, FunctionPool, PoolSettings
from openrlhf.trainer.ray.launcher import get, worker_environment
from openrlhf.trainer.ray.placement import Slot
from openrlhf.trainer.ray.utils import node_address
from openrlhf.utils.logging import notice, warn
from openrlhf.utils.user_code import code_digest

GRACE_S = 30.0  # over what a pool may take for a batch, until its node is called lost
HERE = "this node"


class PoolActor:
    """The pool of one node, in an actor."""

    def __init__(self, paths: Sequence[str], digest: str, settings: PoolSettings) -> None:
        """`paths` are places where the file may be on this node."""
        self.pool = FunctionPool(same_file(paths, digest), settings)

    async def address(self) -> str:
        """Return the address of the node, once the file is loaded."""
        return node_address()

    async def score(self, batch: RewardBatch) -> RewardResult | RewardError:
        """Score a batch; an error is a value, so that it is no failure of the actor."""
        try:
            return await self.pool.score(batch)
        except RewardError as error:
            return error


def same_file(paths: Sequence[str], digest: str) -> str:
    """Return the first of the paths that is the controller's file here; raises ConfigError."""
    there = [path for path in paths if Path(path).expanduser().is_file()]
    for path in there:
        if code_digest(path) == digest:
            return path
    what = f"{there[0]} is another file" if there else f"{paths[0]} is not there"
    raise ConfigError(
        f"{what} on node {node_address()} (looked in {os.getcwd()}). Keep it in a folder that all "
        'nodes share, or submit it: ray job submit --runtime-env-json \'{"working_dir": "."}\''
    )


class NodePools(RewardSource):
    """Pools of several nodes as one source: a batch waits for a free worker on any node, and goes
    to another node when its own is lost.
    """

    def __init__(self, pool: FunctionPool, actors: Mapping[str, Any], limit_s: float) -> None:
        """`pool` is that of this node, `actors` have the others, by address. After `limit_s` for
        one batch a node is called lost.
        """
        super().__init__(pool.path, pool.batch_size)
        self.pool = pool
        self.actors = dict(actors)
        self.limit_s = limit_s
        self._free: asyncio.Queue[str] = asyncio.Queue()  # the node of every free worker
        for _ in range(pool.settings.num_workers):
            for node in (HERE, *actors):
                self._free.put_nowait(node)

    async def release(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor)

    @property
    def has_room(self) -> bool:
        return not self._free.empty()

    async def score_part(self, batch: RewardBatch) -> RewardResult:
        while True:
            node = await self._free.get()
            try:
                if node == HERE:
                    return await self.pool.score(batch)
                if node in self.actors:  # else it was lost, and its places go one by one
                    return await self._score_on(node, batch)
            except (RayActorError, asyncio.TimeoutError) as error:
                if self.actors.pop(node, None) is not None:
                    warn(f"no reward functions on a lost node any more: {node}: {error}")
            finally:
                if node == HERE or node in self.actors:
                    self._free.put_nowait(node)

    async def _score_on(self, node: str, batch: RewardBatch) -> RewardResult:
        scoring = self.actors[node].score.remote(batch)
        result: RewardResult | RewardError = await asyncio.wait_for(scoring, self.limit_s)
        if isinstance(result, RewardError):
            raise result
        return result


def on_every_node(pool: FunctionPool, slots: Sequence[Slot]) -> FunctionPool | NodePools:
    """Return the pool joined with one like it on every other node that a run has places on; raises
    ConfigError for a node without the file.
    """
    own = ray.get_runtime_context().get_node_id()
    groups = {slot.group.id: slot.group for slot in slots}.values()
    tables = [placement_group_table(group)["bundles_to_node_id"] for group in groups]
    others = sorted({node for table in tables for node in table.values()} - {own})
    if not others:
        return pool
    settings = pool.settings
    log_dir = settings.log_dir.resolve() if settings.log_dir else None
    paths = list(dict.fromkeys([pool.path, str(Path(pool.path).expanduser().resolve())]))
    digest = code_digest(pool.path)
    handles = [
        ray.remote(PoolActor)
        .options(
            num_cpus=0,  # its workers compete with the run's own processes, as they do on one node
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            max_concurrency=settings.num_workers + 1,
            runtime_env={"env_vars": worker_environment(1)},
        )
        .remote(paths, digest, replace(settings, log_dir=log_dir and log_dir / f"node-{node[:8]}"))
        for node in others
    ]
    actors = {get(h.address.remote(), "reward workers", LOAD_TIMEOUT_S): h for h in handles}
    notice(f"reward function on {1 + len(actors)} nodes, {settings.num_workers} workers each")
    return NodePools(pool, actors, LOAD_TIMEOUT_S + settings.timeout_s + GRACE_S)
