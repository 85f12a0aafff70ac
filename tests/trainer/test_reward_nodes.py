"""Pools of several nodes as one: the emptiest gets the next batch, a lost one gives its back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from openrlhf.errors import ConfigError
from openrlhf.rewards.base import RewardBatch, RewardResult
from openrlhf.rewards.workers import PoolSettings
from openrlhf.trainer.ray.reward_nodes import NodePools, same_file
from openrlhf.utils.user_code import code_digest


class Pool:
    """Returns its own number after a time; a lost one raises. The actor of a node, and its pool."""

    path, batch_size, settings = "f.py", 1, PoolSettings(num_workers=3)

    def __init__(self, number: float, seconds: float = 0.02) -> None:
        self.number = number
        self.seconds = seconds
        self.is_lost = False
        self.num_now = self.num_most = self.num_scored = 0

    async def score(self, batch: RewardBatch) -> RewardResult:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        await asyncio.sleep(self.seconds)
        self.num_now -= 1
        if self.is_lost:
            raise ActorDiedError
        self.num_scored += 1
        return RewardResult([self.number] * len(batch))


def batch_of(count: int) -> RewardBatch:
    names = [f"q{k}" for k in range(count)]
    return RewardBatch(names, names, names, ["good"] * count)


@pytest.fixture
def pools() -> list[Pool]:
    return [Pool(0.0), Pool(1.0)]


@pytest.fixture
def source(pools: list[Pool], monkeypatch: pytest.MonkeyPatch) -> Iterator[NodePools]:
    own, other = pools

    def remote(batch: RewardBatch) -> Awaitable[RewardResult]:
        return other.score(batch)

    monkeypatch.setattr("ray.kill", lambda handle: None)
    actor = SimpleNamespace(score=SimpleNamespace(remote=remote))
    with closing(NodePools(own, {"node 1": actor}, limit_s=5.0)) as source:  # type: ignore[arg-type]
        yield source


def test_every_node_works_and_none_has_more_than_its_workers(
    pools: list[Pool], source: NodePools
) -> None:
    result = source.submit(batch_of(24)).result()
    assert len(result.rewards) == 24
    assert [pool.num_scored for pool in pools] == pytest.approx([12, 12], abs=3)
    assert [pool.num_most for pool in pools] == [3, 3]


def test_the_work_of_a_lost_node_is_done_by_the_others(
    pools: list[Pool], source: NodePools
) -> None:
    pools[1].is_lost = True
    for _ in range(2):
        assert source.submit(batch_of(10)).result().rewards == [0.0] * 10
    assert pools[1].num_scored == 0


def test_a_node_that_hangs_is_lost(pools: list[Pool], source: NodePools) -> None:
    pools[1].seconds, source.limit_s = 1000, 0.2
    assert source.submit(batch_of(10)).result().rewards == [0.0] * 10


def test_a_node_has_the_same_file_or_says_which_one_it_lacks(tmp_path: Path) -> None:
    here, other = tmp_path / "reward.py", tmp_path / "old" / "reward.py"
    other.parent.mkdir()
    here.write_text("x = 1\n")
    other.write_text("x = 2\n")
    digest = code_digest(here)
    assert same_file([str(other), str(here)], digest) == str(here)
    with pytest.raises(ConfigError, match=r"old/reward\.py is another file on node \d"):
        same_file([str(other)], digest)
    with pytest.raises(ConfigError, match=r"gone\.py is not there on node \d.*working_dir"):
        same_file([str(tmp_path / "gone.py")], digest)
