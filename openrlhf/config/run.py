"""What the config of every command has at its top, and how its rules are collected.

A rule is a method `check_...` that yields one line for each problem; `note_...` yields lines that
do not stop a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import model_validator
from typing_extensions import Self

from openrlhf.config.base import Base, Caution, is_given, option, switch, with_default
from openrlhf.config.common import (
    CheckpointConfig,
    EvalConfig,
    LoggerConfig,
    TrainConfig,
    timed_folder,
)


class CommandConfig(Base):
    """Top of every command's tree."""

    # Flags that old commands have and nothing reads: accepted with a notice.
    dead_flags: ClassVar[tuple[str, ...]] = ()

    use_ms: bool = switch("ModelScope instead of the Hugging Face hub.")
    trust_remote_code: bool = switch("Run Python files that come with a model or tokenizer.")

    def derived(self) -> Iterator[tuple[str, object]]:
        """Leaves whose default follows from the rest; each pair is applied before the next."""
        yield from ()

    @model_validator(mode="after")
    def fill_derived(self) -> Self:
        """Put derived defaults in while the tree is being built; it is complete from then on."""
        for path, value in self.derived():
            section, _, rest = path.partition(".")
            part = with_default(getattr(self, section), rest, value)
            object.__setattr__(self, section, part)
        return self

    def problems(self) -> Iterator[str]:
        """Every way in which this config contradicts itself, one line each."""
        yield from self._lines("check_")

    def notices(self) -> Iterator[str]:
        """What a user should know before the run starts, one line each."""
        yield from self._lines("note_")

    def _lines(self, prefix: str) -> Iterator[str]:
        names = [name for part in reversed(type(self).__mro__) for name in vars(part)]
        for name in dict.fromkeys(names):
            if name.startswith(prefix):
                yield from getattr(self, name)()

    def note_remote_code(self) -> Iterator[str]:
        """Code from a hub is said loudly."""
        if self.trust_remote_code:
            yield Caution("--trust_remote_code: Python files that come with the models are run.")


class RunConfig(CommandConfig):
    """Top of every training command's tree."""

    local_rank: int = option(-1, "Set by launchers; wins over LOCAL_RANK.")
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    ckpt: CheckpointConfig = CheckpointConfig()
    logger: LoggerConfig = LoggerConfig()

    def derived(self) -> Iterator[tuple[str, object]]:
        """Defaults that follow: run folder, folder of TensorBoard, micro-batches within batches."""
        yield from super().derived()
        if not is_given(self, "ckpt.output_dir"):
            yield (
                "ckpt.output_dir",
                timed_folder(type(self).__name__.removesuffix("Config").lower()),
            )
        if self.logger.tensorboard_dir == "true":
            yield "logger.tensorboard_dir", f"{self.ckpt.output_dir}/tensorboard"
        if self.train.micro_batch_size > self.train.batch_size and not is_given(
            self, "train.micro_batch_size"
        ):
            yield "train.micro_batch_size", self.train.batch_size

    def check_checkpoints_hold_something(self) -> Iterator[str]:
        """A checkpoint is what training goes on from, an exported model, or both."""
        if self.ckpt.save_steps > 0 and self.ckpt.disable_ds and not self.ckpt.save_hf:
            yield (
                f"--save_steps {self.ckpt.save_steps} with --disable_ds_ckpt saves nothing. "
                "Add --save_hf_ckpt, or leave one of them out."
            )

    def check_step_intervals(self) -> Iterator[str]:
        """-1 is off; there is no every-zeroth step."""
        for name, steps in (("eval_steps", self.eval.steps), ("save_steps", self.ckpt.save_steps)):
            if steps == 0 or steps < -1:
                yield f"--{name} must be -1 or above 0: {steps}. Type --{name} -1 to switch it off."
