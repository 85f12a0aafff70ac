"""Places roles on nodes whose GPUs Ray only counts, and prints the GPUs of each process, as
JSON: `python -m tests.helpers.fake_gpus`.
"""

import json
import os
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf.config.generation import AgentsConfig
from openrlhf.trainer.ppo_utils.demands import RoleDemand
from openrlhf.trainer.ray.placement import place, view_cluster, wait_for_node

NODE = {"object_store_memory": 80_000_000}
TRAINED = RoleDemand("actor", 6, "all")
SHARED = [TRAINED, RoleDemand("ref", 6, "all"), RoleDemand("vllm", 2, "all", 2)]
APART = [RoleDemand("actor", 2, "actor"), RoleDemand("vllm", 2, "vllm", 2)]
TOO_WIDE = [RoleDemand("vllm", 1, "vllm", 4)]


@ray.remote
class Process:
    """Stands in for a rank, an engine, or a worker of an engine."""

    def health(self) -> bool:
        return True

    def gpus(self) -> list[str]:
        """Return `node/GPU` of every GPU that it sees."""
        node = ray.util.get_node_ip_address()
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [f"{node}/{gpu}" for gpu in seen.split(",")] if seen is not None else ["all"]

    def start_workers(self) -> list[list[str]]:
        """Start a worker on each of its bundles, as vLLM does; return the GPUs of each."""
        bundles = [int(index) for index in os.environ["VLLM_RAY_BUNDLE_INDICES"].split(",")]
        share = float(os.environ["VLLM_RAY_PER_WORKER_GPUS"])
        group = ray.util.get_current_placement_group()
        self.workers = [
            Process.options(
                num_cpus=0,
                num_gpus=share,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=bundle
                ),
            ).remote()
            for bundle in bundles
        ]
        return ray.get([worker.gpus.remote() for worker in self.workers])


def placed(demands: list[RoleDemand]) -> tuple[dict[str, Any], dict[str, list], list]:
    """Start a process in every slot; what each was given, the slots, the groups."""
    slots, groups = place(demands, view_cluster())
    found: dict[str, Any] = {}
    held = []
    for role, of_role in slots.items():
        processes = [Process.options(**slot).remote() for slot in of_role]
        held += processes
        found[role] = [ray.get(process.gpus.remote()) for process in processes]
        if role == "vllm":
            found["workers"] = [ray.get(process.start_workers.remote()) for process in processes]
    del held
    return found, slots, groups


def main() -> None:
    """Place the demands one after another; at the last one a node is lost and another one comes."""
    head = NODE | {"include_dashboard": False, "node_ip_address": "127.0.0.2", "num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {
        address: cluster.add_node(**NODE, num_cpus=8, num_gpus=3, node_ip_address=address)
        for address in ("127.0.0.3", "127.0.0.4")
    }
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    results = {}
    for name, demands in {"too wide": TOO_WIDE, "shared": SHARED, "apart": APART}.items():
        results[name], slots, groups = placed(demands)
        if name != "apart":
            for group in groups:
                remove_placement_group(group)
    lost = results["apart"]["workers"][1][0][0].split("/")[0]
    cluster.remove_node(nodes[lost])
    cluster.add_node(**NODE, num_cpus=8, num_gpus=3, node_ip_address="127.0.0.5")
    slot = slots["vllm"][1]
    engine = Process.options(**slot).remote()
    wait_for_node(engine, slot, "engine 1", AgentsConfig())
    results["again"] = ray.get(engine.start_workers.remote())
    print(json.dumps(results))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
