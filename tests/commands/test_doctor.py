"""`openrlhf doctor`: a line for what is fine, what to type for the rest."""

import os
import socket
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from packaging.requirements import Requirement

from openrlhf.cli import doctor
from openrlhf.commands import doctor as commands_doctor
from openrlhf.commands.doctor import (
    folder_findings,
    gpu_findings,
    limit_findings,
    lock_findings,
    memory_findings,
    misfit,
    port_findings,
    token_findings,
)
from openrlhf.trainer.ray import nodes
from openrlhf.trainer.ray.nodes import (
    NodeProbe,
    backend_of,
    busy_finding,
    clock_findings,
    node_findings,
    shared_findings,
)
from openrlhf.utils.findings import Finding, NodeReport
from tests.distributed.spawn import run_ranks


def remedies(findings: Any) -> list[str]:
    return [finding.remedy for finding in findings if finding.remedy]


def test_what_is_installed_is_named_and_no_cluster_is_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    try:
        doctor.main([])
    except SystemExit as exit:
        assert exit.code == 2  # this machine may be short of something
    said = capsys.readouterr()
    assert f"torch {metadata.version('torch')}" in said.out
    assert said.out.count("fix ") == len(said.err.splitlines())
    assert "none is running: each run starts its own" in said.out


def test_a_version_that_does_not_fit_says_what_to_install() -> None:
    found = misfit(Requirement("torch<2"))
    assert found is not None and found.remedy == "Type pip install 'torch<2'."
    missing = misfit(Requirement("no-such-package>=1"))
    assert missing is not None and missing.seen == "no-such-package is not installed"
    assert misfit(Requirement("torch>=2")) is None


def test_a_lock_of_a_build_that_ended_is_found_and_one_in_use_is_not(tmp_path: Path) -> None:
    (tmp_path / "py311_cpu" / "cpu_adam").mkdir(parents=True)
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    held = os.open(lock, os.O_CREAT | os.O_EXCL)
    os.utime(lock, (0, time.time() - 2 * 3600))
    assert not remedies(lock_findings(tmp_path))
    os.close(held)
    [stale] = lock_findings(tmp_path)
    assert stale.seen == f"{lock} is 120 min old, and no process here holds it"
    assert stale.remedy == f"No build takes an hour: type rm {lock}."


def test_a_young_lock_may_be_another_nodes_and_is_left_alone(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, time.time() - 59 * 60))
    [found] = lock_findings(tmp_path)
    assert f"{lock} is 59 min old" in found.seen and "another node may build" in found.seen
    assert not found.remedy


def test_a_driver_that_torch_cannot_use_is_one_line_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(index: int) -> str:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 12020). Please update ...\n"
            "CUDA kernel errors might be reported later"
        )

    for name in ("gpus_of_machine", "visible_gpus"):
        monkeypatch.setattr(commands_doctor, name, lambda: ["0"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", refuse)
    [found] = gpu_findings()
    assert found.seen == "The NVIDIA driver on your system is too old (found version 12020)"
    assert found.remedy.startswith("Update the driver (")
    assert found.remedy.endswith("), or install the torch of its CUDA: not 13.0.")


def test_nodes_sum_on_gpus_only_where_each_has_a_free_one() -> None:
    with_gpus, without = {"Resources": {"GPU": 8.0}}, {"Resources": {"CPU": 4.0}}
    assert backend_of([with_gpus, with_gpus], are_free=True) == "nccl"
    assert backend_of([with_gpus, without], are_free=True) == "gloo"
    assert backend_of([with_gpus, with_gpus], are_free=False) == "gloo"


def sum_with_another(folder: Path) -> float:
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]) + 1
    nodes.ray.get_gpu_ids = lambda: [0] * (rank == 0)  # the other node has none
    return NodeProbe().all_reduce_s("127.0.0.1", port, rank, 2, "gloo")


def test_a_node_with_a_gpu_and_one_without_sum_on_their_cpus(tmp_path: Path) -> None:
    assert min(run_ranks(sum_with_another, 2, tmp_path)) > 0


def test_a_token_that_an_earlier_program_left_is_named(tmp_path: Path) -> None:
    assert not remedies(token_findings(tmp_path, {}))
    assert (
        "unset RAY_AUTH_MODE" in remedies(token_findings(tmp_path, {"RAY_AUTH_MODE": "token"}))[0]
    )
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert "export RAY_AUTH_MODE=token" in remedies(token_findings(tmp_path, {}))[0]
    assert not remedies(token_findings(tmp_path, {"RAY_AUTH_MODE": "token"}))


def test_a_port_that_is_taken_is_named_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(commands_doctor, "PORTS", {port: ("torchrun", "Take another.")})
        [found] = port_findings()
    assert found == Finding("port", f"{port} is taken by process {os.getpid()}", "Take another.")
    assert not remedies(port_findings())


