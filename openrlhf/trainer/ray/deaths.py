"""Ray's own processes on this machine, and how a process that has died is named."""

import re
import signal
from pathlib import Path

import psutil
import ray

from openrlhf.errors import WITH_ITS_NODE, EngineError
from openrlhf.trainer.ray.restarts import NEVER_RAN
from openrlhf.utils.framework_logs import last_lines, latest_log, text_of

RAY_PROCESSES = {"raylet": "raylet", "gcs_server": "GCS"}  # without which no run goes on
GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
# What faulthandler writes of a signal that a process cannot outlive.
CRASHES = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating-point exception": signal.SIGFPE,
}
# What Ray says of a death, and what that means; the first that is found counts.
ENDS = {
    f"{NEVER_RAN}.*": r"\g<0>",
    "low on memory": "was ended by Ray because the memory of its node was full (type fewer ranks "
    "or engines, or a smaller --micro_train_batch_size)",
    "connection error": "ended without a word (SIGKILL, or an exit of native code)",
    "SIGTERM": "was ended by SIGTERM",
    r"exit code (\d+)": r"exited with code \1",
    "node has died|node it was running on is dead": WITH_ITS_NODE,
    "is unavailable": "cannot be reached by Ray",
}
# Ray's memory kill names all that it ended.
PID = re.compile(r"^\s*pid: (\d+)|\(pid=(\d+), ip=|Selected to kill: .*\bpid=(\d+)", re.MULTILINE)
NODE = re.compile(r"^\s*ip: (\S+)", re.MULTILINE)


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


def num_ray_processes() -> int:
    """Return the number of those that run here while none is dead."""
    return 2 if ray._private.worker._global_node.is_head() else 1


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
    """Return a sentence about the death of a rank or an engine, made from Ray's `text` and without
    its guesses; `log` begins the names of its logs.
    """
    file = latest_log(log)
    crash = re.search(r"^Fatal Python error: (.+?)$", text_of(file), re.MULTILINE)
    ends = (found.expand(how) for said, how in ENDS.items() if (found := re.search(said, text)))
    how, pid, node = next(ends, ""), pid_in(text), NODE.search(text)
    if crash:
        how = f"was ended by {CRASHES[crash[1]].name}" if crash[1] in CRASHES else crash[1]
    elif not how:
        pid, how = pid and f"{pid}:", text.splitlines()[-1].strip()
    where = f" on node {node[1]}" if node and " on node " not in who else ""
    return f"{who}{where} died: {f'{pid} {how}'.strip()}{last_lines(file)}"


def pid_in(text: str) -> str:
    """Return the process that Ray speaks of, as "pid 7"; empty if it names none, or several."""
    pids = {"".join(numbers) for numbers in PID.findall(text)}
    return f"pid {pids.pop()}" if len(pids) == 1 else ""
