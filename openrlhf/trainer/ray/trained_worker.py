"""A rank of a model that is trained: its part of a checkpoint, and exports on the way.

What goes wrong with files on one rank is raised on all of them, so that none waits for another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openrlhf.distributed.checkpoints import random_state, set_random_state
from openrlhf.distributed.collectives import together, world_size
from openrlhf.distributed.manifest import write_json
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.trainer.ray.model_actor import ModelWorker, frees_cache
from openrlhf.trainer.ray.utils import node_address


class TrainedWorker(ModelWorker):
    """One rank of a model with an optimizer; subclasses add what else they have to keep."""

    engine: TrainEngine

    def unseen(self, path: str) -> str | None:
        """Who this rank is, where it does not see a file or folder of the controller's."""
        if Path(path).exists():
            return None
        identity = self.identity
        return f"{identity.role} rank {identity.rank} on node {node_address()}"

    @frees_cache
    def save_states(self, folder: str) -> None:
        """Write weights, optimizer, schedule and random numbers into a checkpoint's folder; all
        ranks call. Raises CheckpointError on all or none.
        """
        together(lambda: self._check_is_there(Path(folder)))
        self.engine.save_states(Path(folder) / self.identity.role)
        together(lambda: self.save_own(Path(folder)))

    @frees_cache
    def load_states(self, folder: str) -> bool:
        """Take up what `save_states` wrote; whether random numbers go on where they stood, which
        they cannot on another number of ranks. As `save_states`.
        """
        together(lambda: self._check_is_there(Path(folder)))
        self.engine.load_states(Path(folder) / self.identity.role)
        return together(lambda: self.load_own(Path(folder)))

    @frees_cache
    def export(self, path: str) -> None:
        """Write the model in Hugging Face format; as `save_states`."""
        together(lambda: self.save_model(path))

    def save_model(self, path: str) -> None:
        """Export in Hugging Face format; all ranks take part, rank 0 writes."""
        raise NotImplementedError

    def own_state(self) -> dict[str, Any]:
        """What only this process knows of itself, as JSON."""
        return {"random": random_state(), "world_size": world_size()}

    def save_own(self, folder: Path) -> None:
        """Write what is not the engine's."""
        write_json(self._own_file(folder, self.identity.rank), self.own_state())

    def load_own(self, folder: Path) -> bool:
        """Take it up again; on another number of ranks from the first rank of then."""
        state = json.loads(self._own_file(folder, 0).read_text())
        has_same_ranks = bool(state["world_size"] == world_size())
        if has_same_ranks:
            state = json.loads(self._own_file(folder, self.identity.rank).read_text())
            set_random_state(state["random"])
        self.take_own_state(state)
        return has_same_ranks

    def take_own_state(self, state: dict[str, Any]) -> None:
        """Take up what `own_state` answered."""

    def _own_file(self, folder: Path, rank: int) -> Path:
        return folder / f"{self.identity.role}_rank{rank}.json"

    def _check_is_there(self, folder: Path) -> None:
        unseen = self.unseen(str(folder))
        if unseen:
            raise FileNotFoundError(
                f"{folder} is not seen by {unseen}: --ckpt_path must be on a file system that all "
                "nodes share."
            )
