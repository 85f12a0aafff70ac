"""The folder of a run: held by one process at a time, and by the files of one run.

The holder keeps a lock on `running.json`, which names it. The system, or the file server, removes
the lock when the holder ends, however it ends.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openrlhf.config.common import CheckpointConfig
from openrlhf.errors import ConfigError
from openrlhf.utils.logging import warn

HOLDER = "running.json"
FINISHED = "finished.json"  # in a run folder whose model is that of the last step

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
        is_same = os.path.realpath(config.output_dir) == os.path.realpath(config.path)
        if config.uses_root and not is_same:
            with holding(Path(config.path), "--ckpt_path"):
                yield
        else:
            yield


@contextmanager
def holding(folder: Path, flag: str) -> Iterator[None]:
    """Hold one folder; `flag` names it in the error. Its lock ends with this process, and children
    do not inherit it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / HOLDER
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
    if not any((folder / name).exists() for name in ("metrics.jsonl", FINISHED)):
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
