"""The progress of an RL run and its checkpoints: policy, critic and the controller's own state in
one commit, and next to them the model of the best evaluation.

A folder `global_step<N>` holds `actor`, `critic`, a file of each rank, `state.json` and what was
generated ahead. The controller stages and commits; the ranks write, so on several nodes the folder
has to be shared.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf.algorithms.kl import adaptive_kl_coef
from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed.checkpoints import (
    RUN,
    RunCheckpoints,
    Saved,
    open_checkpoints,
)
from openrlhf.distributed.folders import Write
from openrlhf.errors import CheckpointError, ConfigError, EngineError, LostRankError
from openrlhf.rollout.rollout_queue import RolloutQueue, write_groups
from openrlhf.rollout.step_sampler import StepSampler
from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.ppo_inputs import RunInputs
from openrlhf.trainer.ppo_utils.demands import TRAINED_ROLES
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.workers.model_worker import TrainedWorker
from openrlhf.trainer.workers.policy import PolicyModelActor
from openrlhf.utils.console import notice, warn
from openrlhf.utils.metrics import Metrics, Values
from openrlhf.utils.outcome import noteworthy
from openrlhf.utils.progress import progress, saying_what_is_awaited
from openrlhf.utils.run_folder import HOLDER_FILE

# Attributes that a checkpoint holds as they are.
PLAIN = (
    "global_step",
    "weight_version",
    "num_texts",
    "kl_coef",
    "evaluations",
    "history",
    "num_unlogged",
)


def open_run(config: PPOConfig, inputs: RunInputs) -> RunCheckpoints:
    """Find what the run goes on from, before a model is loaded.

    Raises ConfigError or DataError where settings or prompts forbid to go on.
    """
    # Workers elsewhere may have another working directory.
    ckpt = config.ckpt.model_copy(update={"path": os.path.abspath(config.ckpt.path)})
    return open_checkpoints(ckpt, inputs.data, config)


# Sums over the micro-batches and ranks of a step. A line of the log has their mean over its steps.
OF_A_STEP = ("policy_loss", "critic_loss", "moving_s")


class RunState:
    """The progress of an RL run: saved when it is due, and put back where a checkpoint stands."""

    sampler: StepSampler | RolloutQueue  # the trainer's

    def __init__(
        self,
        config: PPOConfig,
        checkpoints: RunCheckpoints,
        groups: Mapping[str, WorkerGroup],
        phases: DevicePhases,
    ) -> None:
        self.config, self.checkpoints, self.phases = config, checkpoints, phases
        self.kl = config.algo.kl
        self.groups = {role: groups[role] for role in TRAINED_ROLES if role in groups}
        self.global_step = 0  # steps done
        self.weight_version = 0  # steps in which the policy was trained
        self.num_texts = 0  # rows of pre-training text that were mixed in
        self.kl_coef = self.kl.init_coef  # fixed, or steered towards a target
        self.evaluations: list[Values] = []  # the first, the best and the last one
        self.history: list[Values] = []  # metrics of earlier steps, as far as hints look
        self.unlogged, self.num_unlogged = Metrics(), 0  # of the steps since the last line
        self.finished: list[Any] = []  # groups that waited for their step at the last `state_dict`

    def adapt_kl_coef(self, kl: float, num_samples: int) -> None:
        """Move the coefficient, if it has a target, after a step whose mean KL to the reference was
        `kl`.
        """
        target, horizon = self.kl.target, self.kl.horizon
        if target is not None:
            self.kl_coef = adaptive_kl_coef(
                self.kl_coef, kl, target=target, horizon=horizon, num_samples=num_samples
            )

    def note_step(self, metrics: Metrics) -> None:
        """Add a step's metrics, which are whole, to those that the next line of the log is of."""
        self.unlogged.merge(metrics.as_means(OF_A_STEP))
        self.num_unlogged += 1

    def state_dict(self) -> dict[str, Any]:
        """Return everything as JSON; taken between two steps."""
        # What is finished while the state is taken is pending in it, and generated again.
        if isinstance(self.sampler, RolloutQueue):
            self.finished = self.sampler.finished_groups()
        plain = {name: getattr(self, name) for name in PLAIN}
        unlogged = dict(self.unlogged.cells)
        return plain | {"sampler": self.sampler.state_dict(), "unlogged": unlogged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken; without "sampler" prompts stay as they are."""
        for name in PLAIN:
            setattr(self, name, state[name])
        # A fixed one is what this command says; 0 is none that a target could move.
        if self.kl.target is None or self.kl_coef == 0:
            self.kl_coef = self.kl.init_coef
        if "sampler" in state:
            self.sampler.load_state_dict(state["sampler"])
        # A checkpoint of an older version has sums.
        self.unlogged = Metrics(state["unlogged"]).as_means(OF_A_STEP, self.num_unlogged)

    def check_is_shared(self) -> None:
        """Raise ConfigError if a rank that has to write checkpoints does not see their folder."""
        root = self.checkpoints.store.root
        try:
            for group in self.groups.values() if self.checkpoints.config.uses_root else ():
                group.call(TrainedWorker.check_sees, str(root / HOLDER_FILE))
        except CheckpointError as error:
            text = str(error).replace(str(root / HOLDER_FILE), f"--ckpt_path {root}")
            raise ConfigError(text) from error

    def check_room(self) -> None:
        """Raise ConfigError where the disk has no room for the model or a checkpoint."""
        folder = os.path.abspath(self.config.ckpt.output_dir)
        model_bytes, *_ = self.groups["actor"].call(PolicyModelActor.check_room, folder)
        sizes = [group.call(TrainedWorker.num_state_bytes)[0] for group in self.groups.values()]
        self.checkpoints.check_room(sum(sizes), model_bytes)

    def resume(self) -> None:
        """Put models, optimizers, random numbers and the controller where they were; move the best
        model of another run aside.
        """
        saved, keeps_best = self.checkpoints.saved, self.checkpoints.config.keeps_best
        self.checkpoints.set_other_best_aside()
        if saved is None:
            return
        with progress("loading the checkpoint"):
            has_same_ranks = self._load_models(saved)
        self.load_state_dict(saved.state[RUN])
        if keeps_best and self.checkpoints.store.best() is None:
            self.evaluations = [found for found in self.evaluations if found["step"] == 0]
        if isinstance(self.sampler, RolloutQueue):
            self.sampler.load_groups(saved.path)
        self.checkpoints.saved_state = self.state_dict()
        if not all(has_same_ranks):
            warn("another number of ranks goes on: the same prompts, other random numbers.")

    def note_begin(self) -> None:
        """Note the state before the first step, for a run that has to begin anew."""
        self.begin = json.dumps(self.state_dict())

    def start_again(self, why: LostRankError, saved: Saved | None, *, keeps_samples: bool) -> None:
        """Start the trained models again from a checkpoint, or as the run began, and go back there.
        `keeps_samples`: the next step has its samples, and their ledger stays as it is.
        """
        self._start_models(why)
        first = [found for found in self.evaluations if found["step"] == 0]  # not made again
        begin = json.loads(self.begin) | {"evaluations": first}
        state = begin if saved is None else saved.state[RUN]
        if self.checkpoints.go_back(0 if saved is None else saved.step):
            state["evaluations"] = first  # the next best one has a model again
        if saved is not None:
            try:
                self._load_models(saved)
            except CheckpointError as error:  # the models are new: they are not to be exported
                text = f"{why}. The new ranks cannot load {saved.path}: {error}"
                raise EngineError(text) from error
        if keeps_samples:
            del state["sampler"]
        self.load_state_dict(state)
        if not keeps_samples and saved is not None and isinstance(self.sampler, RolloutQueue):
            self.sampler.load_groups(saved.path)

    def _start_models(self, why: LostRankError) -> None:
        for role in sorted(self.groups, key=lambda role: role != why.role):  # who is lost is named
            self.groups[role].start_again(why if role == why.role else None)
            self.phases.put_away(self.groups[role])

    def _load_models(self, saved: Saved) -> list[bool]:
        """Put the models where a checkpoint stands; return for every rank whether there were as
        many. A rank that is lost meanwhile is started again, with all others.
        """
        while True:
            try:
                has_same_ranks: list[bool] = []
                for role, group in self.groups.items():
                    awaited = saying_what_is_awaited(f"{role} to load {saved.path}")
                    with self.phases.update(group), awaited:
                        has_same_ranks += group.call(TrainedWorker.load_states, str(saved.path))
            except LostRankError as why:
                self._start_models(why)
            else:
                return has_same_ranks

    def take(self, folder: Path) -> Write:
        """Have the ranks of all models copy their states; return the function that has them write
        the copies, and writes finished samples that wait for later steps.
        """
        groups, finished, queue = list(self.groups.values()), self.finished, self.sampler
        free: dict[str, int] = {}  # bytes by node, before any model is copied
        for group in groups:
            with self.phases.update(group):  # states that were moved away come back
                for found in group.call(TrainedWorker.take_states, str(folder), free):
                    free |= found

        def write() -> None:
            found = [group.call_aside(TrainedWorker.write_taken) for group in groups]
            if problems := [problem for ranks in found for problem in ranks if problem]:
                raise CheckpointError(" ".join(dict.fromkeys(problems)))
            if isinstance(queue, RolloutQueue):
                write_groups(folder, finished, queue.sampling)

        return write

    def export(self, path: Path) -> None:
        """Write the policy as transformers reads it."""
        self.groups["actor"].call(PolicyModelActor.export, str(path))

    def note_evaluation(self, name: str, found: Values) -> None:
        """Keep the first, the best and the last evaluation by a pass rate, and the model of the
        best one in place of the one before.
        """
        self.evaluations = noteworthy([*self.evaluations, found], name)
        if not self.checkpoints.config.keeps_best or self.evaluations[1] is not found:
            return
        actor = self.groups["actor"]
        with self.phases.device_lock:  # no reward model scores on the same devices
            is_saved = self.checkpoints.save_best(
                self.global_step,
                lambda path: actor.call(PolicyModelActor.export_policy, str(path)),
            )
        if is_saved:
            notice(f"best so far: {name} {found[name]:.4g} at step {self.global_step}")
