"""A reward function on a real Ray cluster of three nodes: a pool on each; a node is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

import pytest

pytestmark = pytest.mark.slow

REWARD_CODE = """
import os, time

def reward_func(queries, prompts, labels):
    time.sleep(0.1)
    return {"rewards": [1.0] * len(queries), "extra_logs": {"parent": float(os.getppid())}}
"""
# Runs in a process of its own: this one may be connected to another cluster.
SCENARIO = """
import json, sys, time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from openrlhf.errors import ConfigError
from openrlhf.rewards.base import RewardBatch
from openrlhf.rewards.workers import FunctionPool, PoolSettings
from openrlhf.trainer.ray import reward_nodes
from openrlhf.trainer.ray.cluster import RayCluster
from openrlhf.trainer.ray.watch import Watch

path = Path(sys.argv[1])
node = {"num_cpus": 2, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
others = [cluster.add_node(**node) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
group = placement_group([{"CPU": 1}] * 3, strategy="STRICT_SPREAD")
assert group.wait(30)
# As a run's cluster, without its models.
run = object.__new__(RayCluster)
run.slots = {"actor": [SimpleNamespace(group=group)]}
run.groups, run.engines, run.reward_actors, run.reward_pools = [], [], [], None
run.watch = Watch()
settings = PoolSettings(batch_size=2, num_workers=2, log_dir=path.parent / "logs")
pool = FunctionPool(path, settings)
told = {}


def parents(source, count):
    names = [str(k) for k in range(count)]
    result = source.submit(RewardBatch(names, names, names, [None] * count)).result()
    assert result.rewards == [1.0] * count
    return Counter(result.extra_logs["parent"])


code_digest, reward_nodes.code_digest = reward_nodes.code_digest, lambda path: "0" * 64
try:
    run.on_every_node(pool)
except ConfigError as error:
    told["other_file"] = str(error)
reward_nodes.code_digest = code_digest
for handle in run.reward_actors:
    ray.kill(handle)
run.reward_actors.clear()

source = run.on_every_node(pool)
parents(source, 12)  # starts the workers
told["shares"] = sorted(parents(source, 48).values())
start = time.monotonic()
cluster.remove_node(others[0])
told["after_loss"] = sorted(parents(source, 24).values())
told["loss_s"] = time.monotonic() - start
told["logs"] = sorted(p.parent.name[:4] for p in path.parent.glob("logs/*/reward-0.log"))
run.slots = {}
run.__exit__(None, None, None)
pool.close()
time.sleep(2)
told["left"] = [
    " ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)
    if "openrlhf.rewards.workers" in " ".join(p.cmdline())
]
print(json.dumps(told))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What happened in the cluster."""
    path = tmp_path_factory.mktemp("nodes") / "reward.py"
    path.write_text(REWARD_CODE)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_ADDRESS")}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # not the user's head
        result = subprocess.run(
            [sys.executable, "-c", SCENARIO, str(path)],
            capture_output=True,
            text=True,
            timeout=300,
            env=inherited | {"RAY_TMPDIR": folder},
        )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads([x for x in result.stdout.splitlines() if x.startswith("{")][-1])


def test_every_node_scores_a_share(told: dict) -> None:
    assert len(told["shares"]) == 3
    assert sum(told["shares"]) == 48 and min(told["shares"]) >= 10


def test_a_node_that_is_lost_loses_no_sample(told: dict) -> None:
    assert len(told["after_loss"]) == 2
    assert sum(told["after_loss"]) == 24
    assert told["loss_s"] < 60


def test_a_node_with_another_file_is_named(told: dict) -> None:
    assert "reward.py is another file on node" in told["other_file"]


def test_workers_print_to_a_folder_for_each_node_and_none_is_left(told: dict) -> None:
    assert told["logs"] == ["node", "node"]
    assert told["left"] == []
