"""The GPUs that ranks, engines and their workers get on two nodes of three, as Ray gives them
out: the GPUs are only counted, the placement is the one of a run.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FLAT = list[list[str]]


@pytest.fixture(scope="module")
def placed() -> dict:
    unwanted = ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
    env = {k: v for k, v in os.environ.items() if k not in unwanted}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.fake_gpus"],
            env=env | {"RAY_TMPDIR": folder, "HOME": folder},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"said": done.stderr}


def nodes_of(workers: FLAT) -> set[str]:
    return {gpu.split("/")[0] for [gpu] in workers}


def test_each_rank_has_a_gpu_and_shares_it_with_the_rank_of_the_same_number(placed: dict) -> None:
    actors = [gpu for [gpu] in placed["shared"]["actor"]]
    assert len(set(actors)) == 6
    assert placed["shared"]["ref"] == placed["shared"]["actor"]
    nodes = [gpu.split("/")[0] for gpu in actors]  # ranks of a node are neighbours
    assert nodes == sorted(nodes, key=nodes.index)
    assert nodes.count(nodes[0]) == 3


@pytest.mark.parametrize("how", ["shared", "apart"])
def test_an_engines_gpus_are_on_one_node_where_the_nodes_have_room(placed: dict, how: str) -> None:
    first, second = placed[how]["workers"]
    assert [len(nodes_of(workers)) for workers in (first, second)] == [1, 1]
    assert len({gpu for [gpu] in first + second}) == 4
    assert placed[how]["vllm"] == [["all"], ["all"]]  # who leads workers sees every GPU
    if how == "apart":
        assert {gpu for [gpu] in placed[how]["actor"]}.isdisjoint(gpu for [gpu] in first + second)


def test_an_engine_that_no_node_has_room_for_is_named(placed: dict) -> None:
    [workers] = placed["too wide"]["workers"]
    assert len(nodes_of(workers)) == 2
    assert "1 of 1 have their 4 GPUs on several nodes" in placed["said"]
    assert placed["said"].count("on several nodes") == 1


def test_an_engine_of_a_lost_node_moves_to_a_new_one_as_a_whole(placed: dict) -> None:
    assert nodes_of(placed["again"]) == {"127.0.0.5"}
    assert len({gpu for [gpu] in placed["again"]}) == 2
