"""Which Ray cluster is joined: the one named, else the one the user started; a dead one is noticed
at once, where Ray would try for minutes.
"""

import errno
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray._private import services

from openrlhf.errors import ConfigError, LostEngineError, LostRankError, MachineError
from openrlhf.trainer.ray import launcher
from openrlhf.trainer.ray.cluster import view_of_run
from openrlhf.trainer.ray.deaths import death_of_worker
from openrlhf.trainer.ray.launcher import find_cluster
from openrlhf.utils.framework_logs import latest_log, text_of
from tests.helpers.processes import wait_until

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server


@pytest.fixture
def last_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which `ray start` leaves its address, on a machine without a head."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = tmp_path / "ray"
    folder.mkdir()
    return folder / "ray_current_cluster"


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_head_that_left_its_address_behind_is_not_waited_for(last_address, listener, capsys):
    last_address.write_text(address_of(listener))
    listener.close()
    assert find_cluster(None) is None
    assert "does not respond" in capsys.readouterr().err


def test_a_head_that_listens_is_joined(last_address, listener):
    last_address.write_text(address_of(listener))
    found = find_cluster(None)
    assert found is not None and found.endswith(f":{listener.getsockname()[1]}")


def test_the_cluster_of_another_run_is_not_joined(last_address, listener, monkeypatch):
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: {address_of(listener)})
    assert find_cluster(None) is None


def test_the_head_of_another_user_is_not_joined(last_address, listener, monkeypatch):
    last_address.write_text(address_of(listener))
    monkeypatch.setattr(os, "getuid", lambda: last_address.stat().st_uid + 1)
    assert find_cluster(None) is None


@pytest.mark.parametrize("kind", ["dead", "nonsense", "auto"])
def test_an_address_that_was_asked_for_must_respond(last_address, listener, monkeypatch, kind):
    asked = address_of(listener) if kind == "dead" else kind
    listener.close()
    monkeypatch.setenv("RAY_ADDRESS", asked)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS is {asked}, and no Ray cluster responds"):
        find_cluster(asked)


