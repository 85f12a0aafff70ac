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
from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.distributed.checkpoints import DataFacts, RunCheckpoints, open_checkpoints
from openrlhf.distributed.collectives import together
from openrlhf.distributed.manifest import TEMPORARY
from openrlhf.errors import CheckpointError, ConfigError
from openrlhf.rollout.kept_groups import KeptGroups
from openrlhf.rollout.rollout_queue import RolloutQueue
from openrlhf.rollout.step_sampler import StepSampler
from openrlhf.trainer.ppo_setup import RunInputs
from openrlhf.trainer.ppo_utils.evaluation import Evaluation, noteworthy, pass_rate_names
from openrlhf.trainer.ppo_utils.replay_buffer import TextMixer
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.model_actor import TrainedWorker
from openrlhf.trainer.ray.phases import DevicePhases
from openrlhf.trainer.ray.placement import TRAINED_ROLES
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.utils.logging import needed_history, notice, warn
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.progress import progress

RUN = "run"  # the controller's own state, in state.json


@dataclass
class KLController:
    """Holds beta; `target` None keeps it constant."""

    coef: float
    target: float | None = None
    horizon: int = 10000

    def update(self, kl: float, num_samples: int) -> None:
        """Move beta after a step whose mean KL to the reference was `kl`."""
        if self.target is not None:
            self.coef = adaptive_kl_coef(
                self.coef, kl, target=self.target, horizon=self.horizon, num_samples=num_samples
            )

    def state_dict(self) -> dict[str, float]:
        """Return beta, for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load an adapted beta; a constant one stays what this command says."""
        if self.target is not None:
            self.coef = state["coef"]


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


def open_run(config: PPOConfig, inputs: RunInputs) -> RunCheckpoints:
    """Find what the run goes on from, before a model is loaded.

    Raises ConfigError or DataError where settings or prompts forbid to go on.
    """
    best_metric(config, inputs.eval_prompts)  # refuses a name that no evaluation logs
    facts = DataFacts(inputs.prompts.fingerprint, len(inputs.prompts), config.train.seed)
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


def best_metric(config: PPOConfig, eval_prompts: PromptDataset | None) -> str | None:
    """Return the metric by which the best model is kept, or None: without a name only beside
    checkpoints. Raises ConfigError for a name that no evaluation logs.
    """
    key = config.ckpt.best_metric_key
    if key == "none" or eval_prompts is None or (key == "" and config.ckpt.save_steps <= 0):
        return None
    names = pass_rate_names(
        dict.fromkeys(prompt.datasource for prompt in eval_prompts),
        config.eval.n_samples_per_prompt,
    )
    if key == "":
        return next(name for name in names if name.endswith("_pass1"))
    found = [name for name in names if key in (name, name.removeprefix("eval/"))]
    if not found:
        raise ConfigError(
            f"--ckpt.best_metric_key {key} is no pass rate of the evaluation. Type one of "
            f"{', '.join(names)}, or none."
        )
    return found[0]


def check_is_shared(
    config: PPOConfig, opened: RunCheckpoints, groups: Mapping[str, WorkerGroup]
) -> None:
    """Raise ConfigError if a rank that has to write checkpoints does not see their folder."""
    ckpt = config.ckpt
    if ckpt.save_steps <= 0 and ckpt.best_metric_key in ("", "none") and opened.saved is None:
        return
    root = opened.store.root
    probe = root / f"{TEMPORARY}probe-{os.getpid()}"

    def touch() -> None:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()

    together(touch)
    try:
        for role in TRAINED_ROLES:
            if role in groups:
                groups[role].call(TrainedWorker.check_sees, str(probe))
    except CheckpointError as error:
        raise ConfigError(str(error).replace(str(probe), f"--ckpt_path {root}")) from error
    finally:
        probe.unlink(missing_ok=True)


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
        self.best = None if best_metric is None else together(self._best_so_far)

    def resume(self, state: RunState) -> None:
        """Put models, optimizers, random numbers and the controller where they were."""
        saved = self.opened.saved
        if saved is None:
            return
        has_same_ranks: list[bool] = []
        with progress("loading the checkpoint"):
            for group in self.groups.values():
                with self.phases.update(group):
                    has_same_ranks += group.call(TrainedWorker.load_states, str(saved.path))
        state.load_state_dict(saved.state[RUN])
        state.load_groups(saved.path)
        self.kept = state.state_dict()
        if not all(has_same_ranks):
            warn("another number of ranks goes on: the same prompts, other random numbers.")

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
        groups = state.finished_groups()
        content = state.state_dict()

        def write(folder: Path) -> None:
            for role, group in self.groups.items():
                with self.phases.update(group):  # states that were moved away come back
                    self._call(role, TrainedWorker.save_states, folder)
            if groups is not None:
                groups.write(folder)

        cursor = content["sampler"]["cursor"]
        episode, position = cursor["episode"] + 1, cursor["position"]
        place = f"step {state.global_step}, episode {episode}, {position} prompts into it"
        is_saved = self.opened.save(
            state.global_step,
            write=write,
            export=lambda path: self._call("actor", PolicyModelActor.export, path),
            state={RUN: content, "place": place},
        )
        self.kept = content if is_saved else self.kept
        return is_saved

    def keep_best(self, global_step: int, values: Mapping[str, float]) -> None:
        """After an evaluation of the policy as it is: keep it if it is the best so far."""
        value = values.get(self.best_metric or "")
        if value is None or (self.best is not None and value <= self.best["value"]):
            return
        best = {"metric": self.best_metric, "value": value}
        with self.phases.turn:  # scoring and training are in turn on shared devices
            is_saved = self.opened.save_best(
                global_step,
                lambda path: self._call("actor", PolicyModelActor.export_policy, path),
                best,
            )
        if is_saved:
            self.best = best
            notice(f"best so far: {self.best_metric} {value:.4g} at step {global_step}")

    def find(self, step: int) -> Path | None:
        """Return the folder that keeps the model of a step, if any does."""
        return self.opened.store.find(step)

    def _best_so_far(self) -> dict[str, Any] | None:
        """Return the best evaluation so far; one of another run, or by another metric, is moved
        aside with its model.
        """
        store = self.opened.store
        best = store.best()
        if self.opened.saved is not None and (best or {}).get("metric") == self.best_metric:
            return best
        if (aside := store.set_best_aside()) is not None:
            warn(f"the best model of another run, or by another metric, was moved to {aside}.")
        return None

    def _call(self, role: str, method: Any, path: Path) -> None:
        self.groups[role].call(method, str(path))
