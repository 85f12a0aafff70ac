"""The checkpoints of a run: what it goes on from, and how all ranks write one together.

Under one root stand `global_step<N>` (what a run goes on from), `global_step<N>_hf` (the model of
that step) and `best_global_step<N>_hf` (the model of the best evaluation, which no rotation
removes). The main rank stages, commits and rotates; every rank writes its part; what goes wrong on
one is known to all before anything is decided. The latest is computed from what verifies, never
pointed to. A save that fails costs a line, several in a row the run. What is in a checkpoint is the
caller's business.

A save copies states to host memory, while the run waits; a thread of each rank writes the copy, and
that of the main rank commits once all are written. One save is under way at a time.
"""

import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from openrlhf.config.cli import check_settings, read_resolved, settings_of
from openrlhf.config.common import CheckpointConfig, TrainingRunConfig
from openrlhf.config.local_paths import MODEL_FILES, reads_from
from openrlhf.distributed import folders
from openrlhf.distributed.collectives import (
    PATIENCE,
    RANK_TIMEOUT_S,
    all_gather_object,
    all_or_none,
    gather_by_store,
    is_main,
    on_main,
)
from openrlhf.distributed.folders import MARGIN, Write, free_bytes, has_room
from openrlhf.errors import CheckpointError, ConfigError, DataError, EngineError, LostRankError
from openrlhf.utils import stopping
from openrlhf.utils.console import notice, warn
from openrlhf.utils.memory import human_size
from openrlhf.utils.progress import progress, saying_what_is_awaited
from openrlhf.utils.run_folder import CONFIG_FILE, ENDED_FILE, read_ending
from openrlhf.utils.threads import start_thread, yield_cores

STATE = "state.json"
RUN = "run"  # the run's own part of it
GIB = 1024**3
MAX_FAILED_SAVES = 3  # in a row
BRIEF_S = 20.0  # for a save whose ranks may be gone, too
_NAME = re.compile(r"global_step(\d+)(?:_hf)?")
_BEST = "best_global_step*_hf"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was verified to the byte.

    Example: `Saved(Path("ckpt/global_step20"), 20, {"run": {...}, "data": {...}})`
    """

    path: Path
    step: int
    state: dict[str, Any]  # what the run noted of itself, as JSON


class Resumable(Protocol):
    """A run that is saved, and goes on, from between two steps."""

    global_step: int

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position of the run, as JSON."""

    def take(self, folder: Path) -> Write:
        """Copy weights and states; return the function that writes the copy into `folder`, where
        parts may be written at once. All ranks call both.
        """

    def export(self, path: Path) -> None:
        """Write the model as transformers reads it; all ranks call."""


