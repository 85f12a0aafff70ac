"""Ranks on a real Ray cluster of two nodes of different size, with addresses of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import argv

pytestmark = pytest.mark.slow

# Runs in a process of its own: this one may be connected to another cluster.
SCENARIO = """
import json, os, sys

import ray
from ray.cluster_utils import Cluster

from openrlhf.errors import ConfigError
from openrlhf.trainer.ray import utils
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.model_actor import ModelWorker
from openrlhf.trainer.ray.placement import RoleDemand, place, view_cluster


class Rank(ModelWorker):
    def __init__(self, config, identity):
        if config == "GPUs as torch would use them":
            utils.check_torch_uses = lambda *_: None
        super().__init__(config, identity)

    def setup(self):
        pass

    def told(self):
        node = ray.get_runtime_context().get_node_id()
        return dict(os.environ) | {"node": node, "gpu": ray.get_gpu_ids()[0]}


node = {"object_store_memory": 80_000_000}
large = node | {"num_cpus": 8, "num_gpus": 2, "include_dashboard": False}
cluster = Cluster(
    initialize_head=True, head_node_args=large | {"node_ip_address": "127.0.0.2"}
)
cluster.add_node(**node, num_cpus=3, num_gpus=1, node_ip_address="127.0.0.3")
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
slots = place([RoleDemand("actor", 3, "actor")], view_cluster())["actor"]
told = {"address_of": {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}}
try:
    RayActorGroup(Rank, ("as they are",), slots, role="actor", run_dir=sys.argv[1]).join()
except ConfigError as error:
    told["error"] = str(error)
shared = ("GPUs as torch would use them",)
group = RayActorGroup(Rank, shared, slots, role="ref", run_dir=sys.argv[1])
group.join()
told["ranks"] = group.call(Rank.told)
print(json.dumps(told))
ray.shutdown()
cluster.shutdown()
"""
CALLER = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run_in_cluster(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program that starts a cluster of its own; it must end well."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_ADDRESS")}
    inherited.pop("CUDA_VISIBLE_DEVICES", None)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        result = subprocess.run(
            [sys.executable, "-c", program, *words],
            capture_output=True,
            text=True,
            timeout=400,
            env=inherited | CALLER | {"RAY_TMPDIR": folder},
        )
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def test_ranks_of_two_nodes_have_addresses_threads_and_gpus_of_their_own(tmp_path: Path) -> None:
    result = run_in_cluster(SCENARIO, str(tmp_path))
    told = json.loads([x for x in result.stdout.splitlines() if x.startswith("{")][-1])
    ranks, address_of = told["ranks"], told["address_of"]
    threads = sorted((address_of[rank["node"]], rank["OMP_NUM_THREADS"]) for rank in ranks)
    assert threads == [("127.0.0.2", "4"), ("127.0.0.2", "4"), ("127.0.0.3", "3")]
    # All meet at the address that Ray knows of the first rank's node.
    assert {rank["MASTER_ADDR"] for rank in ranks} == {address_of[ranks[0]["node"]]}
    # Where Ray hides no GPU, each takes its own.
    assert not any("CUDA_VISIBLE_DEVICES" in rank for rank in ranks)
    assert [rank["LOCAL_RANK"] for rank in ranks] == [str(rank["gpu"]) for rank in ranks]
    assert len({(rank["node"], rank["LOCAL_RANK"]) for rank in ranks}) == 3
    assert [rank["GLOO_SOCKET_IFNAME"] for rank in ranks] == ["lo"] * 3  # as the caller has it
    assert "Ray gives out GPUs on node 127.0.0." in told["error"]
    assert "driver >= 580" in told["error"]


# Each node has room for one role: the policy is on the one, its engine on the other.
TRAINING = """
import sys

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from openrlhf.cli import train_ppo_ray
from openrlhf.trainer.ray.cluster import RayCluster
from openrlhf.trainer.ray.placement import CPU_SHARE_OF_A_RANK

node = {"object_store_memory": 80_000_000, "num_cpus": 1}
addresses = ("127.0.0.2", "127.0.0.3")
head = node | {"include_dashboard": False, "node_ip_address": addresses[0]}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(**node, node_ip_address=addresses[1])
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
taken = [{"CPU": 1 - CPU_SHARE_OF_A_RANK, f"node:{address}": 0.001} for address in addresses]
ray.get(placement_group(taken).ready())
wait_until_up = RayCluster.wait_until_up


def wait_and_say_where(self):
    wait_until_up(self)
    print("NODES", self.groups[0].nodes[0], self.engines[0].node)


RayCluster.wait_until_up = wait_and_say_where
try:
    train_ppo_ray.main(sys.argv[1:])
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.parametrize("way", ["", "--vllm_sync_with_ray"], ids=["broadcast", "objects"])
def test_weights_reach_an_engine_on_another_machine(
    way: str, tiny_model_dir: Path, prompt_file: Path, reward_file: Path, tmp_path: Path
) -> None:
    flags = (
        "--advantage_estimator rloo --n_samples_per_prompt 2 --init_kl_coef 0 --label_key answer "
        "--actor_learning_rate 1e-3 --rollout_batch_size 4 "
    )
    words = argv(
        flags + way,
        pretrain=tiny_model_dir,
        prompt_data=prompt_file,
        remote_rm_url=reward_file,
        save_path=tmp_path / "run",
    )
    result = run_in_cluster(TRAINING, *words)
    [nodes] = [line.split()[1:] for line in result.stdout.splitlines() if line[:5] == "NODES"]
    assert sorted(nodes) == ["127.0.0.2", "127.0.0.3"]
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in r]
    assert len(records) > 1
    # The engine samples under the weights of the step before: else its log-probs would be others.
    assert all(record["vllm_kl"] < 1e-3 for record in records)
