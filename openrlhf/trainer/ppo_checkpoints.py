"""Checkpoints of an RL run: policy, critic and the controller's own state in one commit, and the
model of the best evaluation beside them. The trainers own a RunState and work on it.

A folder `global_step<N>` holds `actor`, `critic`, a file of each rank, `state.json` and what was
generated ahead. The controller stages and commits; the ranks write, so on several nodes the folder
has to be shared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrlhf.algorithms.kl import adaptive_kl_coef
from openrlhf.config.ppo import KLConfig, PPOConfig
from openrlhf.distributed.checkpoints import DataFacts, RunCheckpoints, open_checkpoints
from openrlhf.distributed.collectives import together
from openrlhf.distributed.folders import HOLDER
from openrlhf.errors import CheckpointError, ConfigError
from openrlhf.rollout.rollout_queue import RolloutQueue, write_groups
from openrlhf.rollout.step_sampler import StepSampler
from openrlhf.trainer.ppo_setup import RunInputs
from openrlhf.trainer.ppo_utils.evaluation import Evaluation
from openrlhf.trainer.ppo_utils.replay_buffer import TextMixer
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.model_actor import TrainedWorker
from openrlhf.trainer.ray.phases import DevicePhases
from openrlhf.trainer.ray.placement import TRAINED_ROLES
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.utils.logging import notice, warn
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.progress import progress

RUN = "run"  # the controller's own state, in state.json
PLAIN = ("global_step", "weight_version", "num_unlogged", "history")


@dataclass
class RunState:
    """The progress of an RL run."""

    sampler: StepSampler | RolloutQueue
    kl: KLConfig
    texts: TextMixer | None = None  # pre-training text that is mixed in
    global_step: int = 0  # steps done
    weight_version: int = 0  # of the policy; counts its updates
    # The first, the best and the last one of the pass rate by which the best model is chosen.
    evaluations: list[Evaluation] = field(default_factory=list)
    history: list[Mapping[str, float]] = field(default_factory=list)  # as far as hints look
    unlogged: Metrics = field(default_factory=Metrics)  # of the steps since the last line
    num_unlogged: int = 0  # those steps
    kl_coef: float = field(init=False)  # fixed, or steered towards a target

    def __post_init__(self) -> None:
        self.kl_coef = self.kl.init_coef

    def adapt_kl_coef(self, kl: float, num_samples: int) -> None:
        """Move the coefficient, if it has a target, after a step whose mean KL to the reference was
        `kl`.
        """
        target, horizon = self.kl.target, self.kl.horizon
        if target is not None:
            self.kl_coef = adaptive_kl_coef(
                self.kl_coef, kl, target=target, horizon=horizon, num_samples=num_samples
            )

    def state_dict(self) -> dict[str, Any]:
        """Return everything as JSON; taken between two steps."""
        return {name: getattr(self, name) for name in PLAIN} | {
            "evaluations": [list(found) for found in self.evaluations],
            "kl_coef": self.kl_coef,
            "sampler": self.sampler.state_dict(),
            "texts": None if self.texts is None else self.texts.state_dict(),
            "unlogged": self.unlogged.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        for name in PLAIN:
            setattr(self, name, state[name])
        self.evaluations = [Evaluation(*found) for found in state["evaluations"]]
        if self.kl.target is not None:  # a fixed one is what this command says
            self.kl_coef = state["kl_coef"]
        self.sampler.load_state_dict(state["sampler"])
        if self.texts is not None:
            self.texts.load_state_dict(state["texts"])
        self.unlogged = Metrics.from_state_dict(state["unlogged"])


def open_run(config: PPOConfig, inputs: RunInputs) -> RunCheckpoints:
    """Find what the run goes on from, before a model is loaded.

    Raises ConfigError or DataError where settings or prompts forbid to go on.
    """
    facts = DataFacts(inputs.prompts.fingerprint, len(inputs.prompts))
    # Workers elsewhere may have another working directory.
    ckpt = config.ckpt.model_copy(update={"path": os.path.abspath(config.ckpt.path)})
    return open_checkpoints(ckpt, facts, config)


def is_at_end(opened: RunCheckpoints, config: PPOConfig) -> bool:
    """Return True if the checkpoint that a run goes on from has every episode behind it."""
    saved = opened.saved
    if saved is None:
        return False
    sampler = saved.state[RUN]["sampler"]
    is_drawn = sampler["cursor"]["episode"] >= config.train.num_episodes
    return is_drawn and not sampler["ledger"]["pending"]


class PPOCheckpoints:
    """Saves a run when it is due, and puts it back where a checkpoint stands."""

    def __init__(
        self,
        opened: RunCheckpoints,
        groups: Mapping[str, WorkerGroup],
        phases: DevicePhases,
        *,
        best_metric: str | None,
    ) -> None:
        self.opened = opened
        self.groups = {role: groups[role] for role in TRAINED_ROLES if role in groups}
        self.phases = phases
        self.kept: dict[str, Any] | None = None  # what was last saved or loaded
        self.best_metric = best_metric  # None: the best model is not kept

    def check_is_shared(self) -> None:
        """Raise ConfigError if a rank that has to write checkpoints does not see their folder."""
        root = self.opened.store.root
        try:
            for group in self.groups.values() if self.opened.config.uses_root else ():
                group.call(TrainedWorker.check_sees, str(root / HOLDER))
        except CheckpointError as error:
            text = str(error).replace(str(root / HOLDER), f"--ckpt_path {root}")
            raise ConfigError(text) from error

    def resume(self, state: RunState) -> None:
        """Put models, optimizers, random numbers and the controller where they were; move the best
        model of another run, or by another metric, aside.
        """
        saved = self.opened.saved
        if saved is not None:
            has_same_ranks: list[bool] = []
            with progress("loading the checkpoint"):
                for group in self.groups.values():
                    with self.phases.update(group):
                        has_same_ranks += group.call(TrainedWorker.load_states, str(saved.path))
            state.load_state_dict(saved.state[RUN])
            if isinstance(state.sampler, RolloutQueue):
                state.sampler.load_groups(saved.path)
            self.kept = state.state_dict()
            if not all(has_same_ranks):
                warn("another number of ranks goes on: the same prompts, other random numbers.")
        is_known = [found.name for found in state.evaluations[:1]] == [self.best_metric]
        if self.best_metric is not None and not is_known:
            aside = together(self.opened.store.set_best_aside)
            if aside is not None:
                warn(f"the best model of another run, or by another metric, was moved to {aside}.")

    def is_due(self, state: RunState, *, is_last: bool = False) -> bool:
        """Return True if it is time to save: every `--save_steps` steps, and at the end what was
        not saved yet.
        """
        if not self.opened.is_on or state.global_step == 0:
            return False
        if is_last:
            return self.kept != state.state_dict()
        return state.global_step % self.opened.config.save_steps == 0

    def save_last(self, state: RunState) -> str:
        """Save a run that was asked to stop, between two steps; return what became of it and how
        to go on.
        """
        if state.global_step == 0:
            return "no step is done, and nothing was saved"
        is_saved = self.kept == state.state_dict()
        outcome = self.opened.save_last(lambda: is_saved or self.save(state))
        return f"step {state.global_step} is done, {outcome}"

    def save(self, state: RunState) -> bool:
        """Save now, between two steps; return True if it was saved.

        Raises CheckpointError when it failed several times in a row.
        """
        # Finished samples that wait for later steps. What is finished while the state is taken is
        # pending in it, and generated again.
        queue = state.sampler if isinstance(state.sampler, RolloutQueue) else None
        groups = [] if queue is None else queue.finished_groups()
        content = state.state_dict()

        def write(folder: Path) -> None:
            for group in self.groups.values():
                with self.phases.update(group):  # states that were moved away come back
                    group.call(TrainedWorker.save_states, str(folder))
            if queue is not None:
                write_groups(folder, groups, queue.origin)

        is_saved = self.opened.save(
            state.global_step,
            write=write,
            export=lambda path: self.groups["actor"].call(PolicyModelActor.export, str(path)),
            state={RUN: content},
        )
        self.kept = content if is_saved else self.kept
        return is_saved

    def keep_best(self, evaluation: Evaluation) -> None:
        """Keep the model of an evaluation, which is the best so far, in place of the one before."""
        actor = self.groups["actor"]
        with self.phases.turn:  # scoring and training are in turn on shared devices
            is_saved = self.opened.save_best(
                evaluation.step,
                lambda path: actor.call(PolicyModelActor.export_policy, str(path)),
            )
        if is_saved:
            name, step, value, _ = evaluation
            notice(f"best so far: {name} {value:.4g} at step {step}")
