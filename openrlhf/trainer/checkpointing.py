"""Checkpoints of a supervised run: when one is due, what goes in, how the run goes on from one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openrlhf.distributed.checkpoints import RunCheckpoints, random_state, set_random_state
from openrlhf.distributed.collectives import all_reduce_max, is_main
from openrlhf.distributed.manifest import write_json
from openrlhf.trainer.base_trainer import BaseTrainer
from openrlhf.utils import stopping
from openrlhf.utils.logging import notice, warn
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.progress import progress

MODEL = "model"  # the engine's folder in a checkpoint


def is_at_end(checkpoints: RunCheckpoints, max_epochs: int) -> bool:
    """Return True if the checkpoint that a run goes on from has every epoch behind it."""
    saved = checkpoints.saved
    return saved is not None and saved.state["loop"]["position"]["epoch"] >= max_epochs


class Checkpointer:
    """Saves a trainer when it is due, and puts it back where a checkpoint stands."""

    def __init__(
        self,
        trainer: BaseTrainer[Any, Any],
        checkpoints: RunCheckpoints,
        *,
        export: Callable[[Path], None],
    ) -> None:
        self.trainer = trainer
        self.checkpoints = checkpoints
        self.topology = trainer.strategy.topology
        self._export = export

    def resume(self) -> None:
        """Put model, optimizer, position and random numbers where they were; all ranks call."""
        saved = self.checkpoints.saved
        if saved is None:
            return
        with progress("loading the checkpoint"):
            self.trainer.engine.load_states(saved.path / MODEL)
        self.trainer.load_state_dict(saved.state["loop"])
        if is_main() and self.trainer.is_finished:
            notice("that run had finished: nothing is left to train")
        before, now = saved.state["world_size"], self.topology.world_size
        if before == now:
            state = json.loads(self._rank_file(saved.path).read_text())
            set_random_state(state["random"])
            self.trainer.pending = Metrics.from_state_dict(state["metrics"])
        elif is_main():  # there is no such thing as a rank's own random numbers
            warn(f"{now} ranks go on with what {before} wrote: the same samples, other rounding.")

    def after_step(self) -> None:
        """Save when it is due; raise Interrupted once any rank was asked to stop."""
        is_saved = self.save_if_due()
        is_asked = all_reduce_max({"asked": float(stopping.is_asked())})["asked"]
        if is_asked and not self.trainer.is_finished:
            outcome = self.checkpoints.save_last(lambda: is_saved or self.save())
            self.trainer.tracker.close()
            raise stopping.Interrupted(f"step {self.trainer.global_step} is done, {outcome}")

    def save_if_due(self) -> bool:
        """Save every `--save_steps` steps and after the last; return True if it was saved."""
        checkpoints = self.checkpoints
        is_due = checkpoints.is_on and self.trainer.is_due(checkpoints.config.save_steps)
        return is_due and self.save()

    def save(self) -> bool:
        """Save now; all ranks call, and all return whether it was saved.

        Raises CheckpointError when it failed several times in a row.
        """
        position = self.trainer.position
        place = (
            f"step {position.global_step}, epoch {position.epoch + 1}, "
            f"{position.num_samples} samples into it"
        )
        state = {
            "loop": self.trainer.state_dict(),
            "world_size": self.topology.world_size,
            "place": place,
        }
        return self.checkpoints.save(
            position.global_step, write=self._write, export=self._export, state=state
        )

    def _write(self, folder: Path) -> None:
        self.trainer.engine.save_states(folder / MODEL)
        content = {"random": random_state(), "metrics": self.trainer.pending.state_dict()}
        write_json(self._rank_file(folder), content)

    def _rank_file(self, folder: Path) -> Path:
        return folder / f"rank{self.topology.rank}.json"
