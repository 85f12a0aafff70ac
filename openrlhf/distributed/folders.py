"""Folders on disk: when one counts, who holds it, and what is moved out of it.

A writer fills `tmp-<name>`; `seal` flushes it, writes the SHA-256 sums of its files into a manifest
and gives it its name. A folder whose files do not match its manifest, to the byte, is not read. The
folder of a run is held by one process at a time, by a lock on `running.json`, which the system, or
the file server, removes when the holder ends, however it ends.
"""

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from openrlhf.config.common import RunFolderConfig
from openrlhf.errors import CheckpointError, ConfigError
from openrlhf.utils.console import warn
from openrlhf.utils.memory import human_size
from openrlhf.utils.run_folder import ENDED_FILE, HOLDER_FILE, POLICY, RECORDS, holds_a_run

MANIFEST = "manifest.json"
TEMPORARY = "tmp-"
REMOVED = f"{TEMPORARY}removed-"
MAX_THREADS = 8  # hashing lets go of the interpreter lock: files are read side by side
MARGIN = 0.05  # of what is to be written: logs and rollouts grow meanwhile
ROOM = 0.5  # of the free host memory, for copies of what is saved
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# By the controllers of a line there, those of version 2 first: the limit, and what counts as used.
LIMITS = {
    "": ("memory.max", "anon", "shmem"),
    "memory": ("memory.limit_in_bytes", "total_rss", "total_shmem"),
}

Write = Callable[[], None]

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json")
MODEL_FILES = (
    *(*WEIGHT_FILES, "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*"),
    *("*processor_config.json", "README.md", POLICY),
)


def seal(temporary: Path, final: Path) -> None:
    """Flush a folder, write its manifest, and rename it to `final`, in place of a folder that has
    the name already.
    """
    write_json(temporary / MANIFEST, {"files": _digests(temporary)})
    flush(temporary)
    before = _without_its_name(final) if final.exists() else None
    temporary.rename(final)
    flush_one(final.parent)
    if before is not None:
        shutil.rmtree(before)


def verify(path: Path) -> None:
    """Raise CheckpointError if the files of a folder are not those of its manifest, to the byte."""
    try:
        files = dict(json.loads((path / MANIFEST).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {MANIFEST} cannot be read ({error!r})."
        ) from None
    found = _digests(path)
    for name in sorted(found.keys() | files.keys()):
        if found.get(name) != files.get(name):
            raise CheckpointError(f"{path / name} is not the file that was written.")


def remove(path: Path) -> None:
    """Remove a folder, which first loses the name that makes it count."""
    shutil.rmtree(_without_its_name(path))


def _without_its_name(path: Path) -> Path:
    torn = path.with_name(f"{REMOVED}{path.name}")
    shutil.rmtree(torn, ignore_errors=True)
    return path.rename(torn)


def remove_torn(path: Path) -> None:
    """Remove a folder that counts for nothing; one that is whole and whose name is free, as a kill
    between two names leaves it, gets its own.
    """
    final = path.with_name(path.name.removeprefix(REMOVED).removeprefix(TEMPORARY))
    if not final.exists() and (path / MANIFEST).exists():
        with suppress(CheckpointError, OSError):
            verify(path)
            path.rename(final)
            return
    shutil.rmtree(path)


def num_bytes(path: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def write_json(path: Path, content: object) -> None:
    """Write a JSON file that survives a power cut once its folder is flushed."""
    path.write_text(json.dumps(content))
    flush_one(path)


def save_tensors(content: Mapping[str, Any], path: Path) -> None:
    """Write tensors as a file; raise CheckpointError that says how much room they take, where torch
    speaks of an unexpected position.
    """
    try:
        with path.open("wb") as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:
        path.unlink(missing_ok=True)
        reason = error if isinstance(error, OSError) else error.__context__ or error
        tensors = [leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)]
        raise CheckpointError(
            f"{getattr(reason, 'strerror', None) or reason}: {path.name} takes "
            f"{human_size(sum(tensor.nbytes for tensor in tensors))}, "
            f"{human_size(free_bytes(path))} are free in {path.parent}."
        ) from None


def take_tensors(
    content: Mapping[str, Any],
    path: Path,
    *,
    num_sharing: int = 1,
    is_first: bool = True,
    free_at_start: int | None = None,
    free_now: int | None = None,
) -> Write:
    """Copy tensors to host memory; return the function that writes the copy as a file, as
    `save_tensors` does.

    Copies may take half of the free memory of a node: those of all models of the run and of the
    `num_sharing` ranks on the node. Else the tensors themselves are written at once, and the first
    of these ranks warns of it. `free_at_start`: free bytes before any model was copied; `free_now`:
    before any of these ranks copies its own.
    """
    tensors = [leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)]
    free_now = free_memory() if free_now is None else free_now
    free_at_start = max(free_now, free_at_start or 0)
    num_copied = free_at_start - free_now  # bytes of the other models
    num_bytes = num_sharing * sum(tensor.nbytes for tensor in tensors) + num_copied
    if num_bytes > ROOM * free_at_start:
        if is_first:
            warn(
                f"the step waits while {path} is written: copies take "
                f"{human_size(num_bytes)}, more than half of the free memory of "
                f"{socket.gethostname()} ({human_size(free_at_start)})"
            )
        save_tensors(content, path)
        return nothing
    copy = tree_map_only(torch.Tensor, lambda t: t.detach().to("cpu", copy=True), content)
    return partial(save_tensors, copy, path)


