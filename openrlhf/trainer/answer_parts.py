"""Results of a long job on disk while it runs, so that a killed one goes on where it stopped.

`<output>.parts/` holds one file for each rank, a line for each finished item, and a key of the
settings and data they belong to. All ranks must see the folder. Knows nothing of what an item is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from openrlhf.errors import ConfigError

KEY_FILE = "key.json"
Rows = list[dict[str, Any]]  # what one item gave


class AnswerParts:
    """The finished items of one output file; `prepare` is called by one rank before the others
    look.
    """

    def __init__(self, output: Path, *, rank: int) -> None:
        self.folder = Path(f"{output}.parts")
        self._file = self.folder / f"rank{rank}.jsonl"

    def prepare(self, key: str) -> str | None:
        """Keep parts with the same key, throw others away; answers what a person should know."""
        key_file = self.folder / KEY_FILE
        found = _read_key(key_file)
        if found == key:
            return f"going on with what is done in {self.folder}"
        had_parts = any(self.folder.glob("rank*.jsonl"))
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        write_lines(key_file, [json.dumps(key)])
        if had_parts:
            return f"{self.folder} belongs to other settings or data: starting anew"
        return None

    def read(self) -> dict[int, Rows]:
        """The rows of every finished item, whichever rank did it."""
        found: dict[int, Rows] = {}
        for path in sorted(self.folder.glob("rank*.jsonl")):
            found.update(_entries(path))
        return found

    def drop_torn_line(self) -> None:
        """Cut off what a killed process left half written in this rank's file."""
        if self._file.exists():
            whole = self._file.read_bytes().rpartition(b"\n")
            os.truncate(self._file, len(whole[0]) + len(whole[1]))

    def add(self, results: Mapping[int, Rows]) -> None:
        """Note finished items; they survive the process from here on."""
        with self._file.open("a", encoding="utf-8") as file:
            for index, rows in results.items():
                file.write(json.dumps([index, rows]) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Clean up once the output is written."""
        shutil.rmtree(self.folder)


def check_writable(output: Path) -> None:
    """Raise ConfigError for an output that could not be written in the end."""
    if output.is_dir():
        raise ConfigError(f"--output_path is a folder: {output}. Type the name of a file.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output_path {output} cannot be written: {error.strerror}. Type another path."
        ) from error
    if not os.access(output.parent, os.W_OK):
        raise ConfigError(
            f"--output_path {output} cannot be written: {output.parent} is read-only. "
            "Type another path."
        )


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file that is there whole or not at all, whatever happens meanwhile."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_key(path: Path) -> object:
    return json.loads(path.read_text()) if path.exists() else None


def _entries(path: Path) -> Iterator[tuple[int, Rows]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):  # else a process was killed while it wrote
                index, rows = json.loads(line)
                yield index, rows
