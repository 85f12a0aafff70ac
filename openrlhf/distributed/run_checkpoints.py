"""The checkpoints of a run: what it goes on from, and how all ranks write one together.

The main rank stages, commits and rotates; every rank writes its part; what goes wrong on one is
known to all before anything is decided. A save that fails costs a line, several in a row the run.
What is in a checkpoint is the business of the caller.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openrlhf.config.common import CheckpointConfig
from openrlhf.config.local_paths import reads_from
from openrlhf.config.resume_settings import Settings, check_settings, settings_of
from openrlhf.config.run import RunConfig
from openrlhf.distributed import collectives
from openrlhf.distributed.checkpoint import STATE, CheckpointStore, Saved, Staged
from openrlhf.distributed.manifest import write_json
from openrlhf.distributed.run_folder import (
    FINISHED,
    read_json,
    set_earlier_run_aside,
    why_held,
)
from openrlhf.errors import CheckpointError, ConfigError, DataError
from openrlhf.utils.logging import notice, warn
from openrlhf.utils.progress import progress

MAX_FAILED_SAVES = 3  # in a row
KIND = "command"  # among the settings: the config class of the command that wrote a checkpoint
EXPORT_TRIES = 40  # at the end of a run
EXPORT_PAUSE_S = 15.0  # between two of them


@dataclass(frozen=True)
class DataFacts:
    """What the order of samples follows from; a run goes on only where they are the same."""

    fingerprint: str
    num_samples: int
    seed: int

    def check(self, found: dict[str, Any], path: Path) -> None:
        """Raise if a checkpoint was written over other samples or in another order."""
        if found["seed"] != self.seed:
            raise ConfigError(
                f"--seed {self.seed}: {path} has its samples in the order of seed {found['seed']}. "
                f"Type --seed {found['seed']}, or leave --load_checkpoint out."
            )
        if found != asdict(self):
            raise DataError(
                f"The data changed since {path} was written: {found['num_samples']} samples then, "
                f"{self.num_samples} now, and not the same tokens or labels. Bring the old "
                "data (and template) back, or leave --load_checkpoint out."
            )


@dataclass(frozen=True)
class Opened:
    """The checkpoints of this run, and the one it goes on from, if any."""

    store: CheckpointStore
    data: DataFacts
    saved: Saved | None
    settings: Settings = field(default_factory=dict)  # of this start, for the next one

    @property
    def resume_step(self) -> int | None:
        """The step the run goes on from; None: it starts new."""
        return None if self.saved is None else self.saved.step

    @property
    def notes(self) -> dict[str, Any]:
        """What every checkpoint says of the run, beside what the caller does."""
        return {"data": asdict(self.data), "settings": self.settings}

    def is_done(self, run_dir: Path, *, is_at_end: bool) -> bool:
        """Whether nothing is left to do: the checkpoint `is_at_end`, and the model of its step was
        exported to `run_dir`. All ranks call; a run folder that is written to again is not done.
        """

        def look() -> bool:
            if is_at_end and read_json(run_dir / FINISHED) == self._finish(self.resume_step):
                notice(f"that run had finished: its model is in {run_dir}, nothing is left to do")
                return True
            if self.saved is not None:
                (run_dir / FINISHED).unlink(missing_ok=True)
            return False

        is_done, problems = on_main(look)
        raise_all(problems)
        return bool(is_done)

    def clear_folder(self, run_dir: Path, command: RunConfig) -> None:
        """Move what an earlier run left in `run_dir` aside, unless this run goes on from it; the
        main rank calls, once the models are loaded.
        """
        if self.saved is not None:
            return
        keeps_model = reads_from(command, run_dir)
        aside = set_earlier_run_aside(run_dir, keeps_model=keeps_model)
        if aside is not None:
            what = "the records" if keeps_model else "the model and the records"
            notice(f"{what} of the run before in {run_dir} were moved to {aside}")

    def note_finished(self, run_dir: Path, step: int) -> None:
        """Note that `run_dir` holds the model of the last step; the main rank calls."""
        write_json(run_dir / FINISHED, self._finish(step))

    def _finish(self, step: int | None) -> dict[str, Any]:
        return {"step": step, "data": asdict(self.data)}


def open_checkpoints(
    config: CheckpointConfig,
    data: DataFacts,
    command: RunConfig | None = None,
    *,
    describe: Callable[[Saved], str],
) -> Opened:
    """Tidy the checkpoint root and find what the run goes on from; all ranks call.

    `command` is the whole config, whose changes are said; `describe` says where a checkpoint
    stands. Raises DataError or ConfigError where the data, or settings that the checkpoint depends
    on, are not those it was written under.
    """
    store = CheckpointStore(Path(config.path), max_num=config.max_num, max_gib=config.max_mem)
    kind = "" if command is None else type(command).__name__
    saved, problems = on_main(lambda: _start(store, config, describe, kind))
    if saved is not None and not (saved.path / STATE).is_file():
        problems = [f"{saved.path} is not seen by every rank: --ckpt_path must be shared."]
    raise_all(collectives.gather_problems(problems))
    if saved is not None:
        if not _is_of(saved, kind):
            raise ConfigError(
                f"--ckpt_path {config.path} holds the checkpoints of another command. Type another "
                "--ckpt_path, or leave --load_checkpoint out."
            )
        data.check(saved.state["data"], saved.path)
        _compare_settings(command, saved)
    if config.save_steps > 0:
        aside, problems = on_main(lambda: store.set_aside(after_step=saved.step if saved else -1))
        raise_all(problems)
        if aside is not None and collectives.is_main():
            warn(f"checkpoints of another run, or damaged ones, were moved to {aside}.")
    settings = {} if command is None else {KIND: kind, **settings_of(command)}
    return Opened(store, data, saved, settings)


def _is_of(saved: Saved, kind: str) -> bool:
    """Whether a checkpoint was written by the command whose config has this class name."""
    found = saved.state.get("settings", {}).get(KIND)
    return not kind or found is None or found == kind


def _compare_settings(command: RunConfig | None, saved: Saved) -> None:
    """Say what changed since the checkpoint was written; raises ConfigError for what may not."""
    before = saved.state.get("settings", {})
    if command is None:
        return
    for line in check_settings(command, before, path=saved.path, step=saved.step):
        if collectives.is_main():
            warn(line)


def _start(
    store: CheckpointStore,
    config: CheckpointConfig,
    describe: Callable[[Saved], str],
    kind: str,
) -> Saved | None:
    """What the run goes on from, and a line that says so."""
    if config.uses_root:
        store.remove_torn()  # not what another run writes there now
    saved = store.latest() if config.load_enable else None
    if saved is not None and not _is_of(saved, kind):
        return saved  # to be refused
    if saved is not None:
        notice(f"resuming from {saved.path}: {describe(saved)}")
    elif config.load_enable:
        notice(f"no checkpoint in {store.root}: starting new")
    return saved


class CheckpointSaver:
    """Writes checkpoints of one run, and keeps count of those that failed."""

    def __init__(self, store: CheckpointStore, config: CheckpointConfig) -> None:
        self.store = store
        self.config = config
        self.num_failed = 0  # in a row

    @property
    def is_on(self) -> bool:
        """Whether the run writes checkpoints at all."""
        config = self.config
        return config.save_steps > 0 and (config.save_hf or not config.disable_ds)

    def save(
        self,
        step: int,
        *,
        write: Sequence[Callable[[Staged], None]],
        export: Callable[[Path], None],
        state: Callable[[], Mapping[str, object]],
    ) -> bool:
        """Save now, as the config says; all ranks call, all answer whether it was saved.

        `write` fills the resumable part, `export` writes a Hugging Face model, `state` is what the
        run notes of itself, as JSON. Raises CheckpointError when it failed several times in a row.
        """
        writers = [] if self.config.disable_ds else list(write)
        if self.config.save_hf:
            writers.append(lambda staged: export(staged.export))
        with progress("saving a checkpoint"):
            problems = self._save(step, writers, state)
        if not problems:
            self.num_failed = 0
            return True
        self.num_failed += 1
        line = f"checkpoint of step {step} was not saved: {' '.join(problems)}"
        if collectives.is_main():
            self.store.discard(step)
        if self.num_failed >= MAX_FAILED_SAVES:
            raise CheckpointError(f"{line} It is failure {self.num_failed} in a row: stopping.")
        if collectives.is_main():
            warn(f"{line} The earlier ones are kept, training goes on.")
        return False

    def save_last(self, save: Callable[[], bool], *, resume_step: int | None) -> str:
        """Save a run that was asked to stop, even if it keeps no checkpoints; all ranks call.

        Return what became of it and how to go on, as the end of a sentence.
        """
        config, problems = self.config, list[str]()
        if config.disable_ds:
            return "nothing to go on from was saved (--disable_ds_ckpt)"
        if config.save_steps <= 0:
            _, problems = on_main(lambda: self._take_root(resume_step))
        if problems or not save():
            return " ".join(["it could not be saved.", *problems])
        how = "" if config.load_enable else " with --load_checkpoint"
        return f"it was saved in {config.path}. To go on, type the same command{how}"

    def _take_root(self, resume_step: int | None) -> None:
        """Make room in a checkpoint root that the run did not use so far."""
        reason = why_held(Path(self.config.path))
        if reason is not None:
            raise CheckpointError(f"--ckpt_path {self.config.path} is in use: {reason}")
        self.store.remove_torn()
        self.store.set_aside(after_step=-1 if resume_step is None else resume_step)

    def save_best(self, step: int, export: Callable[[Path], None], facts: Mapping) -> bool:
        """Keep the model that `export` writes as the best so far, in place of the one before; all
        ranks call, all answer whether it was saved. A failure costs a line.
        """
        path, problems = on_main(lambda: self.store.stage_best(step))
        if not problems:
            problems = collectives.gather_problems(problems_of(lambda: export(path)))
        if not problems:
            _, problems = on_main(lambda: self.store.commit_best(step, facts))
        if problems and collectives.is_main():
            self.store.discard_best(step)
            warn(f"the best model (step {step}) was not saved: {' '.join(problems)}")
        return not problems

    def _save(
        self,
        step: int,
        writers: Sequence[Callable[[Staged], None]],
        state: Callable[[], Mapping[str, object]],
    ) -> list[str]:
        """What went wrong on any rank; nothing after the first step that went wrong is tried."""
        staged, problems = on_main(lambda: self.store.stage(step))
        for write in writers:
            if problems:
                return problems
            problems = collectives.gather_problems(problems_of(lambda w=write: w(staged)))
        if problems:
            return problems
        content = None if self.config.disable_ds else state()
        _, problems = on_main(lambda: self.store.commit(staged, content))
        if not problems and collectives.is_main():
            for line in problems_of(self.store.rotate):
                warn(f"old checkpoints could not be removed: {line}")
        return problems


def export_final(export: Callable[[Path], None], path: Path) -> None:
    """Write the trained model at `path`; while that fails try again, and at last elsewhere.

    All ranks call. Raises CheckpointError that says where the weights are.
    """
    elsewhere = Path(tempfile.gettempdir()) / f"openrlhf-{path.absolute().name}-{os.getppid()}"
    for number in range(EXPORT_TRIES):
        try:
            return export(path)
        except CheckpointError as error:
            problem = str(error)
        if number == 0 and collectives.is_main():
            wait = EXPORT_TRIES * EXPORT_PAUSE_S / 60
            warn(f"{problem} Make room: it is tried for {wait:.0f} minutes, then in {elsewhere}.")
        time.sleep(EXPORT_PAUSE_S)
    try:
        export(elsewhere)
    except CheckpointError as error:
        raise CheckpointError(f"{problem} Nor elsewhere: {error}") from None
    raise CheckpointError(f"{problem} It was written to {elsewhere} instead: move it from there.")


def problems_of(work: Callable[[], object]) -> list[str]:
    """Why a piece of work on files failed, if it did."""
    problems: list[str] = []
    with collectives.noting(problems):
        work()
    return problems


def on_main(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What the main rank's work answered and what went wrong with it, on every rank."""
    answer: list[Any] = [None]

    def keep() -> None:
        answer[0] = work()

    problems = problems_of(keep) if collectives.is_main() else []
    return collectives.broadcast_object((answer[0], problems))


def raise_all(problems: Sequence[str]) -> None:
    """Raise CheckpointError if anything went wrong."""
    if problems:
        raise CheckpointError(" ".join(problems))