def test_a_ray_that_does_not_start_in_time_is_one_line(monkeypatch) -> None:
    def init(**settings: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because…")

    monkeypatch.setattr(launcher.ray, "init", init)
    with pytest.raises(MachineError, match="Ray did not start on this machine: The current node"):
        launcher._start_here()


@pytest.fixture
def ray_here() -> Iterator[psutil.Process]:
    """A process in place of a raylet, with one that Ray has not started, and a worker."""
    names = [["ray::X"], ["agent"]]
    words = "(exec -a ray::X sleep 99) & (exec -a agent sleep 99) & echo; wait"
    with subprocess.Popen(["bash", "-c", words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        raylet = psutil.Process(process.pid)
        wait_until(lambda: [c.cmdline()[:1] for c in raylet.children()] == names)
        yield raylet
        raylet.resume()
        for child in raylet.children():
            child.kill()
        process.kill()


def living(raylet: psutil.Process) -> list[str]:
    return [c.cmdline()[0] for c in raylet.children() if c.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("is_own", [True, False])
def test_workers_of_a_lost_ray_are_ended_where_the_cluster_is_this_programs(
    ray_here, is_own, monkeypatch, listener
) -> None:
    """Another cluster has workers of others, and may have one that this program is started by."""
    watcher = subprocess.Popen(["sleep", "99"])
    monkeypatch.setattr(launcher.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(launcher.stopping, "listen", lambda: None)
    monkeypatch.setattr(launcher, "_leave_ray_behind", lambda: None)  # this process goes on
    monkeypatch.setattr(launcher, "_start_here", lambda: watcher)
    monkeypatch.setattr(launcher, "_join", lambda *_: None)
    monkeypatch.setattr(launcher, "ray_processes", lambda: {"Ray's raylet": ray_here})
    monkeypatch.setenv("RAY_ADDRESS", "local" if is_own else address_of(listener))
    with launcher.ray_session() as session:
        ray_here.suspend()
        wait_until(session.is_lost)
    wait_until(lambda: living(ray_here) == ["ray::X", "agent"][is_own:])
    watcher.kill()
    watcher.wait()


@pytest.mark.parametrize("num_alive", [0, 1])
def test_a_program_whose_ray_has_died_is_told_so(ray_here, num_alive, monkeypatch) -> None:
    monkeypatch.setattr(launcher.ray, "is_initialized", lambda: True)
    alive = dict([("Ray's raylet", ray_here)][:num_alive])
    monkeypatch.setattr(launcher, "ray_processes", lambda: alive)
    monkeypatch.setattr(launcher, "num_ray_processes", lambda: 2)
    with pytest.raises(MachineError, match=r"is lost\. Start the program again"):
        view_of_run()


EOF = (
    "The actor died unexpectedly before finishing this task.\n\tpid: 719\n"
    "The actor is dead because its worker process has died. Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes: (1) …"
)


@pytest.mark.parametrize(
    ("said", "how"),
    [
        ("step 1\nstep 2\n", "ended without a word (SIGKILL, or an exit of native code)"),
        ("step 1\nFatal Python error: Segmentation fault\n", "was ended by SIGSEGV"),
    ],
)
def test_a_dead_worker_is_named_with_pid_signal_and_last_lines(said, how, tmp_path) -> None:
    (tmp_path / "vllm-0.log").write_text(said)
    death = death_of_worker(EOF, "vllm-0", f"{tmp_path}/vllm-0")
    end = " | ".join(said.splitlines())
    assert str(death) == f"vllm-0 died: pid 719 {how}. The end of {tmp_path}/vllm-0.log: {end}"


FULL = (
    "{num} worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
    "10.0.0.2, ID: 88) was 9.16GB used / 9.54GB limit (0.96)\nConsidered workers: [\n{killed}]\n"
    "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n16999\t0.07\tray::DashboardAgent\nRefer to …"
)
SELECTED = "Selected to kill: (Actor(cc): job ID=01, task name=A, pid={pid}, worker ID=f3)\n"
MEMORY = (
    "was ended by Ray because the memory of its node was full (type fewer ranks or engines, or "
    "a smaller --micro_train_batch_size)"
)
DIED = "The actor died unexpectedly before finishing this task.\n\tpid: 719\n\tip: 10.0.0.2\n"
NODE = "The actor died because its node has died. Node Id: 8f\n\tthe actor's node was terminated"
NEVER_RAN = "The actor never ran - it was cancelled before it started running."


@pytest.mark.parametrize(
    ("text", "death"),
    [
        (FULL.format(num=1, killed=SELECTED.format(pid=719)), f"vllm-0 died: pid 719 {MEMORY}"),
        (
            FULL.format(num=2, killed=SELECTED.format(pid=719) + SELECTED.format(pid=720)),
            f"vllm-0 died: {MEMORY}",
        ),
        (DIED + NODE, "vllm-0 on node 10.0.0.2 died: pid 719 ended with its node"),
        (f"{NODE}\n{NEVER_RAN}", f"vllm-0 died: {NEVER_RAN}"),
        (
            "The actor 4d is unavailable: RPC error. The task may or may not have been executed.",
            "vllm-0 died: cannot be reached by Ray",
        ),
        (f"{DIED}Something new.", "vllm-0 on node 10.0.0.2 died: pid 719: Something new."),
    ],
)
def test_each_way_to_die_is_named_with_the_pid_where_ray_has_it(text, death, tmp_path) -> None:
    (tmp_path / "vllm-0.log").write_text("step 1\n")
    end = f". The end of {tmp_path}/vllm-0.log: step 1"
    assert death_of_worker(text, "vllm-0", f"{tmp_path}/vllm-0") == death + end


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ray.exceptions.RayTaskError(
                "run", "ray::A.run() (pid=719, ip=10.0.0.2)", LostEngineError("CUDA error")
            ),
            "CUDA error [vllm-0, pid 719]",
        ),
        (ray.exceptions.GetTimeoutError(), "vllm-0 did not respond in 5 s"),
    ],
)
def test_a_lost_process_that_lives_is_named_with_its_last_lines(
    error, said, tmp_path, monkeypatch
) -> None:
    def get(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(launcher.ray, "get", get)
    (tmp_path / "vllm-0.log").write_text("step 1\n")
    with pytest.raises(LostEngineError) as caught:
        launcher.get(None, "vllm-0", 5.0, log=f"{tmp_path}/vllm-0", lost=LostEngineError)
    assert str(caught.value) == f"{said}. The end of {tmp_path}/vllm-0.log: step 1"


def test_a_log_that_is_gone_meanwhile_is_passed_over(tmp_path) -> None:
    (tmp_path / "vllm-0.1.log").write_text("step 1\n")
    (tmp_path / "vllm-0.2.log").symlink_to(tmp_path / "gone")
    assert latest_log(f"{tmp_path}/vllm-0") == tmp_path / "vllm-0.1.log"
    assert text_of(tmp_path / "vllm-0.2.log") == ""


def test_a_worker_without_room_names_itself_and_what_ran_out(monkeypatch) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")

    def get(*_: object, **__: object) -> None:
        raise ray.exceptions.RayTaskError("ready", "Traceback …", error).as_instanceof_cause()

    monkeypatch.setattr(launcher.ray, "get", get)
    with pytest.raises(MachineError, match=r"vllm-0: this machine is out of .*: No space left on"):
        launcher.get(None, "vllm-0", 1.0)


class FailingDevice:
    """A worker whose device fails."""

    error: Exception

    def run(self, method: str) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access"), LostRankError, "its dev"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), LostRankError, "its device"),
        (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError, "CUDA out"),
        (torch.AcceleratorError("CUDA error: out of memory"), torch.AcceleratorError, "CUDA er"),
        (RuntimeError("a bug"), RuntimeError, "a bug"),
    ],
)
def test_a_rank_whose_device_fails_is_lost(error, raised, said) -> None:
    FailingDevice.error = error
    rank = launcher.RankActor(FailingDevice)
    with pytest.raises(raised, match=said):
        rank.run("fit")
    with pytest.raises(type(error)):  # a start that fails is no loss
        rank.run("init_model")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_rank_without_memory_says_what_to_type(error, monkeypatch) -> None:
    def get(*_: object, **__: object) -> None:
        raise ray.exceptions.RayTaskError("fit", "Traceback …", error).as_instanceof_cause()

    monkeypatch.setattr(launcher.ray, "get", get)
    with pytest.raises(MachineError, match=r"^actor rank 0: .*memory.*\. Make batches smaller"):
        launcher.get(None, "actor rank 0", 1.0)
