"""The Ray cluster that a run starts for itself, beside another run's and reached by nobody else."""

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

# Says where its cluster is and what the processes listen on; then it rests.
SCENARIO = """
import json, sys, time

import psutil
import ray

from openrlhf.trainer.ray.launcher import ray_session


def listening():
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [c.laddr for p in family for c in p.net_connections("inet") if c.status == "LISTEN"]
    return {address.port: address.ip for address in sockets}


def rest():
    time.sleep(600)


with ray_session():
    ray.get(ray.remote(lambda: None).remote())
    running = ray.remote(rest).remote()
    metrics, deadline = set(map(int, sys.argv[1:])), time.monotonic() + 60
    while not metrics <= listening().keys() and time.monotonic() < deadline:
        time.sleep(0.2)
    print(json.dumps([ray.get_runtime_context().gcs_address, listening()]), flush=True)
    rest()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_second_run_has_a_cluster_of_its_own_on_loopback_that_ends_with_it() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    ports = [str(port) for port in free_ports(2)]
    names = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
    environment |= dict(zip(names, ports, strict=True))
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # nobody's `ray start`
        driver = subprocess.Popen(
            [sys.executable, "-c", SCENARIO, *ports],
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"RAY_TMPDIR": folder},
        )
        with driver:
            assert driver.stdout is not None
            said = driver.stdout.readline()
            family = psutil.Process(driver.pid).children(recursive=True)
            driver.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            process.kill()
    assert family and not alive, alive
    address, listening = json.loads(said)
    assert address != ray.get_runtime_context().gcs_address
    assert set(ports) < listening.keys()
    own = [ipaddress.ip_address(ip.removeprefix("::ffff:")) for ip in listening.values()]
    assert all(ip.is_loopback for ip in own), listening
