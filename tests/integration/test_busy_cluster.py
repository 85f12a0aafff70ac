"""Demand against a real cluster: too small is said at once, busy at a deadline, freed is taken."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.integration.heads import running_head

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


def test_a_busy_cluster_is_waited_for_until_the_deadline_and_a_small_one_not() -> None:
    with running_head("--num-cpus", "4", "--num-gpus", "2", has_dashboard=False) as head:
        result = subprocess.run(
            [sys.executable, "-c", SCENARIO, head.address],
            capture_output=True,
            text=True,
            timeout=120,
            env=head.environment(),
        )
    assert result.returncode == 0, result.stderr[-3000:]
    outcome = json.loads(result.stdout.splitlines()[-1])
    too_large, busy, freed = (outcome[name] for name in ("too_large", "busy", "freed"))
    assert too_large["s"] < 1.0 and too_large["code"] == 2
    assert "need 3 x GPU, have 2" in too_large["error"]
    assert 3.0 <= busy["s"] < 5.0 and busy["code"] == 2
    assert "need 2 x GPU, have 2, held by others 1" in busy["error"]
    assert freed["roles"] == ["actor", "vllm"] and 1.0 < freed["s"] < 10.0
