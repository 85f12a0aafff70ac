"""Steps that are kept whole for `openrlhf replay`: those of `--dump`, and one that fails because a
number in it is not finite.

`RUN/dumps/step_000005` holds the weights before the step as a checkpoint has them (the states of
the optimizer too where a step has several updates, for the later ones depend on them), the samples
with what the models computed for them, and `step.json`: what the step was told and what came of it.
"""

import io
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from openrlhf.distributed.folders import MARGIN, free_bytes, has_room, write_json
from openrlhf.errors import CheckpointError, LostRankError, NumericsError
from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.ppo_updates import StepInputs
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup
from openrlhf.trainer.workers.model_worker import TrainedWorker
from openrlhf.utils.console import notice, warn
from openrlhf.utils.framework_logs import END_OF_LOG
from openrlhf.utils.images import write_pictures
from openrlhf.utils.memory import human_size
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout, fields_of
from openrlhf.utils.rollout_files import images_of
from openrlhf.utils.run_folder import IMAGES
from openrlhf.utils.threads import IN_CALLS

STEP_FILE, SAMPLES_FILE = "step.json", "samples.pt"
# Columns of an experience that models computed, and that advantages are made of.
COMPUTED = ("old_logprobs", "ref_logprobs", "values")
OF_DATA = ("label", "datasource", "columns", "source_prompt")  # any values; a replay needs none
# The images of samples lie in a folder of the step, once each, and are named by their hashes.


@dataclass(frozen=True)
class RankFailure:
    """The end of a rank in a step.

    Example: `RankFailure(5, "actor rank 3 of  died: pid  was ended by SIGSEGV", ("step5/1/0",))`
    """

    step: int
    how: str  # with the rank, without other numbers and calls, which are others the next time
    sample_ids: tuple[str, ...]

    @classmethod
    def of(cls, why: LostRankError, step: int, rollouts: Sequence[Rollout]) -> "RankFailure":
        """Return the failure of a rank in a step of these samples."""
        said = str(why).partition(END_OF_LOG)[0].partition(IN_CALLS)[0]
        how = re.sub(r"(rank \d+)|\b[0-9a-f]{8,}\b|\d+", r"\1", said)
        return cls(step, how, tuple(rollout.sample_id for rollout in rollouts))

    def is_of(self, step: int, rollouts: Sequence[Rollout]) -> bool:
        """Return True for the same step of the same prompts."""
        ids = tuple(rollout.sample_id for rollout in rollouts)
        return (step, ids) == (self.step, self.sample_ids)


@dataclass
class StepDump:
    """A step while it is made, and what is kept of it.

    Example: `StepDump(Path("out/dumps/step_000005"), step_inputs, rollouts, {"actor": group},
    phases, is_chosen=True)`
    """

    folder: Path
    step_inputs: StepInputs
    rollouts: Sequence[Rollout]
    groups: Mapping[str, WorkerGroup]  # of the models with an optimizer
    phases: DevicePhases
    is_chosen: bool
    experience: Experience | None = None
    begun: list[str] = field(default_factory=list)  # models whose updates were begun
    has_failed: bool = False  # True once it was kept at an update that failed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the step if a number of it is not finite."""
        try:
            yield
        except NumericsError as error:
            self.keep_failed(str(error))
            raise

    def keep_failed(self, error: str) -> None:
        """Keep the step, which has come to an update that fails."""
        self.has_failed = True
        done = TrainedWorker.updates_done
        num_done = {role: self.groups[role].call(done)[0] for role in self.begun}
        self.write(num_done=num_done, error=error)

    def take(self, experience: Experience) -> None:
        """Note what was computed before the updates; keep the step if it is chosen."""
        self.experience = experience
        if self.is_chosen:
            self.write()

    def note(self, metrics: Metrics) -> None:
        """Note what came of the updates."""
        if self.is_chosen and not self.has_failed:
            self.write_step(metrics=metrics.values())

    @property
    def is_kept(self) -> bool:
        """Return True once the step can be replayed."""
        return (self.folder / STEP_FILE).exists()

    @property
    def how_to_replay(self) -> str:
        """Return the command that repeats a kept step."""
        run_dir = shlex.quote(str(self.folder.parents[1]))
        return f"openrlhf replay {run_dir} --step {self.step_inputs.global_step}"

    def remove(self) -> None:
        """Keep the step no more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, *, says: bool = True, **outcome: object) -> None:
        """Keep the step, in place of an earlier attempt, and say so; what cannot be written costs a
        warning.
        """
        step = self.step_inputs.global_step
        folder = str(self.folder.absolute())  # workers may have another working directory
        has_optimizer = max(self.step_inputs.updates) > 1
        try:
            shutil.rmtree(folder, ignore_errors=True)
            self.check_room(has_optimizer)
            self.folder.mkdir(parents=True)
            for group in self.groups.values():
                with self.phases.update(group):
                    group.call(TrainedWorker.save_states, folder, has_optimizer)
            self.write_samples()
            self.write_step(**outcome)
        except (CheckpointError, OSError) as error:
            self.is_chosen = False
            self.remove()
            warn(f"step {step} was not kept: {error}")
            return
        if says:
            notice(f"step {step} was kept: {self.how_to_replay}")

    def check_room(self, has_optimizer: bool) -> None:
        """Raise CheckpointError where the disk has no room for the states."""
        sizes, groups = TrainedWorker.num_state_bytes, self.groups.values()
        needed = sum(group.call(sizes, has_optimizer)[0] for group in groups)
        if not has_room(self.folder, needed):
            raise CheckpointError(
                f"it takes {human_size(needed)}, {human_size(free_bytes(self.folder))} are free "
                f"in {self.folder.parent}, and {MARGIN:.0%} more must be."
            )

    def write_samples(self) -> None:
        """Write the samples and what models computed for them."""
        columns = {name: getattr(self.experience, name, None) for name in COMPUTED}
        known = {name: column for name, column in columns.items() if column is not None}
        content = io.BytesIO()
        samples = [fields_of(rollout, left_out=OF_DATA) for rollout in self.rollouts]
        write_pictures(self.folder / IMAGES, images_of(self.rollouts))
        torch.save({"samples": samples, "computed": self.experience and known}, content)
        (self.folder / SAMPLES_FILE).write_bytes(content.getbuffer())

    def write_step(self, **outcome: object) -> None:
        """Write what the step was told, and what came of it: `num_done` updates of each model were
        made before its weights were written, the others had these `metrics`, or this `error`.
        """
        content = {
            "facts": asdict(self.step_inputs),
            "num_done": {},
            "metrics": {},
            "error": None,
        }
        write_json(self.folder / STEP_FILE, content | outcome)
