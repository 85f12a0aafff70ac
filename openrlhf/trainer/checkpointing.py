"""Checkpoints of a supervised run: when one is due, what goes in, what a run may go on from.

The main rank stages, commits and rotates; every rank writes its part; what goes wrong on one is
known to all before anything is decided. A save that fails costs a line, several in a row the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openrlhf.config.common import CheckpointConfig
from openrlhf.config.run import RunConfig
from openrlhf.distributed import collectives
from openrlhf.distributed.checkpoint import STATE, CheckpointStore, Saved, Staged
from openrlhf.distributed.manifest import write_json
from openrlhf.distributed.random_state import random_state, set_random_state
from openrlhf.errors import CheckpointError, ConfigError, DataError
from openrlhf.trainer.base_trainer import BaseTrainer
from openrlhf.trainer.resume_settings import Settings, check_settings, settings_of
from openrlhf.utils.logging import notice, warn
from openrlhf.utils.metrics import Metrics

MODEL = "model"  # the engine's folder in a checkpoint
MAX_FAILED_SAVES = 3  # in a row
FINISHED = "finished.json"  # in a run folder whose model is that of the last step


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
                f"{self.num_samples} now, and not the same tokens. Bring the old data (and "
                "template) back, or leave --load_checkpoint out."
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

    def is_done(self, run_dir: Path, *, max_epochs: int) -> bool:
        """Whether nothing is left to do: every epoch is trained and the model of the last step was
        exported to `run_dir`. All ranks call; a run folder that is written to again is not done.
        """
        epoch = -1 if self.saved is None else self.saved.state["loop"]["position"]["epoch"]

        def look() -> bool:
            noted = _read_json(run_dir / FINISHED)
            if epoch >= max_epochs and noted == self._finish(self.resume_step):
                notice(f"that run had finished: its model is in {run_dir}, nothing is left to do")
                return True
            (run_dir / FINISHED).unlink(missing_ok=True)
            return False

        is_done, problems = _on_main(look)
        _raise(problems)
        return bool(is_done)

    def note_finished(self, run_dir: Path, step: int) -> None:
        """Note that `run_dir` holds the model of the last step; the main rank calls."""
        write_json(run_dir / FINISHED, self._finish(step))

    def _finish(self, step: int | None) -> dict[str, Any]:
        return {"step": step, "data": asdict(self.data)}


def open_checkpoints(
    config: CheckpointConfig, data: DataFacts, command: RunConfig | None = None
) -> Opened:
    """Tidy the checkpoint root and find what the run goes on from; all ranks call.

    `command` is the whole config, whose changes are said. Raises DataError or ConfigError where
    the data, or settings that the checkpoint depends on, are not those it was written under.
    """
    store = CheckpointStore(Path(config.path), max_num=config.max_num, max_gib=config.max_mem)
    saved, problems = _on_main(lambda: _start(store, config))
    if saved is not None and not (saved.path / STATE).is_file():
        problems = [f"{saved.path} is not seen by every rank: --ckpt_path must be shared."]
    _raise(collectives.gather_problems(problems))
    if saved is not None:
        data.check(saved.state["data"], saved.path)
        _compare_settings(command, saved)
    if config.save_steps > 0:
        aside, problems = _on_main(lambda: store.set_aside(after_step=saved.step if saved else -1))
        _raise(problems)
        if aside is not None and collectives.is_main():
            warn(f"checkpoints of another run, or damaged ones, were moved to {aside}.")
    return Opened(store, data, saved, {} if command is None else settings_of(command))


def _compare_settings(command: RunConfig | None, saved: Saved) -> None:
    """Say what changed since the checkpoint was written; raises ConfigError for what may not."""
    before = saved.state.get("settings", {})
    if command is None:
        return
    for line in check_settings(command, before, path=saved.path, step=saved.step):
        if collectives.is_main():
            warn(line)


def _start(store: CheckpointStore, config: CheckpointConfig) -> Saved | None:
    """What the run goes on from, and a line that says so."""
    store.remove_torn()
    saved = store.latest() if config.load_enable else None
    if saved is not None:
        position = saved.state["loop"]["position"]
        notice(
            f"resuming from {saved.path}: step {saved.step}, epoch {position['epoch'] + 1}, "
            f"{position['num_samples']} samples into it"
        )
    elif config.load_enable:
        notice(f"no checkpoint in {store.root}: starting new")
    return saved


class Checkpointer:
    """Saves a trainer when it is due, and puts it back where a checkpoint stands."""

    def __init__(
        self,
        trainer: BaseTrainer[Any, Any],
        opened: Opened,
        config: CheckpointConfig,
        *,
        export: Callable[[Path], None],
    ) -> None:
        self.trainer = trainer
        self.store = opened.store
        self.saved = opened.saved
        self.data = opened.data
        self.settings = opened.settings
        self.config = config
        self.num_failed = 0  # in a row
        self._export = export

    def resume(self) -> None:
        """Put model, optimizer, position and random numbers where they were; all ranks call."""
        if self.saved is None:
            return
        self.trainer.engine.load_states(self.saved.path / MODEL)
        self.trainer.load_state_dict(self.saved.state["loop"])
        if collectives.is_main() and self.trainer.is_finished:
            notice("that run had finished: nothing is left to train")
        own = self.saved.path / _rank_file(self.trainer.strategy.topology.rank)
        before, now = self.saved.state["world_size"], self.trainer.strategy.topology.world_size
        if before == now:
            state = json.loads(own.read_text())
            set_random_state(state["random"])
            self.trainer.pending = Metrics.from_state_dict(state["metrics"])
        elif collectives.is_main():  # there is no such thing as a rank's own random numbers
            warn(f"{now} ranks go on with what {before} wrote: the same samples, other rounding.")

    def save_if_due(self) -> None:
        """The hook of the loop: save every `--save_steps` steps and after the last."""
        if self._has_something_to_save() and self.trainer.is_due(self.config.save_steps):
            self.save()

    def save(self) -> bool:
        """Save now; all ranks call, all answer whether it was saved.

        Raises CheckpointError when it failed several times in a row.
        """
        step = self.trainer.global_step
        problems = self._save(step)
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

    def _has_something_to_save(self) -> bool:
        return self.config.save_steps > 0 and (self.config.save_hf or not self.config.disable_ds)

    def _save(self, step: int) -> list[str]:
        """What went wrong on any rank; nothing after the first step that went wrong is tried."""
        staged, problems = _on_main(lambda: self.store.stage(step))
        if problems:
            return problems
        writers: list[Callable[[], None]] = []
        if not self.config.disable_ds:
            writers.append(lambda: self.trainer.engine.save_states(staged.states / MODEL))
            writers.append(lambda: self._save_own(staged))
        if self.config.save_hf:
            writers.append(lambda: self._export(staged.export))
        for write in writers:
            problems = collectives.gather_problems(_problems_of(write))
            if problems:
                return problems
        state = None if self.config.disable_ds else self._state()
        _, problems = _on_main(lambda: self.store.commit(staged, state))
        if not problems and collectives.is_main():
            for line in _problems_of(self.store.rotate):
                warn(f"old checkpoints could not be removed: {line}")
        return problems

    def _save_own(self, staged: Staged) -> None:
        """What is this rank's alone."""
        content = {"random": random_state(), "metrics": self.trainer.pending.state_dict()}
        write_json(staged.states / _rank_file(self.trainer.strategy.topology.rank), content)

    def _state(self) -> dict[str, Any]:
        return {
            "loop": self.trainer.state_dict(),
            "data": asdict(self.data),
            "settings": self.settings,
            "world_size": self.trainer.strategy.topology.world_size,
        }


def _read_json(path: Path) -> Any:
    """What a file holds; None where there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _rank_file(rank: int) -> str:
    return f"rank{rank}.json"


def _problems_of(work: Callable[[], object]) -> list[str]:
    """Why a piece of work on files failed, if it did."""
    problems: list[str] = []
    with collectives.noting(problems):
        work()
    return problems


def _on_main(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What the main rank's work answered and what went wrong with it, on every rank."""
    answer: list[Any] = [None]

    def keep() -> None:
        answer[0] = work()

    problems = _problems_of(keep) if collectives.is_main() else []
    return collectives.broadcast_object((answer[0], problems))


def _raise(problems: list[str]) -> None:
    if problems:
        raise CheckpointError(" ".join(problems))
