"""The nodes of a Ray cluster, compared: versions, GPUs, clocks, folders, the network."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from openrlhf.errors import OpenRLHFError
from openrlhf.trainer.ray.launcher import find_cluster, get, ray_session, start_actor
from openrlhf.trainer.ray.utils import node_address, own_gpu
from openrlhf.utils.findings import Finding, NodeReport
from openrlhf.utils.rendezvous import free_port, open_store

MAX_SKEW_S = 2.0  # files of one node are read by another, and compared by their times
RESPONSE_S = 120.0  # until a node has started a process, imported torch and responded
NUM_BYTES = 64 * 2**20  # of an all-reduce

Ask = Callable[..., Any]  # of a method of NodeProbe and its arguments, on one node


class NodeProbe:
    """Looks at a node from a process on it."""

    def report(self, make_report: Callable[[], NodeReport]) -> NodeReport:
        """Return the node's own findings."""
        return make_report()

    def time(self) -> float:
        """Return the node's clock, seconds since the epoch."""
        return time.time()

    def sees(self, path: str) -> bool:
        """Return True if the path is there."""
        return Path(path).exists()

    def endpoint(self) -> tuple[str, int]:
        """Return an address and a free port of the node."""
        return node_address(), free_port()

    def all_reduce_s(self, host: str, port: int, rank: int, num_nodes: int, backend: str) -> float:
        """Return the seconds of an all-reduce among all nodes, on their GPUs by nccl, or else on
        their CPUs; the second one: the first sets up the connections.
        """
        device = torch.device("cuda", own_gpu()) if backend == "nccl" else torch.device("cpu")
        limit = timedelta(seconds=RESPONSE_S / 2)
        store = open_store(host, port, rank=rank, world_size=num_nodes, timeout=limit)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=num_nodes, timeout=limit
        )
        numbers = torch.ones(NUM_BYTES // 4, device=device)
        for _ in range(2):
            start = time.monotonic()
            dist.all_reduce(numbers)
            total = numbers[0].item()  # waits for the GPU
            seconds = time.monotonic() - start
        dist.destroy_process_group()
        assert total == num_nodes**2, f"the sum over {num_nodes} nodes is {total}"
        return seconds


def cluster_findings(
    folders: Sequence[str], make_report: Callable[[], NodeReport]
) -> Iterator[Finding]:
    """Yield the findings on the cluster that a run here would join; `make_report` runs on each
    node. Raise ConfigError if RAY_ADDRESS names a cluster that does not respond.
    """
    if not ray.is_initialized() and find_cluster(os.environ.get("RAY_ADDRESS")) is None:
        yield Finding("cluster", "none is running: each run starts its own on this machine")
        return
    with ray_session():
        nodes = {node["NodeManagerAddress"]: node for node in ray.nodes() if node["Alive"]}
        busy = busy_finding(nodes, available_resources_per_node())
        probes = {a: probe_on(node, with_gpu=busy is None) for a, node in nodes.items()}
        asks = {address: ask_of(address, probe) for address, probe in probes.items()}
        own = make_report()
        for address, node in nodes.items():
            try:
                report = asks[address](NodeProbe.report, make_report)
            except OpenRLHFError as error:
                yield Finding("node", str(error), f"Look into Ray's logs on {address}.")
                del asks[address], probes[address]
            else:
                yield from node_findings(address, node["Resources"], report, own.versions)
        if busy is not None:
            yield busy
        yield from clock_findings(asks)
        yield from shared_findings(asks, folders)
        if len(probes) > 1:
            backend = backend_of([nodes[address] for address in probes], are_free=busy is None)
            yield network_finding(list(probes.values()), backend)


def ask_of(address: str, probe: Any) -> Ask:
    """Return a function that calls a method of a node's probe and waits for its result."""

    def ask(method: Callable[..., Any], *args: object) -> Any:
        reference = getattr(probe, method.__name__).remote(*args)
        return get(reference, f"node {address}", RESPONSE_S)

    return ask


def busy_finding(
    nodes: Mapping[str, dict[str, Any]], free: Mapping[str, Mapping[str, float]]
) -> Finding | None:
    """Return the nodes whose GPUs are all in use; a probe that asked for one would wait for it."""
    busy = [
        address
        for address, node in nodes.items()
        if node["Resources"].get("GPU", 0) and free.get(node["NodeID"], {}).get("GPU", 0) < 1
    ]
    if not busy:
        return None
    seen = f"all in use on {', '.join(busy)}: the network is measured between CPUs"
    return Finding("GPUs", seen)


def backend_of(nodes: Sequence[Mapping[str, Any]], *, are_free: bool) -> str:
    """Return the backend of an all-reduce among nodes, whose GPUs `are_free` where they have any:
    one group cannot sum numbers of GPUs and of CPUs.
    """
    have_all = all(node["Resources"].get("GPU", 0) >= 1 for node in nodes)
    return "nccl" if are_free and have_all else "gloo"


def probe_on(node: dict[str, Any], *, with_gpu: bool) -> Any:
    """Start a probe on a node, with a GPU where it has one."""
    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    num_gpus = min(node["Resources"].get("GPU", 0), 1) * with_gpu
    options = {"num_cpus": 0, "num_gpus": num_gpus, "scheduling_strategy": where}
    return start_actor(NodeProbe, (), options)


def node_findings(
    address: str, resources: Mapping[str, float], report: NodeReport, versions: dict[str, str]
) -> Iterator[Finding]:
    """Yield the faults of a node with these resources, whose `versions` should be the same, or one
    finding that it is fine.
    """
    wrong = [finding for finding in report.findings if finding.remedy]
    for name in sorted({*versions, *report.versions}):
        own, other = versions.get(name), report.versions.get(name)
        if own != other:
            remedy = "Install the same environment on all nodes."
            wrong.append(Finding("versions", f"{name} {other}, here {own}", remedy))
    offered = int(resources.get("GPU", 0))
    if offered != report.num_gpus:
        seen = f"Ray gives out {offered}, {report.num_gpus} in /dev"
        remedy = f"Restart ray there with --num-gpus {report.num_gpus}."
        wrong.append(Finding("GPUs", seen, remedy))
    for finding in wrong:
        yield replace(finding, subject=f"{address} {finding.subject}")
    if not wrong:
        yield Finding("node", f"{address}: {offered} GPUs, {resources.get('CPU', 0):g} CPUs")


def clock_findings(asks: Mapping[str, Ask]) -> Iterator[Finding]:
    """Yield the distance of the nodes' clocks from the one here, where it is too far."""
    skews = {}
    for address, ask in asks.items():
        start, there, end = time.time(), ask(NodeProbe.time), time.time()
        # The node was asked somewhere between the two.
        skews[address] = there - min(max(there, start), end)
    off = {address: skew for address, skew in skews.items() if abs(skew) > MAX_SKEW_S}
    for address, skew in off.items():
        remedy = "Switch its time service on (timedatectl set-ntp true)."
        yield Finding(f"{address} clock", f"{skew:+.1f} s from the one here", remedy)
    if not off:
        yield Finding("clocks", f"at most {max(map(abs, skews.values()), default=0):.1f} s apart")


def shared_findings(asks: Mapping[str, Ask], folders: Sequence[str]) -> Iterator[Finding]:
    """Yield for each folder the nodes that do not see the files of this one."""
    for folder in (str(Path(name).absolute()) for name in folders if Path(name).is_dir()):
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".openrlhf-doctor-") as mark:
            blind = [name for name, ask in asks.items() if not ask(NodeProbe.sees, mark.name)]
        if blind:
            remedy = "Mount the same file system at this path on every node."
            yield Finding("shared folder", f"{folder} is another one on {', '.join(blind)}", remedy)
        else:
            yield Finding("shared folder", f"{folder} is the same on {len(asks)} node(s)")


def network_finding(probes: Sequence[Any], backend: str) -> Finding:
    """Return the bandwidth of an all-reduce of this backend between the nodes."""
    try:
        endpoint = get(probes[0].endpoint.remote(), "the first node", RESPONSE_S)
        references = [
            probe.all_reduce_s.remote(*endpoint, rank, len(probes), backend)
            for rank, probe in enumerate(probes)
        ]
        slowest = max(
            get(reference, "all-reduce of the nodes", RESPONSE_S) for reference in references
        )
    except OpenRLHFError as error:
        remedy = (
            "Open the ports between the nodes, or name their common network: "
            "NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0."
        )
        return Finding("network", f"the nodes cannot sum numbers together: {error}", remedy)
    moved = 2 * (len(probes) - 1) / len(probes) * NUM_BYTES  # by each node, in a ring
    said = f"all-reduce of {len(probes)} nodes: {moved / slowest / 1e9:.2f} GB/s each ({backend})"
    return Finding("network", said)