class CheckpointStore:
    """The folders under one root; every method is for one process alone."""

    def __init__(self, root: Path, *, max_num: int = 1, max_gib: float = math.inf) -> None:
        self.root = root
        self.max_num = max_num
        self.max_gib = max_gib

    def folders(self, step: int, *, prefix: str = "") -> tuple[Path, Path, Path]:
        """Return the folders of states, model and best model of a step, whether they exist or not;
        folders of the prefix `TEMPORARY` count for nothing before they are sealed.
        """
        name = f"{prefix}global_step{step}"
        best = f"{prefix}best_global_step{step}_hf"
        return self.root / name, self.root / f"{name}_hf", self.root / best

    def remove_torn(self) -> None:
        """Remove what a run that died left half written."""
        torn = self.root.glob(f"{folders.TEMPORARY}*global_step*")
        for path in sorted(torn, key=lambda path: path.name.startswith(folders.REMOVED)):
            folders.remove_torn(path)

    def latest(self) -> Saved | None:
        """Return the checkpoint of the highest step that verifies; damaged ones are named."""
        for step in reversed(self.steps()):
            path, *_ = self.folders(step)
            if not path.is_dir():
                continue
            try:
                return self.read(step)
            except (CheckpointError, OSError, ValueError) as error:
                warn(f"{error} Checkpoint {path.name} is damaged and passed over.")
        return None

    def read(self, step: int) -> Saved:
        """Return the checkpoint of a step; raise CheckpointError, OSError or ValueError where it
        does not verify.
        """
        path, *_ = self.folders(step)
        folders.verify(path)
        return Saved(path, step, json.loads((path / STATE).read_text()))

    def set_aside(self, *, after_step: int) -> Path | None:
        """Move checkpoints of later steps to a folder of their own, where no rotation looks.

        They are of another run, or of a way this run does not take again; names and rotation go
        by step, so they must not stand among its own.
        """
        later = [step for step in self.steps() if step > after_step]
        return folders.move_aside(self.root, [path for step in later for path in self.kept(step)])

    def set_best_aside(self) -> Path | None:
        """Move the best model away, which is one by another metric or of another run."""
        return folders.move_aside(self.root, sorted(self.root.glob(_BEST)))

    def stage(self, step: int) -> tuple[Path, Path, Path]:
        """Return folders to write what is kept of a step; that of the states exists. Nothing counts
        before it is sealed.
        """
        self.discard(step)
        staged = self.folders(step, prefix=folders.TEMPORARY)
        staged[0].mkdir(parents=True)
        return staged

    def commit(self, step: int, state: Mapping[str, object] | None) -> None:
        """Make the staged folders count; `state` is what a resumed run reads, None where it could
        not resume and only a model is kept. The best model takes the place of the one before.

        Models go first: a run that dies between the two writes it again.
        """
        states, export, best = self.folders(step, prefix=folders.TEMPORARY)
        if export.exists():
            self._seal(export)
        if best.exists():
            final = self._seal(best)
            for path in list(self.root.glob(_BEST)):
                if path != final:
                    folders.remove(path)
        if state is not None:
            folders.write_json(states / STATE, state)
            self._seal(states)
        self.discard(step)

    def discard(self, step: int) -> None:
        """Remove what was staged for a step."""
        for path in self.folders(step, prefix=folders.TEMPORARY):
            shutil.rmtree(path, ignore_errors=True)

    def rotate(self) -> None:
        """Remove the oldest checkpoints beyond the budget; the newest stays whatever its size."""
        kept_bytes = 0
        for number, step in enumerate(reversed(self.steps())):
            kept_bytes += self.num_bytes(step)
            if number and (number >= self.max_num or kept_bytes > self.max_gib * GIB):
                for path in self.kept(step):
                    folders.remove(path)

    def find(self, step: int) -> Path | None:
        """Return the folder that keeps a step, a model before resumable states, if there is one."""
        return next((path for path in reversed(self.folders(step)) if path.is_dir()), None)

    def best(self) -> Path | None:
        """Return the folder of the best model, if one is kept."""
        return next(self.root.glob(_BEST), None)

    def step_of(self, best: Path) -> int:
        """Return the step of a best model."""
        return int(best.name.removeprefix("best_global_step").removesuffix("_hf"))

    def model(self, step: int) -> Path | None:
        """Return the folder of the model of a step, if one is kept."""
        path = self.folders(step)[1]
        return path if path.is_dir() else None

    def steps(self) -> list[int]:
        """Return the steps of which something is kept, the best model apart."""
        paths = self.root.iterdir() if self.root.is_dir() else []
        matches = [_NAME.fullmatch(path.name) for path in paths if path.is_dir()]
        return sorted({int(match[1]) for match in matches if match})

    def run_dir(self) -> str | None:
        """Return the run folder that the latest states note; None without any."""
        files = [self.folders(step)[0] / STATE for step in reversed(self.steps())]
        states = filter(None, map(folders.read_json, files))
        return next((state.get("run_dir") for state in states), None)

    def num_bytes(self, step: int) -> int:
        """Return the size of what is kept of a step."""
        return sum(map(folders.num_bytes, self.kept(step)))

    def kept(self, step: int) -> list[Path]:
        """Return the folders of a step that exist, the best model's apart: states, then model."""
        return [path for path in self.folders(step)[:2] if path.is_dir()]

    def _seal(self, staged: Path) -> Path:
        final = self.root / staged.name.removeprefix(folders.TEMPORARY)
        folders.seal(staged, final)
        return final


@dataclass(frozen=True)
class DataIdentity:
    """The data that decides the order of samples; a run resumes on the same data only.

    Example: `DataIdentity("9f2c51", num_samples=960)`
    """

    fingerprint: str
    num_samples: int