def test_ports_of_ray_are_looked_at_too_and_one_that_ray_has_is_fine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {f.seen.partition(" ")[0]: f for f in port_findings()}
    assert {*found} == {"29500", "6379", "8265"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(commands_doctor, "PORTS", {port: ("ray start --head", "Take another.")})
        assert remedies(port_findings()) == ["Take another."]
        words = ["/venv/ray/core/src/ray/gcs/gcs_server"]
        monkeypatch.setattr(psutil.Process, "cmdline", lambda process: words)
        [fine] = port_findings()
    assert fine.seen == f"{port} is that of a Ray that runs here (process {os.getpid()})"
    assert not fine.remedy


@pytest.mark.parametrize(
    ("soft", "hard", "remedy"),
    [
        (1024, 4096, ("Have nofile raised to 8192", "Have nproc raised to 16384")),
        (1024, 10**6, ("Type ulimit -n 8192.", "Type ulimit -u 16384.")),
        (8192, 8192, ("", "Have nproc raised to 16384")),
        (16384, -1, ("", "")),
        (-1, -1, ("", "")),
    ],
)
def test_a_limit_of_files_and_processes_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, remedy: tuple[str, str]
) -> None:
    monkeypatch.setattr(commands_doctor.resource, "getrlimit", lambda _: (soft, hard))
    found = [*limit_findings()][:2]
    assert [each.subject for each in found] == ["open files", "processes"]
    for each, expected in zip(found, remedy, strict=True):
        assert bool(each.remedy) == bool(expected) and each.remedy.startswith(expected)


def test_memory_that_is_short_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    for free, num_wrong in ((1, 2), (20, 0)):
        memory = SimpleNamespace(available=free * gib, total=64 * gib)
        disk = SimpleNamespace(free=free * gib, total=32 * gib)
        monkeypatch.setattr(commands_doctor.psutil, "virtual_memory", lambda m=memory: m)
        monkeypatch.setattr(commands_doctor.shutil, "disk_usage", lambda _, d=disk: d)
        found = remedies(memory_findings())
        assert len(found) == num_wrong
    assert next(finding.seen for finding in memory_findings()) == "20.0 of 64.0 GiB free"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    [missing] = folder_findings((str(tmp_path / "models"),))
    assert missing.remedy == f"Type mkdir -p {tmp_path / 'models'}, or mount it."


class Late(NodeProbe):
    """A node whose clock is three seconds behind and whose folders are its own."""

    def time(self) -> float:
        return time.time() - 3

    def sees(self, path: str) -> bool:
        return False


def asked(probe: NodeProbe) -> Callable[..., Any]:
    return lambda method, *args: getattr(probe, method.__name__)(*args)


def test_clocks_and_folders_of_nodes_are_compared_with_those_here(tmp_path: Path) -> None:
    asks = {"10.0.0.1": asked(NodeProbe()), "10.0.0.2": asked(Late())}
    [clock] = clock_findings(asks)
    assert (clock.subject, clock.seen) == ("10.0.0.2 clock", "-3.0 s from the one here")
    [folder] = shared_findings(asks, [str(tmp_path)])
    assert folder.seen == f"{tmp_path} is another one on 10.0.0.2" and folder.remedy
    assert not list(tmp_path.iterdir())
    del asks["10.0.0.2"]
    assert not remedies([*clock_findings(asks), *shared_findings(asks, [str(tmp_path)])])


def test_a_node_whose_gpus_are_all_in_use_is_not_waited_for() -> None:
    names = {"10.0.0.1": 8.0, "10.0.0.2": 8.0, "10.0.0.3": 0.0}  # the last one has none
    nodes = {name: {"NodeID": name, "Resources": {"GPU": count}} for name, count in names.items()}
    free = {"10.0.0.1": {"GPU": 1.0}, "10.0.0.2": {"CPU": 3.0}}  # Ray leaves zeros out
    busy = busy_finding(nodes, free)
    assert busy is not None and not busy.remedy
    assert busy.seen.startswith("all in use on 10.0.0.2: the network is measured between CPUs")
    assert busy_finding(nodes, free | {"10.0.0.2": {"GPU": 8.0}}) is None


def test_a_node_of_other_versions_or_gpus_is_named() -> None:
    report = NodeReport([Finding("memory", "much")], {"torch": "2.12.0"}, num_gpus=4)
    found = list(node_findings("10.0.0.2", {"GPU": 8.0}, report, {"torch": "2.13.0"}))
    assert [f.seen for f in found] == ["torch 2.12.0, here 2.13.0", "Ray gives out 8, 4 in /dev"]
    assert all(f.remedy and f.subject.startswith("10.0.0.2 ") for f in found)
    [fine] = node_findings("10.0.0.2", {"GPU": 4.0, "CPU": 16.0}, report, {"torch": "2.12.0"})
    assert fine.seen == "10.0.0.2: 4 GPUs, 16 CPUs" and not fine.remedy
