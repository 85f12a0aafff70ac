"""Pools of several nodes as one: the emptiest gets the next batch, a lost one gives its back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from openrlhf.errors import ConfigError, EngineError, RewardError
from openrlhf.rewards.base import RewardBatch, RewardResult
from openrlhf.rewards.process_pool import PoolSettings
from openrlhf.trainer.ray.reward_nodes import NodePools, same_file
from openrlhf.utils.user_code import code_digest


class Pool:
    """Answers with its own number after a time; a lost one raises."""

    def __init__(self, number: float, seconds: float = 0.0) -> None:
        self.number = number
        self.seconds = seconds
        self.is_lost = False
        self.num_now = self.num_most = self.num_scored = 0
        self.lock = threading.Lock()

    def score(self, batch: RewardBatch) -> RewardResult:
        with self.lock:
            self.num_now += 1
            self.num_most = max(self.num_most, self.num_now)
        time.sleep(self.seconds)
        with self.lock:
            self.num_now -= 1
            self.num_scored += not self.is_lost
        if self.is_lost:
            raise EngineError(f"node {self.number} died")
        if batch.labels[0] == "bad":
            raise RewardError("cannot score this")
        return RewardResult(torch.full((len(batch),), self.number))


def batch_of(count: int, label: str = "good") -> RewardBatch:
    names = [f"q{k}" for k in range(count)]
    return RewardBatch(names, names, names, [label] * count)


@pytest.fixture
def pools() -> list[Pool]:
    return [Pool(0.0, 0.02), Pool(1.0, 0.02)]


@pytest.fixture
def source(pools: list[Pool]) -> Iterator[NodePools]:
    settings = PoolSettings(batch_size=1, num_workers=3)
    with closing(NodePools(pools, settings, "f.py")) as source:
        yield source


def test_every_node_works_and_none_has_more_than_its_workers(
    pools: list[Pool], source: NodePools
) -> None:
    result = source.score(batch_of(24))
    assert len(result.rewards) == 24
    assert [pool.num_scored for pool in pools] == pytest.approx([12, 12], abs=3)
    assert [pool.num_most for pool in pools] == [3, 3]


def test_a_slow_node_gets_less(pools: list[Pool], source: NodePools) -> None:
    pools[0].seconds = 0.2
    source.score(batch_of(40))
    assert pools[0].num_scored < pools[1].num_scored / 2


def test_the_emptier_node_gets_the_next_batch(pools: list[Pool], source: NodePools) -> None:
    pools[0].seconds = 0.3
    first = source.submit(batch_of(1))  # to either
    others = [source.submit(batch_of(1)) for _ in range(5)]
    time.sleep(0.1)
    last = source.submit(batch_of(1))
    assert last.result(1).rewards.tolist() == [1.0]
    assert sorted({float(f.result(2).rewards[0]) for f in (first, *others)}) == [0.0, 1.0]


def test_the_work_of_a_lost_node_is_done_by_the_others(
    pools: list[Pool], source: NodePools
) -> None:
    pools[0].is_lost = True
    assert source.score(batch_of(10)).rewards.tolist() == [1.0] * 10
    assert source.score(batch_of(10)).rewards.tolist() == [1.0] * 10
    assert pools[0].num_scored == 0


def test_without_a_node_left_it_is_a_reward_error(pools: list[Pool], source: NodePools) -> None:
    for pool in pools:
        pool.is_lost = True
    with pytest.raises(RewardError, match=r"f\.py: node \d.0 died"):
        source.score(batch_of(10))


def test_a_batch_that_cannot_be_scored_is_no_lost_node(source: NodePools) -> None:
    with pytest.raises(RewardError, match="cannot score this"):
        source.score(batch_of(1, "bad"))
    assert len(source.score(batch_of(8)).rewards) == 8


def test_what_waits_when_it_is_closed_fails(pools: list[Pool], source: NodePools) -> None:
    pools[0].seconds = pools[1].seconds = 0.2
    future = source.submit(batch_of(20))
    source.close()
    with pytest.raises(RewardError, match="were closed"):
        future.result(5)
    with pytest.raises(RewardError, match="were closed"):
        source.submit(batch_of(1))


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