def nothing() -> None:
    """Write nothing: it is written already, or another rank does."""


def free_memory() -> int:
    """Return the free bytes of host memory, or of the container or job that this process is
    limited to.
    """
    free: int = psutil.virtual_memory().available
    lines = OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else []
    for _, kind, path in (line.split(":", 2) for line in lines):
        if kind not in LIMITS:
            continue
        limit, *uses = LIMITS[kind]
        own = CGROUPS / kind / path.lstrip("/")
        for group in (own, *own.parents):
            with suppress(OSError, ValueError, KeyError):  # it has no limit
                room = int((group / limit).read_text())
                used = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
                free = min(free, room - sum(int(used[name]) for name in uses))
    return free


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that `path`, which need not exist, is or would be on."""
    parent = next(part for part in (path, *path.absolute().parents) if part.exists())
    return shutil.disk_usage(parent).free


def has_room(path: Path, num_bytes: float) -> bool:
    """Return True if the disk of `path` has room for so many bytes, and some more."""
    return free_bytes(path) >= (1 + MARGIN) * num_bytes


def flush(path: Path) -> None:
    """Make a file, or a folder and all that is in it, survive a power cut."""
    for entry in [*path.rglob("*"), path]:
        flush_one(entry)


def flush_one(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digests(path: Path) -> dict[str, str]:
    """Return the sums of the files below a folder by their relative names."""
    files = [file for file in path.rglob("*") if file.is_file() and file != path / MANIFEST]
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        names = [file.relative_to(path).as_posix() for file in files]
        return dict(zip(names, pool.map(_sha256, files), strict=True))


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def holding_folders(config: RunFolderConfig) -> Iterator[None]:
    """Hold the folders that the run writes to until the block ends.

    Raises ConfigError where another run holds one of them.
    """
    with ExitStack() as held:
        for flag, path in config.folders.items():
            held.enter_context(holding(Path(path), flag))
        yield


@contextmanager
def holding(folder: Path, flag: str) -> Iterator[None]:
    """Hold one folder; `flag` names it in the error. Its lock ends with this process, and children
    do not inherit it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / HOLDER_FILE
    with path.open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = read_json(path) or {"pid": "?", "host": "?"}
            raise ConfigError(
                f"{flag} {folder} is in use: process {holder['pid']} on {holder['host']} runs "
                f"there. Wait for it, or end it. Type another {flag}."
            ) from None
        except OSError as error:  # a network file system without locks
            warn(f"{folder} cannot be locked ({error}): start no second run in it")
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def set_earlier_run_aside(folder: Path, *, keeps_model: bool) -> Path | None:
    """Move what an earlier run left in a folder to `aside-1` in it (or the next free number).

    With `keeps_model` its model stays: the new run reads from it. Logs stay, for each start has
    files of its own.
    """
    if not holds_a_run(folder):
        (folder / ENDED_FILE).unlink(missing_ok=True)
        return None
    patterns = RECORDS if keeps_model else (*RECORDS, *MODEL_FILES)
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return move_aside(folder, sorted(paths))


def move_aside(root: Path, paths: Sequence[Path]) -> Path | None:
    """Move files and folders to a new folder `aside-<n>` in `root`; None if there are none."""
    if not paths:
        return None
    number = next(n for n in itertools.count(1) if not (root / f"aside-{n}").exists())
    aside = root / f"aside-{number}"
    aside.mkdir()
    for path in paths:
        path.rename(aside / path.name)
    return aside


def read_json(path: Path) -> Any:
    """Return the content of a file; None if there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
