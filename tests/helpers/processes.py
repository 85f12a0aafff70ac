"""Commands in processes of their own: started, watched, interrupted."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from openrlhf.utils.tracker import read_metrics
from tests.integration.heads import free_ports


def launched(command: str, template: str) -> list[str]:
    """The words before the flags; launchers are those of the Python that runs the tests."""
    [port] = free_ports(1)
    launcher, *words = template.format(port=port, module=f"openrlhf.cli.{command}").split()
    return [str(Path(sys.executable).parent / launcher), *words]


def environment() -> dict[str, str]:
    """What two processes on one CPU need: a thread each, and the launchers' own Python first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1"}


DEADLINE_S = 240.0
SFT_FLAGS = "--train_batch_size 8 --micro_train_batch_size 4 --max_epochs 1 --logging_steps 1"


@contextmanager
def started(words: list[str], **more: object) -> Iterator[subprocess.Popen[str]]:
    """A command that takes Ctrl-C, whatever this process does with it."""
    process = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **more,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_a_step(
    run_dir: Path, process: subprocess.Popen[Any], *, metric: str = "reward"
) -> None:
    deadline = time.monotonic() + DEADLINE_S
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or not any(metric in r for r in read_metrics(metrics)):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.5)


def saved_step(error: str, root: Path) -> int:
    """The step of a last line that says how to go on."""
    how = rf"it was saved in {root}\. To go on, type the same command with --load_checkpoint"
    found = re.search(rf"error: interrupted: step (\d+) is done, {how}\n", error)
    assert found, error[-3000:]
    assert (root / f"global_step{found[1]}" / "state.json").exists()
    return int(found[1])


def workers(title: str, *, of: int | None = None) -> list[psutil.Process]:
    """The living Ray workers of a class, which this process or that one has started."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # ended meanwhile
            if " ".join(process.cmdline()).startswith(f"ray::{title}"):
                found.append(process)
    return found


def ends(*pids: int) -> bool:
    """Whether processes end within some seconds; nobody may have waited for an orphan here."""
    deadline = time.monotonic() + 5
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(runs, pids))


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll until it is so."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


OF_CALLER = {
    "HF_HOME": "/caches/hf",
    "HF_TOKEN": "hf_token_of_mine",
    "HF_HUB_OFFLINE": "1",
    "HF_ENDPOINT": "http://mirror.example",
}