@dataclass
class Save:
    """A save of the run's own state at a step, and the thread that writes it.

    Example: `Save(20, {"global_step": 20, "kl_coef": 0.01, ...})`
    """

    step: int
    content: Mapping[str, Any]
    thread: threading.Thread | None = None
    error: BaseException | None = None
    is_late: bool = False  # True once it took longer than a save may
    is_counted: bool = False  # True once it was counted, and named, as one that failed
    is_left: bool = False  # True where the run has ended without it

    @property
    def is_over(self) -> bool:
        """Return True once nothing more is written."""
        return self.thread is None or not self.thread.is_alive()

    def fail(self, error: BaseException) -> None:
        """Note why it failed."""
        self.error = error


class RunCheckpoints:
    """The checkpoints of this run, and the one it goes on from, if any; all ranks call alike."""

    def __init__(
        self,
        config: CheckpointConfig,
        data: DataIdentity,
        settings: Mapping[str, Any] | None = None,  # of this start, for the next one
    ) -> None:
        self.config = config
        self.store = CheckpointStore(
            Path(config.path), max_num=config.max_num, max_gib=config.max_mem
        )
        self.data = data
        self.saved: Saved | None = None  # what the run goes on from; `find_saved` finds it
        self.settings = dict(settings or {})
        self.length: Mapping[str, Any] = {}  # settings that say when the run ends
        self.limit_s = PATIENCE * RANK_TIMEOUT_S  # until a save that goes on has failed
        self.num_failed = 0  # saves in a row
        self.num_bytes = 0  # of a checkpoint: those of the last one, or what it will take
        self.under_way: Save | None = None
        self.saved_state: Mapping[str, Any] | None = None  # of the run, as last saved or loaded
        self.saved_step: int | None = None  # of the last states that this start has saved

    @property
    def resume_step(self) -> int | None:
        """Return the step the run goes on from; None: it starts new."""
        return None if self.saved is None else self.saved.step

    def last(self) -> Saved | None:
        """Return the last states that the run saved, or else goes on from, or earlier ones where
        these are damaged; None where there are none. Raise CheckpointError where all are damaged.
        """
        if self.last_step is None:
            return None
        try:
            return self.store.read(self.last_step)
        except (CheckpointError, OSError, ValueError) as error:
            if (earlier := self.store.latest()) is None:
                raise CheckpointError(f"{error} There is no other checkpoint.") from error
            return earlier

    @property
    def last_step(self) -> int | None:
        """Return the step of these states; None where there are none."""
        return self.resume_step if self.saved_step is None else self.saved_step

    def find_saved(self, command: TrainingRunConfig | None) -> None:
        """Find the checkpoint that the run goes on from; all ranks call. Raises as
        `open_checkpoints` does.
        """
        if not self.config.load_enable:
            return
        self.saved = saved = on_main(self.store.latest)
        if saved is None:
            if is_main():
                notice(f"no checkpoint in {self.config.path}: starting new")
            return
        other, own = saved.state.get("run_dir"), str(Path(self.config.output_dir).resolve())
        # A copy lies elsewhere, and is the run of whoever goes on with it.
        is_copy = saved.state.get("root") not in (None, str(self.store.root.resolve()))
        if other not in (None, own) and Path(other).exists() and not is_copy:
            raise ConfigError(
                f"{saved.path} is of the run in {other}, not of --save_path {own}. Type "
                f"--save_path {other} to go on with that run, or a --ckpt_path for this one alone."
            )
        if (found := saved.state["data"]) != asdict(self.data):
            raise DataError(
                f"The data changed since {saved.path} was written: {found['num_samples']} samples "
                f"then, {self.data.num_samples} now, and not the same tokens or columns. Bring "
                "the old data (and template) back, or leave --load_checkpoint out."
            )
        if is_main():
            place = saved.state[RUN].get("place", f"step {saved.step}")
            notice(f"resuming from {saved.path}: {place}")
        if command is not None:
            kept = check_settings(command, saved.state["settings"], path=saved.path)
            self.settings |= {path: saved.state["settings"][path] for path in kept}
            for line in dict.fromkeys(kept.values()):  # one flag may be two models' setting
                warn_on_main(line)

    @property
    def is_on(self) -> bool:
        """Return True if the run writes checkpoints at all."""
        config = self.config
        return config.save_steps > 0 and (config.save_hf or not config.disable_ds)

    def find(self, step: int) -> Path | None:
        """Return the folder of a step; None if this run does not use the checkpoint root."""
        return self.store.find(step) if self.config.uses_root else None

    def is_done(self, run_dir: Path) -> bool:
        """Return True if nothing is left to do: a run that was to last as long ended at the step of
        the checkpoint, and `run_dir` has its model. A folder that is written to again is not done.
        """

        def look() -> bool:
            if read_ending(run_dir) == self._finish(self.resume_step):
                notice(f"that run had finished: its model is in {run_dir}, nothing is left to do")
                return True
            if self.saved is not None:
                (run_dir / ENDED_FILE).unlink(missing_ok=True)
            return False

        return on_main(look)

    def clear_folder(self, run_dir: Path, command: TrainingRunConfig) -> None:
        """Move what an earlier run left in `run_dir` aside, unless this run goes on from it; the
        main rank calls, once the models are loaded.
        """
        if self.saved is not None:
            return
        keeps_model = reads_from(command, run_dir)
        aside = folders.set_earlier_run_aside(run_dir, keeps_model=keeps_model)
        if aside is not None:
            what = "the records" if keeps_model else "the model and the records"
            notice(f"{what} of the run before in {run_dir} were moved to {aside}")

    def note_finished(self, run_dir: Path, step: int) -> None:
        """Note that `run_dir` holds the model of the last step; the main rank calls."""
        folders.write_json(run_dir / ENDED_FILE, self._finish(step))

    def is_due(self, run: Resumable, *, is_last: bool = False) -> bool:
        """Return True if it is time to save: every `--save_steps` steps, and at the end what was
        not saved yet.
        """
        if not self.is_on or run.global_step == 0:
            return False
        return not self.holds(run) if is_last else run.global_step % self.config.save_steps == 0

    def holds(self, run: Resumable) -> bool:
        """Return True if the run stands where it was last saved or loaded."""
        return self.saved_state == run.state_dict()

    def check_room(self, state_bytes: int, model_bytes: int) -> None:
        """Raise ConfigError where the disk has no room for a checkpoint: of states and a model of
        these sizes, as the config asks for them; all ranks call, before training.
        """
        if not self.is_on:
            return
        num_bytes = 0 if self.config.disable_ds else state_bytes
        num_bytes += model_bytes if self.config.save_hf else 0
        self.num_bytes = num_bytes
        if not on_main(lambda: has_room(self.store.root, num_bytes)):
            raise ConfigError(
                f"--ckpt_path {self.config.path} has {human_size(free_bytes(self.store.root))} "
                f"free, and a checkpoint takes {human_size(num_bytes)}; {MARGIN:.0%} more must be "
                "free, for logs and rollouts. Make room, or type the path of a folder on another "
                "disk."
            )

    def save(self, run: Resumable) -> None:
        """Copy what the config asks for; a thread writes and commits the copy. All ranks call, and
        `wait_for_save` before. A save fails while the one before it is still being written.
        """
        if (before := self.under_way) is not None:
            why = CheckpointError(f"that of step {before.step} is still being written.")
            self._count_failure(run.global_step, why)
            return
        step, content, has_states = run.global_step, run.state_dict(), not self.config.disable_ds
        root, run_dir = self.store.root.resolve(), Path(self.config.output_dir).resolve()
        state = {RUN: content, "data": asdict(self.data), "settings": self.settings}
        state |= {"run_dir": str(run_dir), "root": str(root)}
        state = json.loads(json.dumps(state))  # as it is now
        save = Save(step, content)
        try:
            with progress("saving a checkpoint"), self._saying_what_is_awaited(step):
                states, export, _ = on_main(lambda: self._stage(step))
                if self.config.save_hf:
                    all_or_none(partial(run.export, export))
                write = all_or_none(partial(run.take, states)) if has_states else folders.nothing
        except CheckpointError as error:
            on_main(lambda: self.store.discard(step))
            save.fail(error)
        else:
            work = partial(self._write, save, write, state if has_states else None)
            save.thread = start_thread(f"save {step}", work, save.fail)
        self.under_way = save

    def _stage(self, step: int) -> tuple[Path, Path, Path]:
        self.store.remove_torn()  # of a save whose ranks were lost
        if not has_room(self.store.root, self.num_bytes):
            raise CheckpointError(
                f"it takes {human_size(self.num_bytes)}, {human_size(free_bytes(self.store.root))} "
                f"are free in {self.config.path}, and {MARGIN:.0%} more must be."
            )
        return self.store.stage(step)

    def _write(self, save: Save, write: Write, state: Mapping[str, object] | None) -> None:
        """Write and commit what was taken; the thread of every rank calls."""
        yield_cores()
        store, step = self.store, save.step

        def commit() -> None:
            if save.is_left:  # the run has ended: its folder may be another's
                raise CheckpointError("the run ended before it was written.")
            store.commit(step, state)

        try:
            all_or_none(write, gather_by_store)
            all_or_none(lambda: commit() if is_main() else None, gather_by_store)
        except CheckpointError:
            all_or_none(lambda: store.discard(step) if is_main() else None, gather_by_store)
            raise
        if is_main():
            try:
                self.num_bytes = store.num_bytes(step)
                store.rotate()
            except OSError as problem:
                warn(f"old checkpoints could not be removed: {problem}")

    @property
    def is_written(self) -> bool:
        """Return True where this rank need not wait for a save."""
        return self.under_way is None or self.under_way.is_over

    def wait_for_save(self) -> tuple[int, Path] | None:
        """Wait for the save under way; return its step and folder, None where there is none or it
        failed, as one does that is waited for too long. All ranks call, main threads alone.

        Raises CheckpointError when saves failed several times in a row.
        """
        save = self.under_way
        if save is None:
            return None
        if self._is_over(save):
            self.under_way = None
            error = save.error
        else:
            error = self._lateness
        if error is not None and save.is_counted:
            return None
        if isinstance(error, CheckpointError):
            save.is_counted = True
            self._count_failure(save.step, error)
            return None
        if error is not None:
            raise error
        self.num_failed, self.saved_state = 0, save.content
        self.saved_step = self.saved_step if self.config.disable_ds else save.step
        return save.step, self.store.kept(save.step)[-1]

    def _count_failure(self, step: int, error: CheckpointError) -> None:
        self.num_failed += 1
        line = f"checkpoint of step {step} was not saved: {error} {self.last_in_words}"
        if self.num_failed >= MAX_FAILED_SAVES:
            raise CheckpointError(f"{line} It is failure {self.num_failed} in a row: stopping.")
        warn_on_main(f"{line} It is failure {self.num_failed} of {MAX_FAILED_SAVES} in a row.")

    @property
    def last_in_words(self) -> str:
        """Return the place of the last states, without a look at a disk that may be stalled."""
        if self.last_step is None:
            return "There is no other one."
        return f"The last one is {self.store.folders(self.last_step)[0]}."

    @property
    def _lateness(self) -> CheckpointError:
        return CheckpointError(
            f"it was not written in {self.limit_s:g} s ({PATIENCE:g} times --rank_timeout_s): "
            f"{self.config.path} takes no more. Look at its disk."
        )

    def _is_over(self, save: Save) -> bool:
        """Wait for a save, once, until it has to be over; return True if it is, on all ranks,
        which call.
        """
        self._wait(save, 0.0 if save.is_late else self.limit_s)
        save.is_late = not all(all_gather_object(save.is_over))
        return not save.is_late

    def _wait(self, save: Save, limit_s: float) -> None:
        if save.thread is not None:
            with progress("waiting for the checkpoint"), self._saying_what_is_awaited(save.step):
                save.thread.join(limit_s)

    def _saying_what_is_awaited(self, step: int) -> AbstractContextManager[None]:
        what = f"the checkpoint of step {step}, which is being written to {self.config.path}"
        return saying_what_is_awaited(what, warn_on_main)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Wait for a save under way where an error ends the block, and say so if it failed: not for
        ranks that are lost nor where a user waits, and not for long where a process failed.
        """
        try:
            yield
        finally:
            error, save = sys.exc_info()[1], self.under_way
            if save is not None:
                is_hopeless = save.is_counted or isinstance(error, LostRankError)
                save.is_left = is_hopeless or stopping.is_asked() or stopping.is_overdue()
                if not save.is_left:
                    self._see_off(save, BRIEF_S if isinstance(error, EngineError) else self.limit_s)

    def _see_off(self, save: Save, limit_s: float) -> None:
        """Wait for a save that no one asks for any more."""
        self._wait(save, 0.0 if save.is_late else limit_s)
        save.is_left = not save.is_over
        if save.error is not None or save.is_left:
            late = self._lateness if save.is_late else f"it took longer than {limit_s:g} s."
            why = save.error or late
            said = f"checkpoint of step {save.step} was not saved: {why} {self.last_in_words}"
            warn_on_main(said)

    def save_last(self, run: Resumable) -> tuple[tuple[int, Path] | None, str]:
        """Save a run that was asked to stop, even if it keeps no checkpoints, once the save under
        way has ended. Return what `wait_for_save` does, and a text: the state of the run, and how
        to go on.
        """
        config, done = self.config, f"step {run.global_step} is done"
        if run.global_step == 0:
            return None, "no step is done, and nothing was saved"
        if config.disable_ds:
            return None, f"{done}, nothing to go on from was saved (--disable_ds_ckpt)"
        try:
            if config.save_steps <= 0:
                on_main(self._take_root)
        except CheckpointError as error:
            return None, f"{done}, it could not be saved. {error}"
        saved = None
        if not self.holds(run):
            self.save(run)
            saved = self.wait_for_save()
            if saved is None:
                how = stopping.NOTHING_SAVED if self.last_step is None else self._to_go_on()
                return None, f"{done}, it could not be saved. {self.last_in_words} {how}"
        return saved, f"{done}, it was saved in {config.path}. {self._to_go_on()}"

    def how_to_go_on(self) -> str:
        """Return the last saved step of a run that ends outside of its loop, and how to go on."""
        is_used = self.config.save_steps > 0 or self.config.load_enable
        steps = [step for step in self.store.steps() if self.store.folders(step)[0].is_dir()]
        if not is_used or not steps:
            return stopping.NOTHING_SAVED
        return f"step {steps[-1]} was saved in {self.config.path}. {self._to_go_on()}"

    def _to_go_on(self) -> str:
        how = "" if self.config.load_enable else " with --load_checkpoint"
        return f"To go on, type the same command{how}"

    def save_best(self, step: int, export: Callable[[Path], None]) -> bool:
        """Keep the model that `export` writes as the best so far, in place of the one before;
        return True if it was saved. A failure costs a line.
        """
        save = self.under_way  # it may have staged the same step
        if save is not None and not self._is_over(save):
            warn_on_main(f"the best model (step {step}) was not saved: {self._lateness}")
            return False
        try:
            with self._saying_what_is_awaited(step):
                *_, best = on_main(lambda: self.store.stage(step))
                all_or_none(partial(export, best))
                on_main(lambda: self.store.commit(step, None))
        except CheckpointError as error:
            on_main(lambda: self.store.discard(step))
            warn_on_main(f"the best model (step {step}) was not saved: {error}")
            return False
        return True

    def set_other_best_aside(self) -> None:
        """Move the best model away if it is another run's, or of a step after the checkpoint that
        this one goes on from; all ranks call.
        """
        if self.saved is not None:
            on_main(lambda: self.set_later_best_aside(after_step=self.last_step or 0))
        elif self.config.keeps_best:
            aside = on_main(self.store.set_best_aside)
            if aside is not None:
                warn_on_main(f"the best model of another run was moved to {aside}.")

    def set_later_best_aside(self, *, after_step: int) -> bool:
        """Move the best model away if it is of a later step; return True if it was."""
        best = self.store.best() if self.config.keeps_best else None
        if best is None or self.store.step_of(best) <= after_step:
            return False
        aside = self.store.set_best_aside()
        warn(f"the best model was of step {self.store.step_of(best)}: it was moved to {aside}.")
        return True

    def set_later_aside(self) -> Path | None:
        """Move what the run does not go on from away."""
        return self.store.set_aside(after_step=-1 if self.saved is None else self.saved.step)

    def go_back(self, step: int) -> bool:
        """Move what this run has saved of later steps away, which it makes anew; return True if its
        best model was among that.
        """
        if self.config.save_steps > 0:  # or else they are another run's
            self.store.set_aside(after_step=step)
        if step < (self.last_step or 0):  # what was saved last is damaged
            self.saved_step, self.saved_state = step or None, None
        return self.set_later_best_aside(after_step=step)

    def _take_root(self) -> None:
        """Make room in a checkpoint root that the run did not use so far."""
        try:
            with folders.holding(self.store.root, "--ckpt_path"):
                self.store.remove_torn()
                if (aside := self.set_later_aside()) is not None:
                    warn(f"checkpoints of another run were moved to {aside}")
        except ConfigError as error:
            raise CheckpointError(str(error)) from None

    def _finish(self, step: int | None) -> dict[str, Any]:
        return {"step": step, "data": asdict(self.data), "length": self.length}


def warn_on_main(line: str) -> None:
    """Print a warning once, on the main rank."""
    if is_main():
        warn(line)


def open_checkpoints(
    config: CheckpointConfig, data: DataIdentity, command: TrainingRunConfig | None = None
) -> RunCheckpoints:
    """Tidy the checkpoint root and find what the run goes on from; all ranks call.

    `command` is the whole config, whose changes are said. Raises DataError or ConfigError where the
    data, or settings that the checkpoint depends on, are not those it was written under.
    """
    settings = {} if command is None else settings_of(command)
    checkpoints = RunCheckpoints(config, data, settings=settings)
    if command is not None:
        checkpoints.limit_s = PATIENCE * command.train.rank_timeout_s
        length = command.train.model_dump(include={"max_epochs", "num_episodes"})
        checkpoints.length = length | command.eval.model_dump(include={"early_stop"})
    if config.uses_root:
        on_main(checkpoints.store.remove_torn)  # not what another run writes there now
    checkpoints.find_saved(command)
    if config.save_steps > 0:
        aside = on_main(checkpoints.set_later_aside)
        if aside is not None:
            warn_on_main(f"checkpoints of another run, or damaged ones, were moved to {aside}.")
    return checkpoints


def export_final(export: Callable[[Path], None], path: Path) -> None:
    """Write the trained model at `path`, or elsewhere where that fails; all ranks call. Raise
    CheckpointError that says where the weights are.
    """
    elsewhere = Path(tempfile.gettempdir()) / f"openrlhf-{path.absolute().name}-{os.getppid()}"
    try:
        return export(path)
    except CheckpointError as error:
        problem = str(error)
    try:
        export(elsewhere)
    except CheckpointError as error:
        raise CheckpointError(f"{problem} Nor elsewhere: {error}") from None
    raise CheckpointError(f"{problem} It was written to {elsewhere} instead: move it from there.")


def find_model(name: str) -> str:
    """Return the model that is named by its hub id, its folder, or a run's: that of a run is what
    it exported at its end, or else its best model, or else that of its last checkpoint. Raise
    ConfigError for a run without any.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir() or any((folder / file).is_file() for file in MODEL_FILES):
        return name
    store, is_own = _checkpoints_of(folder)
    root = store.root
    found = store.best() or next(filter(None, map(store.model, reversed(store.steps()))), None)
    if found is None:
        raise ConfigError(
            f"{name} holds no model, and {root} no checkpoint with one. Type the folder of a "
            "model; --save_hf_ckpt keeps models with the checkpoints of a run."
        )
    if not is_own:
        raise ConfigError(
            f"{name} holds no model, and the checkpoints in {root} are another run's. Type the "
            "folder of a model."
        )
    notice(f"{name}: {found}")
    return str(found)


