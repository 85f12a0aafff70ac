"""The world is divided once, by arithmetic anyone can check by hand."""

import pytest

from openrlhf.distributed.topology import Topology
from openrlhf.errors import ConfigError


def test_a_process_without_a_launcher_is_a_world_of_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    topology = Topology.from_env()
    assert (topology.world_size, topology.rank, topology.dp_size, topology.dp_rank) == (1, 0, 1, 0)
    assert topology.is_main


def test_ranks_that_share_weights_or_rows_read_the_same_data():
    places = [Topology(world_size=8, rank=rank, cp_size=2, tp_size=2) for rank in range(8)]
    assert [place.dp_rank for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert places[5].shard("abcde") == ["b", "d"]


def test_a_world_that_cannot_be_divided_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"6 ranks .*multiple of 4"):
        Topology(world_size=6, cp_size=2, tp_size=2)
