"""The Ray cluster that a run starts for itself, beside another run's and reached by nobody else."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import tempfile

import psutil
import pytest
import ray

from tests.integration.heads import free_ports

# Says where its cluster is and what the processes listen on, once both metrics ports are open.
SCENARIO = """
import json, sys, time

import psutil
import ray

from openrlhf.trainer.ray.launcher import ray_session


def listening():
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [c.laddr for p in family for c in p.net_connections("inet") if c.status == "LISTEN"]
    return {address.port: address.ip for address in sockets}


with ray_session():
    ray.get(ray.remote(lambda: None).remote())
    metrics, deadline = set(map(int, sys.argv[1:])), time.monotonic() + 60
    while not metrics <= listening().keys() and time.monotonic() < deadline:
        time.sleep(0.2)
    print(json.dumps([ray.get_runtime_context().gcs_address, listening()]))
"""


@pytest.mark.usefixtures("ray_cluster")
def test_a_second_run_starts_a_cluster_of_its_own_on_loopback() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    metrics = dict(
        zip(("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT"), free_ports(2), strict=True)
    )
    ports = [str(port) for port in metrics.values()]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # nobody's `ray start`
        environment |= dict(zip(metrics, ports, strict=True)) | {"RAY_TMPDIR": folder}
        result = subprocess.run(
            [sys.executable, "-c", SCENARIO, *ports],
            capture_output=True,
            text=True,
            timeout=150,
            env=environment,
        )
    assert result.returncode == 0, result.stderr[-3000:]
    address, listening = json.loads(result.stdout.splitlines()[-1])
    assert address != ray.get_runtime_context().gcs_address
    assert set(ports) < listening.keys()
    own = [ipaddress.ip_address(ip.removeprefix("::ffff:")) for ip in listening.values()]
    assert all(ip.is_loopback for ip in own), listening


LASTING = """
import time

import ray

from openrlhf.trainer.ray.launcher import ray_session


def rest():
    time.sleep(600)


with ray_session():
    ray.get(ray.remote(lambda: None).remote())
    running = ray.remote(rest).remote()
    time.sleep(2)
    print("ready", flush=True)
    rest()
"""


@pytest.mark.slow
@pytest.mark.faults
def test_all_processes_of_a_killed_driver_end_within_ten_seconds() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # nobody's `ray start`
        driver = subprocess.Popen(
            [sys.executable, "-c", LASTING],
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"RAY_TMPDIR": folder},
        )
        with driver:
            assert driver.stdout is not None and driver.stdout.readline() == "ready\n"
            family = psutil.Process(driver.pid).children(recursive=True)
            names = [" ".join(process.cmdline()) for process in family]
            driver.kill()
        assert any("DashboardAgent" in name for name in names), names
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            process.kill()
        assert not alive, alive
