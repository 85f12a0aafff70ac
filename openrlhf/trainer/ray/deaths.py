"""Ray's own processes on this machine, and how a process that has died is named."""

import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import ray

from openrlhf.errors import EngineError

RAY_PROCESSES = {"raylet": "raylet", "gcs_server": "GCS"}  # without which no run goes on
GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
NUM_LINES = 3  # of a log
# Lines of Ray and of vLLM about what goes well.
NOISE = re.compile(r"\[[^\]]* [DIW] \d+ \d+\]|:\w+:|\S+ \S+ (DEBUG|INFO) ")
# What faulthandler writes of a signal that a process cannot outlive.
CRASHES = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating-point exception": signal.SIGFPE,
}


def ray_processes() -> dict[str, psutil.Process]:
    """Return this process's raylet and the cluster's GCS by name, as far as they run here."""
    node = ray._private.worker._global_node
    # Another raylet here is another node, in a cluster that only plays several machines.
    own = f"--raylet_socket_name={node.raylet_socket_name}"
    found = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        name, words = process.info["name"], process.info["cmdline"] or ()
        is_ours = own in words if name == "raylet" else any(node.session_name in w for w in words)
        if name in RAY_PROCESSES and is_ours:
            found[f"Ray's {RAY_PROCESSES[name]}"] = process
    return found


def is_dead(process: psutil.Process) -> bool:
    """Return True once a process has ended."""
    try:
        return not process.is_running() or process.status() in GONE
    except psutil.NoSuchProcess:
        return True


def death_of_ray(who: str, process: psutil.Process) -> EngineError:
    """Return the error for one of Ray's own processes that has died."""
    try:
        code = process.wait(timeout=0)  # of a child; negative for a signal
    except psutil.Error:
        code = None
    how = "ended" if code is None else f"exited with code {code}"
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    name = next(name for name, title in RAY_PROCESSES.items() if who.endswith(title))
    return EngineError(f"{who} died: pid {process.pid} {how}{last_lines(folder / f'{name}.err')}")


def death_of_worker(text: str, who: str, log: str) -> str:
    """Return a sentence about a rank or an engine whose process has died, by what Ray says of it,
    without its guesses; `log` begins the names of its logs.
    """
    pid = re.search(r"^\s*pid: (\d+)", text, re.MULTILINE)
    file = latest_log(log)
    said = text_of(file)
    crash = re.search(r"^Fatal Python error: (.+?)$", said, re.MULTILINE)
    code = re.search(r"exit code (\d+)", text)
    if crash:
        how = f"was ended by {CRASHES[crash[1]].name}" if crash[1] in CRASHES else crash[1]
    elif "SIGTERM" in text and "connection error" not in text:
        how = "was ended by SIGTERM"
    elif "connection error" in text:  # it could not say a word
        how = "was killed by SIGKILL, as for lack of memory"
    elif code:
        how = f"exited with code {code[1]}"
    else:
        return f"{who} died: {text.splitlines()[-1].strip()}"
    own = f"pid {pid[1]} {how}" if pid else how
    return f"{who} died: {own}{last_lines(file)}"


def latest_log(log: str) -> Path | None:
    """Return the log that was written to last of those whose names begin so."""
    written: dict[Path, float] = {}
    for file in Path(log).parent.glob(f"{Path(log).name}.*log"):
        with suppress(OSError):  # it is gone meanwhile
            written[file] = file.stat().st_mtime
    return max(written, key=written.__getitem__, default=None)


def text_of(path: Path | None) -> str:
    """Return the text of a log; empty without one."""
    try:
        return path.read_text(errors="replace") if path else ""
    except OSError:
        return ""


def last_lines(path: Path | None) -> str:
    """Return the end of a log as the end of a sentence; empty without any."""
    lines = [line.strip() for line in text_of(path).splitlines()]
    told = " | ".join([line for line in lines if line and not NOISE.match(line)][-NUM_LINES:])
    return f". The end of {path}: {told}" if told else ""
