"""When a folder counts: files and their SHA-256 sums in a manifest, and one rename at the end.

A writer fills `tmp-<name>`; `seal` flushes it, writes the manifest and gives it its name. A folder
whose files do not match its manifest, to the byte, is not read. Knows files only: neither what is
in them nor how many processes wrote them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openrlhf.errors import CheckpointError

MANIFEST = "manifest.json"
TEMPORARY = "tmp-"
MAX_THREADS = 8  # hashing lets go of the interpreter lock: files are read side by side


def seal(temporary: Path, final: Path, facts: Mapping[str, object]) -> None:
    """Flush a folder, write its manifest (`facts` beside the files), and rename it to `final`, in
    place of a folder that has the name already.
    """
    write_json(temporary / MANIFEST, {**facts, "files": _digests(temporary)})
    flush(temporary)
    torn = _torn(final)
    if final.exists():
        final.rename(torn)
    temporary.rename(final)
    shutil.rmtree(torn, ignore_errors=True)
    flush_one(final.parent)


def verify(path: Path) -> dict[str, Any]:
    """Return the manifest of a folder; raise CheckpointError if its files are not those it names,
    to the byte.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: {MANIFEST} cannot be read ({error!r})."
        ) from None
    found = _digests(path)
    for name in sorted(found.keys() | files.keys()):
        if found.get(name) != files.get(name):
            raise CheckpointError(f"{path / name} is not the file that was written.")
    return manifest


def remove(path: Path) -> None:
    """Remove a folder, which first loses the name that makes it count."""
    shutil.rmtree(path.rename(_torn(path)))


def _torn(path: Path) -> Path:
    """Return a free name beside a folder for what no longer counts."""
    torn = path.with_name(f"{TEMPORARY}removed-{path.name}")
    shutil.rmtree(torn, ignore_errors=True)
    return torn


def num_bytes(path: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def write_json(path: Path, content: object) -> None:
    """Write a JSON file that survives a power cut once its folder is flushed."""
    path.write_text(json.dumps(content))
    flush_one(path)


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
    """Return the sums of the files below a folder by their relative names; a link could point
    anywhere and is refused.
    """
    files = []
    for entry in sorted(path.rglob("*")):
        if entry.is_symlink():
            raise CheckpointError(f"{entry} is a link: checkpoints hold plain files.")
        if entry.is_file() and entry != path / MANIFEST:
            files.append(entry)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        names = [file.relative_to(path).as_posix() for file in files]
        return dict(zip(names, pool.map(_sha256, files), strict=True))


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
