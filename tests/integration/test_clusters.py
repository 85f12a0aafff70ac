"""Ray clusters: of two nodes, the private one of a run, and those of `ray start --head`."""

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import ray

from openrlhf.trainer.ray.placement import FREE_S
from tests.helpers.processes import ends, saved_step, wait_for_a_step
from tests.integration.commands import argv, run_command, steps_of
from tests.integration.heads import Head, free_ports, ray_command, running_head

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
    host, _ = ray.get(group.handles[0].endpoint.remote())
    print("NODE", group.nodes[0])
    print("ENDPOINT", host == group.nodes[0])


def ready_and_say_where(engine, **options):
    ready(engine, **options)
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
    # Of the addresses of this machine rank 0 gives the one by which Ray knows its node.
    assert said.count("ENDPOINT True") == 1 and "ENDPOINT False" not in said
    records = steps_of(given["save_path"])
    assert len(records) > 1
    # The engine samples under the weights of the step before: else its log-probs would be others.
    assert all(record["vllm_kl"] < 1e-3 for record in records)


DOCTOR = """
import sys

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from openrlhf.cli import doctor

node = {"object_store_memory": 80_000_000, "num_cpus": 1}
head = node | {"include_dashboard": False, "node_ip_address": "127.0.0.2"}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(**node, num_gpus=1, node_ip_address="127.0.0.3")
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
ray.get(placement_group([{"GPU": 1}]).ready())  # another job has it
try:
    doctor.main(sys.argv[1:])
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_the_doctor_asks_every_node_and_measures_the_network(tmp_path: Path) -> None:
    unwanted = ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
    inherited = {k: v for k, v in os.environ.items() if k not in unwanted}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        env = inherited | CALLER | {"RAY_TMPDIR": folder, "HOME": folder}  # no token
        command = [sys.executable, "-c", DOCTOR, "--folders", str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert "127.0.0.2: 0 GPUs, 1 CPUs" in done.stdout, done.stderr
    assert "127.0.0.3 GPUs: Ray gives out 1, 0 in /dev" in done.stderr  # a pretended one
    assert "all in use on 127.0.0.3: the network is measured between CPUs" in done.stdout
    assert f"{tmp_path} is the same on 2 node(s)" in done.stdout
    assert re.search(r"all-reduce of 2 nodes: .* GB/s each \(gloo\)", done.stdout)


# Says where its cluster is and what the processes listen on; then it rests.
PRIVATE = """
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


# One of its processes is killed.
DEATH = """
import logging, os, sys, time

import ray

from openrlhf.trainer.ray.launcher import ray_session

with ray_session():
    logging.getLogger("ray").handlers = [logging.FileHandler("ray.log")]
    try:
        ray.get(ray.remote(max_retries=0)(lambda: os.kill(os.getpid(), 9)).remote())
    except ray.exceptions.WorkerCrashedError:
        print("it died", flush=True)
    deadline = time.monotonic() + 30
    while not os.path.getsize("ray.log") and time.monotonic() < deadline:
        time.sleep(0.1)
"""


# One of Ray's own processes is stopped, and the program goes on without Ray to its end.
LOSS = """
import json, signal, sys, time

import psutil
import ray

from openrlhf.trainer.ray.launcher import ray_session

with ray_session() as session:
    ray.get(ray.remote(lambda: None).remote())
    family = psutil.Process().children(recursive=True)
    session.processes[sys.argv[1]].send_signal(signal.SIGSTOP)
    while not session.is_lost():
        time.sleep(0.1)
print(json.dumps([child.pid for child in family]), time.monotonic(), flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize("process", ["Ray's GCS", "Ray's raylet"])
def test_a_program_whose_ray_is_stopped_ends_at_once_with_its_own_exit_code(process: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        done = subprocess.run(
            [sys.executable, "-c", LOSS, process],
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            env=environment | {"RAY_TMPDIR": folder, "RAY_ADDRESS": "local"},
        )
        took_s = time.monotonic() - float(done.stdout.split()[-1])
        assert done.returncode == 7 and took_s < 5
        assert ends(*json.loads(done.stdout.rpartition(" ")[0])), "orphans"


def test_what_ray_guesses_at_a_death_is_in_the_log_and_not_on_the_screen(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        done = subprocess.run(
            [sys.executable, "-c", DEATH],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            env=environment | {"RAY_TMPDIR": folder, "RAY_ADDRESS": "local"},
        )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("it died\n", "")
    assert "common causes" in (tmp_path / "ray.log").read_text()


@pytest.mark.usefixtures("ray_cluster")
def test_a_second_run_has_a_cluster_of_its_own_on_loopback_that_ends_with_it() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    ports = [str(port) for port in free_ports(2)]
    names = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
    environment |= dict(zip(names, ports, strict=True))
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # nobody's `ray start`
        driver = subprocess.Popen(
            [sys.executable, "-c", PRIVATE, *ports],
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


GRPO_JOB = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "
    "--label_key answer --max_samples 8 --vllm_num_engines 1"
)


# Runs in a process of its own: this one may be connected to another cluster.
PLACEMENT = """
import json, sys, threading, time

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from openrlhf.errors import ConfigError
from openrlhf.trainer.ppo_utils.demands import RoleDemand
from openrlhf.trainer.ray.placement import place, view_cluster

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
cluster = view_cluster()
demands = [RoleDemand("actor", 1, "actor"), RoleDemand("vllm", 1, "vllm")]
other_job = placement_group([{"GPU": 1, "CPU": 1}])
assert other_job.wait(10)


