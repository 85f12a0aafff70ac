"""When a folder counts: files, sizes and SHA-256 sums in a manifest, and one rename at the end.

A writer fills `tmp-<name>`; `seal` flushes it, writes the manifest and gives it its name. A folder
whose manifest does not agree with its files, to the byte, is not taken. Knows files only: neither
what is in them nor how many processes wrote them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from openrlhf.errors import CheckpointError

MANIFEST = "manifest.json"
TEMPORARY = "tmp-"
CHUNK_BYTES = 1 << 22
MAX_THREADS = 8  # hashing lets go of the interpreter lock: files are read side by side


def seal(temporary: Path, final: Path, facts: Mapping[str, object]) -> None:
    """Flush a folder, write its manifest (`facts` beside the files), and give it its name.

    A folder that has the name already is replaced.
    """
    names = _files_in(temporary)
    files = {
        name: {"size": (temporary / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, _digests(temporary, names), strict=True)
    }
    for name in names:
        _flush(temporary / name)
    write_json(temporary / MANIFEST, {**facts, "files": files})
    for folder in [*temporary.rglob("*"), temporary]:
        if folder.is_dir():
            _flush(folder)
    if final.exists():
        replaced = final.with_name(f"{TEMPORARY}replaced-{final.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
        os.rename(temporary, final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.rename(temporary, final)
    _flush(final.parent)


def verify(path: Path, *, contents: bool = True) -> dict[str, Any]:
    """The manifest of a folder whose files are those it names; raises CheckpointError.

    `contents` reads every byte; without it the sizes have to do.
    """
    manifest = read_manifest(path)
    files = manifest["files"]
    found = set(_files_in(path))
    for name in sorted(found | set(files)):
        if name not in files:
            raise CheckpointError(f"{path / name} is not in the manifest.")
        size = (path / name).stat().st_size if name in found else None
        if size != files[name]["size"]:
            raise CheckpointError(
                f"{path / name}: {'missing' if size is None else f'{size} bytes'}, "
                f"the manifest says {files[name]['size']} bytes."
            )
    names = sorted(files) if contents else []
    for name, digest in zip(names, _digests(path, names), strict=True):
        if digest != files[name]["sha256"]:
            raise CheckpointError(f"{path / name} has changed since it was written.")
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a folder, nothing checked but its own form."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        names = [PurePosixPath(name) for name in manifest["files"]]
        is_sound = all(
            isinstance(entry["size"], int) and isinstance(entry["sha256"], str)
            for entry in manifest["files"].values()
        )
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is not a complete checkpoint: no {MANIFEST}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read ({error}).") from None
    if not is_sound or any(name.is_absolute() or ".." in name.parts for name in names):
        raise CheckpointError(f"{path / MANIFEST} names files outside its folder, or wrong sizes.")
    return manifest


def num_bytes(path: Path) -> int:
    """Size of all files of a folder; files that vanish meanwhile count nothing."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
    return total


def write_json(path: Path, content: object) -> None:
    """Write a JSON file that survives a power cut once its folder is flushed."""
    with path.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def _files_in(path: Path) -> list[str]:
    """Names of the files below a folder, relative; a link could point anywhere and is refused.

    Folders in it with a manifest of their own, and what becomes such a folder, are left out.
    """
    apart = [found.parent for found in path.rglob(MANIFEST) if found.parent != path]
    apart += path.glob(f"{TEMPORARY}*")
    entries = [
        entry
        for entry in sorted(path.rglob("*"))
        if entry != path / MANIFEST and not any(entry.is_relative_to(folder) for folder in apart)
    ]
    for entry in entries:
        if entry.is_symlink():
            raise CheckpointError(f"{entry} is a link: checkpoints hold plain files.")
    return [entry.relative_to(path).as_posix() for entry in entries if entry.is_file()]


def _digests(path: Path, names: Iterable[str]) -> list[str]:
    num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(_sha256, [path / name for name in names]))


def _sha256(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
