"""Checkpoints of an RL run: policy, critic and the controller's own state in one commit, and the
model of the best evaluation beside them.

A folder `global_step<N>` holds `actor`, `critic`, a file of each rank, `state.json` and what was
generated ahead. The controller stages and commits; the ranks write, so on several nodes the folder
has to be shared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.distributed.checkpoints import DataFacts, RunCheckpoints, open_checkpoints
from openrlhf.distributed.collectives import on_main
from openrlhf.distributed.manifest import TEMPORARY
from openrlhf.errors import ConfigError
from openrlhf.trainer.ppo_setup import RunInputs
from openrlhf.trainer.ppo_state import RunState
from openrlhf.trainer.ppo_utils.evaluation import pass_rate_names
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.ray.cluster import TRAINED_ROLES
from openrlhf.trainer.ray.phases import DevicePhases
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.trainer.ray.trained_worker import TrainedWorker
from openrlhf.utils.logging import notice, warn
from openrlhf.utils.progress import progress

RUN = "run"  # the controller's own state, in state.json


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

    def touch() -> str:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        return str(probe)

    path = on_main(touch)
    answers = [
        who
        for role in TRAINED_ROLES
        if role in groups
        for who in groups[role].call(TrainedWorker.unseen, path)
    ]
    on_main(lambda: probe.unlink(missing_ok=True))
    blind = [who for who in answers if who is not None]
    if blind:
        raise ConfigError(
            f"--ckpt_path {root} is not seen by {', '.join(blind)}. "
            "Type a --ckpt_path on a file system that all nodes share."
        )


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
        self.best = None if best_metric is None else on_main(self._best_so_far)

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
