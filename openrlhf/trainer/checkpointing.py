"""Checkpoints of a supervised run: when one is due, what goes in, how the run goes on from one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openrlhf.config.common import CheckpointConfig
from openrlhf.config.run import RunConfig
from openrlhf.distributed import collectives, run_checkpoints
from openrlhf.distributed.checkpoint import Saved, Staged
from openrlhf.distributed.manifest import write_json
from openrlhf.distributed.random_state import random_state, set_random_state
from openrlhf.distributed.run_checkpoints import CheckpointSaver, DataFacts, Opened
from openrlhf.trainer.base_trainer import BaseTrainer
from openrlhf.utils import stopping
from openrlhf.utils.logging import notice, warn
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.progress import progress

MODEL = "model"  # the engine's folder in a checkpoint


def open_checkpoints(
    config: CheckpointConfig, data: DataFacts, command: RunConfig | None = None
) -> Opened:
    """See `run_checkpoints.open_checkpoints`."""
    return run_checkpoints.open_checkpoints(config, data, command, describe=_place_of)


def _place_of(saved: Saved) -> str:
    position = saved.state["loop"]["position"]
    return (
        f"step {saved.step}, epoch {position['epoch'] + 1}, "
        f"{position['num_samples']} samples into it"
    )


def is_at_end(opened: Opened, max_epochs: int) -> bool:
    """Whether the checkpoint that a run goes on from has every epoch behind it."""
    saved = opened.saved
    return saved is not None and saved.state["loop"]["position"]["epoch"] >= max_epochs


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
        self.opened = opened
        self.store = opened.store
        self.saved = opened.saved
        self.config = config
        self.saver = CheckpointSaver(opened.store, config)
        self._export = export

    def resume(self) -> None:
        """Put model, optimizer, position and random numbers where they were; all ranks call."""
        if self.saved is None:
            return
        with progress("loading the checkpoint"):
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

    def after_step(self) -> None:
        """The hook of the loop: save when it is due; raise Interrupted once any rank was asked to
        stop.
        """
        is_saved = self.save_if_due()
        is_asked = collectives.all_reduce_max({"asked": float(stopping.is_asked())})["asked"]
        if is_asked and not self.trainer.is_finished:
            outcome = self.saver.save_last(
                lambda: is_saved or self.save(), resume_step=self.opened.resume_step
            )
            self.trainer.tracker.close()
            raise stopping.Interrupted(f"step {self.trainer.global_step} is done, {outcome}")

    def save_if_due(self) -> bool:
        """Save every `--save_steps` steps and after the last; return whether it was."""
        is_due = self.saver.is_on and self.trainer.is_due(self.config.save_steps)
        return is_due and self.save()

    def save(self) -> bool:
        """Save now; all ranks call, all answer whether it was saved.

        Raises CheckpointError when it failed several times in a row.
        """
        return self.saver.save(
            self.trainer.global_step,
            write=(self._save_engine, self._save_own),
            export=self._export,
            state=self._state,
        )

    def _save_engine(self, staged: Staged) -> None:
        self.trainer.engine.save_states(staged.states / MODEL)

    def _save_own(self, staged: Staged) -> None:
        """What is this rank's alone."""
        content = {"random": random_state(), "metrics": self.trainer.pending.state_dict()}
        write_json(staged.states / _rank_file(self.trainer.strategy.topology.rank), content)

    def _state(self) -> dict[str, Any]:
        return {
            "loop": self.trainer.state_dict(),
            "world_size": self.trainer.strategy.topology.world_size,
            **self.opened.notes,
        }


def _rank_file(rank: int) -> str:
    return f"rank{rank}.json"
