"""The controller's own state of a run, all of which a checkpoint keeps.

The trainers own one and work on it; models, optimizers and random numbers are the workers' part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrlhf.rollout.kept_groups import KeptGroups
from openrlhf.rollout.rollout_queue import RolloutQueue
from openrlhf.rollout.step_sampler import StepSampler
from openrlhf.trainer.ppo_utils.evaluation import Evaluation, noteworthy
from openrlhf.trainer.ppo_utils.kl_controller import KLController
from openrlhf.trainer.ppo_utils.pretrain_text import TextMixer
from openrlhf.utils.logging import needed_history
from openrlhf.utils.metrics import Metrics


@dataclass
class RunState:
    """The progress of an RL run."""

    sampler: StepSampler | RolloutQueue
    kl_controller: KLController
    texts: TextMixer | None = None  # pre-training text that is mixed in
    global_step: int = 0  # steps done
    weight_version: int = 0  # of the policy; counts its updates
    evaluated_step: int | None = None  # the last one
    # The first, the best and the last one of the pass rate by which the best model is chosen.
    evaluations: list[Evaluation] = field(default_factory=list)
    history: list[Mapping[str, float]] = field(default_factory=list)  # as far as hints look
    unlogged: Metrics = field(default_factory=Metrics)  # of the steps since the last line
    num_unlogged: int = 0  # those steps

    def remember(self, values: Mapping[str, float]) -> None:
        """Keep a step's metrics for the hints of later ones."""
        self.history = needed_history([*self.history, values])

    def note_evaluation(self, evaluation: Evaluation) -> None:
        """Keep an evaluation for the comparison at the end."""
        same = [found for found in self.evaluations if found.name == evaluation.name]
        self.evaluations = noteworthy([*same, evaluation])

    def state_dict(self) -> dict[str, Any]:
        """Return everything as JSON; taken between two steps."""
        return {
            "global_step": self.global_step,
            "weight_version": self.weight_version,
            "evaluated_step": self.evaluated_step,
            "evaluations": [list(found) for found in self.evaluations],
            "kl": self.kl_controller.state_dict(),
            "sampler": self.sampler.state_dict(),
            "texts": None if self.texts is None else self.texts.state_dict(),
            "history": [dict(values) for values in self.history],
            "unlogged": self.unlogged.state_dict(),
            "num_unlogged": self.num_unlogged,
        }

    def finished_groups(self) -> KeptGroups | None:
        """Return finished samples that wait for later steps, where generation runs ahead; a
        `state_dict` taken afterwards is of a state that still has all of them.
        """
        return self.sampler.finished_groups() if isinstance(self.sampler, RolloutQueue) else None

    def load_groups(self, folder: Path) -> None:
        """Take up the samples that a folder keeps, after `load_state_dict`."""
        if isinstance(self.sampler, RolloutQueue):
            self.sampler.load_groups(folder)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.global_step = state["global_step"]
        self.weight_version = state["weight_version"]
        self.evaluated_step = state["evaluated_step"]
        self.evaluations = [Evaluation(*found) for found in state["evaluations"]]
        self.unlogged = Metrics.from_state_dict(state["unlogged"])
        self.num_unlogged = state["num_unlogged"]
        self.kl_controller.load_state_dict(state["kl"])
        self.sampler.load_state_dict(state["sampler"])
        if self.texts is not None:
            self.texts.load_state_dict(state["texts"])
        self.history = state["history"]
