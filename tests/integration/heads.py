"""Ray heads for tests: each with ports and a folder of its own, ended by process id."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

START_TIMEOUT_S = 90.0
PORT_FLAGS = (
    "--port",
    "--dashboard-port",
    "--ray-client-server-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--metrics-export-port",
)


@dataclass(frozen=True)
class Head:
    """A running cluster of one node."""

    address: str  # of Ray itself, for RAY_ADDRESS
    dashboard: str  # URL that takes jobs; nobody listens when it was started without
    process: subprocess.Popen[bytes]
    token: str  # Ray lets nobody else in

    def environment(self) -> dict[str, str]:
        """The environment of a command that uses this cluster."""
        return clean_environment(self.token)

    def processes(self) -> list[psutil.Process]:
        """Every process of the cluster that is alive."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]


@contextmanager
def running_head(*flags: str, has_dashboard: bool) -> Iterator[Head]:
    """`ray start --head --block` on loopback; nothing of it is left afterwards."""
    folder = tempfile.mkdtemp(prefix="ray-head-", dir="/tmp")  # socket paths must be short
    ports = dict(zip(PORT_FLAGS, map(str, free_ports(len(PORT_FLAGS))), strict=True))
    command = [ray_command(), "start", "--head", "--block", "--node-ip-address", "127.0.0.1"]
    command += ["--temp-dir", folder, "--object-store-memory", str(10**8), "--disable-usage-stats"]
    command += ["--include-dashboard", str(has_dashboard).lower(), *flags]
    command += [word for item in ports.items() for word in item]
    log, token = Path(folder) / "head.log", secrets.token_hex(32)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=clean_environment(token),
            start_new_session=True,
        )
    dashboard = f"http://127.0.0.1:{ports['--dashboard-port']}"
    head = Head(f"127.0.0.1:{ports['--port']}", dashboard, process, token)
    try:
        wait_for_port(int(ports["--port"]), process, log)
        if has_dashboard:
            wait_for_port(int(ports["--dashboard-agent-listen-port"]), process, log)
        yield head
    finally:
        stop(head)
        shutil.rmtree(folder, ignore_errors=True)


def stop(head: Head) -> None:
    """End what was started, children of children too."""
    family = head.processes() if head.process.poll() is None else []
    head.process.terminate()
    _, alive = psutil.wait_procs(family, timeout=15)
    for process in alive:
        process.kill()
    head.process.wait(timeout=15)


def clean_environment(token: str) -> dict[str, str]:
    """This process' environment without another cluster's address, the test's Python first.

    Once a local Ray cluster has run on a machine, a head wants a token and `ray job submit` brings
    none, unless RAY_AUTH_MODE says so.
    """
    folder = str(Path(sys.executable).parent)
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    search_path = os.pathsep.join([folder, os.environ["PATH"]])
    return inherited | {"PATH": search_path, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def ray_command() -> str:
    """The `ray` that belongs to the running Python."""
    return str(Path(sys.executable).parent / "ray")


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until somebody listens on a port of this machine."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the head ended: {log.read_text()[-2000:]}"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"nobody listens on port {port}: {log.read_text()[-2000:]}")
