"""Code of the user's at points of a run: after a step, an evaluation, a save."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Callback:
    """Override what you need. What a method raises ends the run with its traceback.

    `trainer` is the running one: BaseTrainer on each rank of a supervised run, PPOTrainer in the
    controller of an RL run.
    """

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Called after step `step`, counted from 1, with the metrics of this step alone."""

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation; the names of its metrics begin with `eval/`."""

    def on_save(self, trainer: Any, step: int, path: Path) -> None:
        """Called after a checkpoint, and at the end with the folder of the exported model."""


def show_callback_alone(error: BaseException) -> None:
    """Leave out of a traceback what led to the callback that raised, if one did."""
    frames = error.__traceback__
    while frames is not None and not isinstance(frames.tb_frame.f_locals.get("self"), Callback):
        frames = frames.tb_next
    error.__traceback__ = frames or error.__traceback__
