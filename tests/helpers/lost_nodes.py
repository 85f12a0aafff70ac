"""An RL command on a Ray cluster that loses a node in each phase of a step: `python -m
tests.helpers.lost_nodes FLAGS`. Each node has room for one role, and another node comes in place of
a lost one.
"""

import json
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import ray
from ray._private.node import Node
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from openrlhf.cli import train_ppo_ray
from openrlhf.trainer.ray.placement import CPU_SHARE_OF_A_RANK
from tests.helpers.faults import (
    ACTOR,
    CRITIC,
    ENGINE,
    KILL,
    PHASES,
    REFERENCE,
    STOP,
    Fault,
    Faults,
    hooked,
)

NODE = {"object_store_memory": 80_000_000}
# Between the end of a node and the start of the next one: once Ray knows of the end, so that what
# was on the node has to wait for another one; and before it does.
AWAY_S = {"generate": 30.0}
# A step without a fault follows each with one.
PLAN: dict[int, Fault] = {
    2 * number: fault
    for number, fault in enumerate(
        [
            *((ENGINE, phase, KILL) for phase in ("generate", "update", "sync")),
            *((ACTOR, phase, KILL) for phase in PHASES),
            *((CRITIC, phase, KILL) for phase in ("score", "update")),
            (REFERENCE, "score", KILL),
            (ENGINE, "update", STOP),
            (CRITIC, "update", STOP),
        ],
        start=1,
    )
}
NUM_STEPS = max(PLAN) + 2
ROLES = {ACTOR: "actor", CRITIC: "critic", REFERENCE: "ref"}


class Nodes:
    """The nodes beside the driver's own."""

    def __init__(self) -> None:
        # The processes of a node end with the thread that started them, so it is one that stays.
        self.thread = ThreadPoolExecutor(1)
        head = NODE | {"include_dashboard": False, "node_ip_address": "127.0.0.2", "num_cpus": 0}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.num_added = 0

    def add(self) -> None:
        """Start a node with room for one role."""
        self.num_added += 1
        address = f"127.0.0.{2 + self.num_added}"
        self.cluster.add_node(**NODE, num_cpus=1, node_ip_address=address)
        ray.get(
            placement_group([{"CPU": 1 - CPU_SHARE_OF_A_RANK, f"node:{address}": 0.001}]).ready()
        )

    def lose(self, address: str, phase: str, how: signal.Signals) -> None:
        """End a node and all its processes, or stop its raylet alone; another node comes some
        seconds later.
        """
        self.thread.submit(self._add_later, AWAY_S.get(phase, 3.0))
        [node] = (n for n in self.cluster.worker_nodes if n.node_ip_address == address)
        [raylet] = node.all_processes["raylet"]
        if how is STOP:
            raylet.process.send_signal(how)
            return
        for process in psutil.Process(raylet.process.pid).children(recursive=True):
            process.kill()  # they would end a second later
        self.cluster.remove_node(node, allow_graceful=False)

    def _add_later(self, delay_s: float) -> None:
        time.sleep(delay_s)
        self.add()


@dataclass
class NodeOf:
    """The node of a role, which is struck as a process would be."""

    nodes: Nodes
    address: str
    phase: str
    pid: int = 0

    def send_signal(self, how: signal.Signals) -> None:
        """Lose the node."""
        self.nodes.lose(self.address, self.phase, how)


def main() -> None:
    """Run the command; print what came of it as the last line."""
    Node._register_shutdown_hooks = lambda self: None  # only the main thread can have them
    nodes = Nodes()
    ray.init(address=nodes.cluster.address, log_to_driver=False, logging_level="ERROR")
    for _ in (ENGINE, *ROLES):
        nodes.thread.submit(nodes.add).result()
    faults = Faults(PLAN)

    def find(title: str) -> list[Any]:
        [trainer] = faults.trainers
        _, phase, _ = faults.plan.get(faults.step, ("", "", KILL))
        own = trainer.engines[0].node if title == ENGINE else trainer.groups[ROLES[title]].nodes[0]
        return [NodeOf(nodes, own, phase)]

    faults.find = find
    with pytest.MonkeyPatch.context() as patch:
        hooked(patch, faults)
        try:
            train_ppo_ray.main(sys.argv[1:])
            ledger = faults.trainers[0].sampler.ledger
            ledger.check()
            found = {"outcomes": ledger.outcomes, "pending": len(ledger.pending)}
            print(json.dumps(found | {"seconds": faults.seconds}))
        finally:
            nodes.thread.shutdown()
            ray.shutdown()
            nodes.cluster.shutdown()


if __name__ == "__main__":
    main()
