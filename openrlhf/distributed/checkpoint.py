"""Resumable checkpoints: DeepSpeed writes its files, one rename makes them real.

Everything goes to `tmp-<tag>`; when all ranks are done the main rank writes a manifest of names and
sizes and renames the folder. A folder without a manifest that agrees with its files is not a
checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from openrlhf.distributed import collectives
from openrlhf.errors import CheckpointError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MANIFEST = "manifest.json"
STATES = "states"


def save(
    engine: DeepSpeedEngine, directory: str | Path, tag: str, *, state: dict[str, object]
) -> Path:
    """Write the engine and `state` as `directory/tag`; all ranks must call. A checkpoint of that
    tag is replaced.
    """
    final, temporary = Path(directory) / tag, Path(directory) / f"tmp-{tag}"
    if _rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    collectives.barrier()
    engine.save_checkpoint(str(temporary), tag=STATES, client_state=state, save_latest=False)
    collectives.barrier()
    if _rank() == 0:
        commit(temporary, final)
    collectives.barrier()
    return final


def load(engine: DeepSpeedEngine, directory: str | Path, tag: str) -> dict[str, object]:
    """Restore the engine from `directory/tag`; answers the `state` saved with it."""
    path = Path(directory) / tag
    verify(path)
    loaded, state = engine.load_checkpoint(str(path), tag=STATES)
    if loaded is None:
        raise CheckpointError(f"{path} could not be loaded.")
    return state


def commit(temporary: Path, final: Path) -> None:
    """Seal a folder with a manifest, flush it, and give it its name."""
    sizes = _sizes(temporary)
    for name in sizes:
        _flush(temporary / name)
    (temporary / MANIFEST).write_text(json.dumps({"files": sizes}, indent=1))
    _flush(temporary / MANIFEST)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    _flush(final.parent)


def verify(path: Path) -> None:
    """Raise CheckpointError unless the manifest is there and every file has the size it names."""
    try:
        expected = json.loads((path / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a complete checkpoint: no {MANIFEST}.") from None
    found = _sizes(path)
    for name, size in expected.items():
        if found.get(name) != size:
            raise CheckpointError(
                f"{path / name}: {found.get(name)} bytes, the manifest says {size}."
            )


def _sizes(path: Path) -> dict[str, int]:
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != MANIFEST]
    return {str(file.relative_to(path)): file.stat().st_size for file in files}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