def timed_place(demands):
    start = time.monotonic()
    try:
        slots, _ = place(demands, cluster)
    except ConfigError as error:
        return {"error": str(error), "code": error.exit_code, "s": time.monotonic() - start}
    return {"roles": sorted(slots), "s": time.monotonic() - start}


too_large = timed_place([RoleDemand("actor", 3, "actor")])
busy = timed_place(demands)
threading.Timer(1.5, remove_placement_group, [other_job]).start()
freed = timed_place(demands)
print(json.dumps({"too_large": too_large, "busy": busy, "freed": freed}))
"""


def job(head: Head, command: str, *words: str) -> str:
    """What `ray job` printed; it must succeed."""
    at = ("--address", head.dashboard)
    return run_command(ray_command(), "job", command, *at, *words, env=head.environment())


def test_a_job_trains_in_its_folder_one_that_is_stopped_saves_and_nothing_is_left(
    given: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job"  # what a user has beside the command
    shutil.copytree(given["pretrain"], folder / "model")
    shutil.copy(given["prompt_data"], folder / "prompts.jsonl")
    shutil.copy(given["remote_rm_url"], folder / "reward_func.py")
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "120")  # 3 s unless the head is told

    def entrypoint(run_dir: Path, more: str) -> list[str]:
        words = argv(
            f"{GRPO_JOB} {more}",
            pretrain="model",
            prompt_data="prompts.jsonl",
            remote_rm_url="reward_func.py",
            train_batch_size="16",
            save_path=run_dir,
            ckpt_path=run_dir / "ckpt",
        )
        return ["--", "python3", "-m", "openrlhf.cli.train_ppo_ray", *words]

    place, first, second = f"--working-dir={folder}", tmp_path / "first", tmp_path / "second"
    with running_head("--num-cpus", "2", has_dashboard=True) as head:
        assert "step 1/1" in job(head, "submit", place, *entrypoint(first, ""))
        endless = entrypoint(second, "--num_episodes 2000")
        job(head, "submit", "--no-wait", "--submission-id=it", place, *endless)
        wait_for_a_step(second, head.process)
        assert "was stopped" in job(head, "stop", "it")
        saved_step(job(head, "logs", "it"), second / "ckpt")
        family = head.processes()
    [step] = steps_of(first)
    assert step["ratio_max"] == 1.0 and step["vllm_kl"] < 1e-6
    assert (first / "config.json").exists()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


def test_a_busy_cluster_is_waited_for_until_the_deadline_and_a_small_one_not() -> None:
    with running_head("--num-cpus", "4", "--num-gpus", "2", has_dashboard=False) as head:
        said = run_command("-c", PLACEMENT, head.address, timeout=120, env=head.environment())
    [line] = [line for line in said.splitlines() if line.startswith('{"too_large"')]
    outcome = json.loads(line)
    too_large, busy, freed = (outcome[name] for name in ("too_large", "busy", "freed"))
    assert too_large["s"] < 1.0 and too_large["code"] == 2
    assert "need 3 x GPU, have 2" in too_large["error"]
    assert FREE_S <= busy["s"] < FREE_S + 2 and busy["code"] == 2
    assert "need 2 x GPU, have 2" in busy["error"]
    assert freed["roles"] == ["actor", "vllm"] and 1.0 < freed["s"] < 10.0
