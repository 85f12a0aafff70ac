"""The checkpoints of one run under one root: `global_step<N>` and, beside it, `global_step<N>_hf`;
`best_global_step<N>_hf` is the model of the best evaluation, which no rotation removes.

One process acts for all (the main rank, or a controller): it stages a step, others fill the staged
folders, it commits them. The latest is computed from what verifies, never pointed to. What is in
the folders, when one is due and who fills them is not known here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.distributed import manifest
from openrlhf.distributed.export import library_versions
from openrlhf.distributed.rotation import Entry, superfluous
from openrlhf.distributed.run_folder import move_aside
from openrlhf.errors import CheckpointError
from openrlhf.utils.logging import warn

STATE = "state.json"
SPACE_FACTOR = 1.2  # room to have before a save, in sizes of the last one
GIB = 1024**3
_NAME = re.compile(r"global_step(\d+)(_hf)?")
_BEST = "best_global_step*_hf"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was verified to the byte."""

    path: Path
    step: int
    state: dict[str, Any]  # what the run noted of itself, as JSON


@dataclass(frozen=True)
class Staged:
    """Folders to fill; nothing in them counts before the commit."""

    step: int
    states: Path  # what a resumed run needs; becomes global_step<N>
    export: Path  # a Hugging Face model; becomes global_step<N>_hf


class CheckpointStore:
    """Stages, commits, finds and rotates; every method is for one process alone."""

    def __init__(self, root: Path, *, max_num: int, max_gib: float) -> None:
        self.root = root
        self.max_num = max_num
        self.max_gib = max_gib

    def remove_torn(self) -> None:
        """Remove what a run that died left half written."""
        for pattern in ("global_step*", "replaced-*", _BEST):
            for path in self.root.glob(f"{manifest.TEMPORARY}{pattern}"):
                shutil.rmtree(path)

    def latest(self) -> Saved | None:
        """The checkpoint of the highest step that verifies; damaged ones are named and passed."""
        for entry in reversed(self.entries()):
            if entry.states is None:
                continue
            try:
                return self._read(entry.states, entry.step)
            except CheckpointError as error:
                warn(f"{error} Checkpoint {entry.states.name} is damaged and passed over.")
        return None

    def set_aside(self, *, after_step: int) -> Path | None:
        """Move checkpoints of later steps to a folder of their own, where no rotation looks.

        They are of another run, or of a way this run does not take again; names and rotation go
        by step, so they must not stand among its own.
        """
        later = [p for entry in self.entries() if entry.step > after_step for p in entry.paths]
        return self._move_aside(later)

    def set_best_aside(self) -> Path | None:
        """The same for the best model, which is one by another measure or of another run."""
        return self._move_aside(sorted(self.root.glob(_BEST)))

    def _move_aside(self, paths: Sequence[Path]) -> Path | None:
        return move_aside(self.root, paths) if paths else None

    def stage(self, step: int) -> Staged:
        """Empty folders for the checkpoint of a step; raises where the disk has no room for one."""
        self.root.mkdir(parents=True, exist_ok=True)
        entries = self.entries()
        needed = int(SPACE_FACTOR * entries[-1].num_bytes) if entries else 0
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise CheckpointError(
                f"{self.root} has {free / GIB:.2f} GB free, a checkpoint needs "
                f"{needed / GIB:.2f} GB. Make room, or lower --max_ckpt_num."
            )
        self.discard(step)
        states, export = (self.root / f"{manifest.TEMPORARY}{name}" for name in _names(step))
        states.mkdir()
        return Staged(step, states, export)

    def commit(self, staged: Staged, state: Mapping[str, object] | None) -> None:
        """Make the staged folders count; `state` is what a resumed run reads, None where it could
        not resume and only the export is kept.

        The export goes first: a run that dies between the two makes it again.
        """
        states, export = (self.root / name for name in _names(staged.step))
        facts = {"step": staged.step, "libraries": library_versions()}
        if staged.export.exists():
            manifest.seal(staged.export, export, facts)
        if state is None:
            shutil.rmtree(staged.states)
            manifest.verify(export, contents=False)
            return
        manifest.write_json(staged.states / STATE, state)
        manifest.seal(staged.states, states, facts)
        manifest.verify(states, contents=False)

    def discard(self, step: int) -> None:
        """Remove what was staged for a step."""
        for name in _names(step):
            shutil.rmtree(self.root / f"{manifest.TEMPORARY}{name}", ignore_errors=True)

    def rotate(self) -> None:
        """Remove the oldest checkpoints beyond the budget; the newest stays whatever its size."""
        max_bytes = self.max_gib * GIB
        for entry in superfluous(self.entries(), max_num=self.max_num, max_bytes=max_bytes):
            for path in entry.paths:
                # A folder that loses its files one by one must not look like a checkpoint.
                doomed = path.rename(path.with_name(f"{manifest.TEMPORARY}{path.name}"))
                shutil.rmtree(doomed)

    def stage_best(self, step: int) -> Path:
        """Where to write the model of a step that is the best so far."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.discard_best(step)
        return self.root / f"{manifest.TEMPORARY}{_best_name(step)}"

    def commit_best(self, step: int, facts: Mapping[str, object]) -> None:
        """Make the staged model the best one; the one before is removed afterwards."""
        final = self.root / _best_name(step)
        facts = {**facts, "step": step, "libraries": library_versions()}
        manifest.seal(self.root / f"{manifest.TEMPORARY}{_best_name(step)}", final, facts)
        for path in self.root.glob(_BEST):
            if path != final:
                shutil.rmtree(path.rename(path.with_name(f"{manifest.TEMPORARY}{path.name}")))

    def discard_best(self, step: int) -> None:
        """Remove what was staged as the best model."""
        staged = self.root / f"{manifest.TEMPORARY}{_best_name(step)}"
        shutil.rmtree(staged, ignore_errors=True)

    def best(self) -> dict[str, Any] | None:
        """What was noted of the best model; None where there is none that is whole."""
        found = []
        for path in self.root.glob(_BEST):
            try:
                found.append(manifest.verify(path, contents=False))
            except CheckpointError as error:
                warn(f"{error} The best model {path.name} is damaged and passed over.")
        return max(found, key=lambda facts: int(facts["step"]), default=None)

    def find(self, step: int) -> Path | None:
        """Return the folder that keeps a step, a model before resumable states, if there is one."""
        names = (_best_name(step), *reversed(_names(step)))
        return next((self.root / name for name in names if (self.root / name).is_dir()), None)

    def entries(self) -> list[Entry]:
        """What stands under the root, by step."""
        found: dict[int, dict[bool, Path]] = {}
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if path.is_dir() and (match := _NAME.fullmatch(path.name)):
                found.setdefault(int(match[1]), {})[match[2] is not None] = path
        return [
            Entry(
                step,
                paths.get(False),
                paths.get(True),
                sum(map(manifest.num_bytes, paths.values())),
            )
            for step, paths in sorted(found.items())
        ]

    def _read(self, path: Path, step: int) -> Saved:
        facts = manifest.verify(path)
        if facts.get("step") != step:
            raise CheckpointError(f"{path} holds step {facts.get('step')}.")
        try:
            state = json.loads((path / STATE).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / STATE} cannot be read ({error}).") from None
        return Saved(path, step, state)


def _names(step: int) -> tuple[str, str]:
    return f"global_step{step}", f"global_step{step}_hf"


def _best_name(step: int) -> str:
    return f"best_global_step{step}_hf"
