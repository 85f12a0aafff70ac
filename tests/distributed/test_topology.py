"""The world is divided once, by arithmetic anyone can check by hand."""

from __future__ import annotations

import pytest

from openrlhf.distributed.topology import Topology
from openrlhf.errors import ConfigError


def test_a_process_without_a_launcher_is_a_world_of_one():
    topology = Topology.from_env(env={})
    assert (topology.world_size, topology.rank, topology.dp_size, topology.dp_rank) == (1, 0, 1, 0)
    assert topology.is_main


def test_eight_ranks_are_two_by_two_by_two():
    places = []
    for rank in range(8):
        topology = Topology(world_size=8, rank=rank, cp_size=2, tp_size=2)
        places.append((topology.dp_rank, topology.cp_rank, topology.tp_rank))
    assert places == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1),
        (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
    assert topology.dp_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.cp_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_a_world_that_cannot_be_divided_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"6 ranks .*multiple of 4"):
        Topology(world_size=6, cp_size=2, tp_size=2)
