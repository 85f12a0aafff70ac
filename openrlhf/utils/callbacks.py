"""Code of the user's at points of a run: after a step, an evaluation, a save."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Callback:
    """Override what you need. What a method raises ends the run with its traceback; `trainer.end()`
    ends it as after its last step.

    After the loss of a rank, steps behind the last checkpoint are made again, and told again.

    `trainer` is the running one: BaseTrainer on each rank of a supervised run, PPOTrainer in the
    controller of an RL run.
    """

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Called after step `step`, counted from 1, with the metrics of this step alone."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation; the names of its metrics begin with `eval/`."""

    def on_save(self, trainer: Any, step: int, path: Path) -> None:
        """Called once a checkpoint of `step` is complete, which may be some steps later; and at the
        end with the folder of the exported model.
        """
