"""Demand against a real cluster: too small is said at once, busy at a deadline, freed is taken."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.commands import argv
from tests.integration.heads import Head, running_head

# Runs in a process of its own: this one may be connected to another cluster.
SCENARIO = """
import json, sys, threading, time

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from openrlhf.errors import ConfigError
from openrlhf.trainer.ray.placement import RoleDemand, place, view_cluster

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
cluster = view_cluster()
demands = [RoleDemand("actor", 1, "actor"), RoleDemand("vllm", 1, "vllm")]
other_job = placement_group([{"GPU": 1, "CPU": 1}])
assert other_job.wait(10)


def timed_place(demands, deadline_s):
    start = time.monotonic()
    try:
        slots = place(demands, cluster, deadline_s=deadline_s)
    except ConfigError as error:
        return {"error": str(error), "code": error.exit_code, "s": time.monotonic() - start}
    return {"roles": sorted(slots), "s": time.monotonic() - start}


too_large = timed_place([RoleDemand("actor", 3, "actor")], 20.0)
busy = timed_place(demands, 3.0)
threading.Timer(1.5, remove_placement_group, [other_job]).start()
freed = timed_place(demands, 20.0)
print(json.dumps({"too_large": too_large, "busy": busy, "freed": freed}))
"""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A cluster that believes to have two GPUs."""
    with running_head("--num-cpus", "4", "--num-gpus", "2", has_dashboard=False) as head:
        yield head


@pytest.fixture(scope="module")
def outcome(head: Head) -> dict:
    """What happened to two jobs that came while another one ran."""
    result = subprocess.run(
        [sys.executable, "-c", SCENARIO, head.address],
        capture_output=True,
        text=True,
        timeout=120,
        env=head.environment(),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_a_demand_larger_than_the_cluster_is_a_table_and_exit_code_2(
    head: Head, tiny_model_dir: Path, prompt_file: Path, reward_file: Path, tmp_path: Path
) -> None:
    words = argv(
        "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2",
        pretrain=tiny_model_dir,
        prompt_data=prompt_file,
        remote_rm_url=reward_file,
        label_key="answer",
        actor_num_gpus_per_node="3",
        vllm_num_engines="1",
        save_path=tmp_path / "run",
    )
    result = subprocess.run(
        [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=head.environment() | {"RAY_ADDRESS": head.address},
    )
    assert result.returncode == 2, result.stderr[-3000:]
    assert "Traceback" not in result.stderr
    assert "need 4 x GPU, have 2" in result.stderr


def test_a_demand_larger_than_the_cluster_is_not_waited_for(outcome: dict) -> None:
    assert outcome["too_large"]["s"] < 1.0
    assert outcome["too_large"]["code"] == 2
    assert "need 3 x GPU, have 2" in outcome["too_large"]["error"]


def test_a_busy_cluster_is_waited_for_until_the_deadline_and_then_a_table(outcome: dict) -> None:
    busy = outcome["busy"]
    assert 3.0 <= busy["s"] < 5.0
    assert busy["code"] == 2
    assert "need 2 x GPU, have 2, held by others 1" in busy["error"]


def test_a_cluster_that_frees_up_meanwhile_is_taken(outcome: dict) -> None:
    assert outcome["freed"]["roles"] == ["actor", "vllm"]
    assert 1.0 < outcome["freed"]["s"] < 10.0