def _checkpoints_of(folder: Path) -> tuple[CheckpointStore, bool]:
    """Return the checkpoints of a run, or those in the folder itself; and whether this run wrote
    them, since several runs may share a checkpoint root.
    """
    file = folder / CONFIG_FILE
    settings = read_resolved(file) if file.is_file() else {}
    if "ckpt.path" not in settings:
        return CheckpointStore(folder), True
    store = CheckpointStore(Path(settings["ckpt.path"]))
    if (run_dir := store.run_dir()) is not None:
        return store, run_dir == str(folder.resolve())
    names = ("save_steps", "load_enable", "best_metric_key")
    found = {name: settings[f"ckpt.{name}"] for name in names if f"ckpt.{name}" in settings}
    return store, CheckpointConfig.model_validate(found).uses_root


@contextmanager
def exporting_anyway(export: Callable[[], None], path: Path) -> Iterator[None]:
    """Call `export`, which writes the model at `path`, where the block ends because checkpoints
    cannot be written; all ranks enter it.
    """
    try:
        yield
    except CheckpointError as error:
        try:
            export()
        except CheckpointError as other:
            raise CheckpointError(f"{error} {other}") from None
        raise CheckpointError(f"{error} The model was written to {path}.") from None


def random_state() -> dict[str, Any]:
    """Return the state of every random generator of this process, as JSON."""
    numpy_state = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    has_cuda = torch.cuda.is_available()
    return {
        "python": random.getstate(),
        "numpy": numpy_state,
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if has_cuda else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put every generator where `random_state` found it."""
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
