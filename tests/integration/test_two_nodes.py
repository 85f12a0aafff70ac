"""Weights on a real Ray cluster of two nodes: the policy on the one, its engine on the other."""

import os
import tempfile

import pytest

from tests.integration.commands import argv, run_command, steps_of

pytestmark = pytest.mark.slow

CALLER = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "GLOO_SOCKET_IFNAME": "lo"}


# Each node has room for one role: the policy is on the one, its engine on the other.
TRAINING = """
import sys

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from openrlhf.cli import train_ppo_ray
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.placement import CPU_SHARE_OF_A_RANK
from openrlhf.trainer.ray.vllm_engine import RayEngine

node = {"object_store_memory": 80_000_000, "num_cpus": 1}
addresses = ("127.0.0.2", "127.0.0.3")
head = node | {"include_dashboard": False, "node_ip_address": addresses[0]}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(**node, node_ip_address=addresses[1])
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
taken = [{"CPU": 1 - CPU_SHARE_OF_A_RANK, f"node:{address}": 0.001} for address in addresses]
ray.get(placement_group(taken).ready())
join, ready = RayActorGroup.join, RayEngine.ready


def join_and_say_where(group):
    join(group)
    print("NODE", group.nodes[0])


def ready_and_say_where(engine):
    ready(engine)
    print("NODE", engine.node)


RayActorGroup.join, RayEngine.ready = join_and_say_where, ready_and_say_where
try:
    train_ppo_ray.main(sys.argv[1:])
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.parametrize("way", ["", "--vllm_sync_with_ray"], ids=["broadcast", "objects"])
def test_weights_reach_an_engine_on_another_machine(way: str, given: dict) -> None:
    flags = (
        "--advantage_estimator rloo --n_samples_per_prompt 2 --init_kl_coef 0 "
        "--actor_learning_rate 1e-3 --rollout_batch_size 4 "
    )
    unwanted = ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
    inherited = {k: v for k, v in os.environ.items() if k not in unwanted}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        env = inherited | CALLER | {"RAY_TMPDIR": folder}
        said = run_command("-c", TRAINING, *argv(flags + way, **given), timeout=400, env=env)
    nodes = [line.split()[1] for line in said.splitlines() if line[:5] == "NODE "]
    assert sorted(nodes) == ["127.0.0.2", "127.0.0.3"]
    records = steps_of(given["save_path"])
    assert len(records) > 1
    # The engine samples under the weights of the step before: else its log-probs would be others.
    assert all(record["vllm_kl"] < 1e-3 for record in records)
