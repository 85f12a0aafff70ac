"""The folder of a run: held by one process at a time, and by the files of one run.

A file `running.json` names the holder and shows by its time of change that it lives. A holder on
this machine is looked up by its process id, so that a run that was killed frees its folder at once;
one on another machine counts as gone when it has been silent for a minute.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from openrlhf.config.common import CheckpointConfig
from openrlhf.distributed.manifest import write_json
from openrlhf.errors import ConfigError

HOLDER = "running.json"
FINISHED = "finished.json"  # in a run folder whose model is that of the last step
BEAT_S = 10.0
STALE_S = 60.0  # without a beat, until a holder on another machine counts as gone
START_TOLERANCE_S = 2.0  # the system's clock of process starts may be corrected meanwhile

RECORDS = ("config.yaml", "metrics.jsonl", "rollouts", FINISHED)
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"),
    *("adapter_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "chat_template*", "README.md", "policy"),
)


@contextmanager
def holding_folders(config: CheckpointConfig) -> Iterator[None]:
    """Hold the run folder, and the checkpoint root where the run uses it, until the block ends.

    Raises ConfigError where another run holds one of them.
    """
    with holding(Path(config.output_dir), "--save_path"):
        if config.uses_root and not _is_same(config.output_dir, config.path):
            with holding(Path(config.path), "--ckpt_path"):
                yield
        else:
            yield


def _is_same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


@contextmanager
def holding(folder: Path, flag: str) -> Iterator[None]:
    """Hold one folder; `flag` names it in the error."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / HOLDER
    own = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }
    with _locked(folder):
        if (reason := why_held(folder)) is not None:
            raise ConfigError(f"{flag} {folder} is in use: {reason} Type another {flag}.")
        write_json(path, own)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(path, ended), name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        path.unlink(missing_ok=True)


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):  # the next beat may succeed
            os.utime(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes of this machine out of the block."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # network file systems cannot lock a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def why_held(folder: Path) -> str | None:
    """Return who else holds a folder, as a sentence; None where nobody does."""
    path = folder / HOLDER
    holder = read_json(path)
    if not isinstance(holder, dict):
        return None
    host, pid = holder["host"], holder["pid"]
    who = f"process {pid} on {host} runs there."
    if host == socket.gethostname():
        return f"{who} Wait for it, or end it." if _is_alive(holder) else None
    with tempfile.NamedTemporaryFile(dir=folder) as probe:  # by the clock of the file system
        silent_s = os.stat(probe.name).st_mtime - path.stat().st_mtime
    if silent_s > STALE_S:
        return None
    return (
        f"{who} It was last seen {silent_s:.0f} s ago; the folder of a run that is gone is free "
        f"after {STALE_S:.0f} s."
    )


def _is_alive(holder: Mapping[str, Any]) -> bool:
    """Return True if the holder's process runs; its id may belong to another one by now."""
    try:
        process = psutil.Process(holder["pid"])
        is_same = abs(process.create_time() - holder["started"]) < START_TOLERANCE_S
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def set_earlier_run_aside(folder: Path, *, keeps_model: bool) -> Path | None:
    """Move what an earlier run left in a folder to `aside-1` in it (or the next free number).

    With `keeps_model` its model stays: the new run reads from it. Logs stay, for each start has
    files of its own.
    """
    if not any((folder / name).exists() for name in ("metrics.jsonl", FINISHED)):
        return None
    patterns: Iterable[str] = RECORDS if keeps_model else (*RECORDS, *MODEL_FILES)
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return move_aside(folder, sorted(paths))


def move_aside(root: Path, paths: Iterable[Path]) -> Path:
    """Move files and folders to a new folder `aside-<n>` in `root`."""
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
