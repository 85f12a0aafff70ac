"""What the config of every training command has at its top, and how its cross-field rules are collected.

A rule is a method `check_...` that yields one line for each problem; `note_...` yields lines that do not stop a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import model_validator
from typing_extensions import Self

from openrlhf.config.base import Base, is_given, option, with_value
from openrlhf.config.common import CheckpointConfig, LoggerConfig, TrainConfig


class RunConfig(Base):
    """Top of every training command's tree."""

    # Flags that old commands have and nothing reads: accepted with a notice.
    dead_flags: ClassVar[tuple[str, ...]] = ()

    local_rank: int = option(-1, "Set by launchers; wins over LOCAL_RANK.", "local_rank")
    use_ms: bool = option(False, "ModelScope instead of the Hugging Face hub.", "use_ms")
    trust_remote_code: bool = option(
        False, "Run Python files that come with a model or tokenizer.", "trust_remote_code"
    )
    train: TrainConfig = TrainConfig()
    ckpt: CheckpointConfig = CheckpointConfig()
    logger: LoggerConfig = LoggerConfig()

    def derived(self) -> Iterator[tuple[str, object]]:
        """Leaves whose default follows from the rest: pairs of path and value, each applied before the next."""
        if self.logger.tensorboard_dir == "true":
            yield "logger.tensorboard_dir", f"{self.ckpt.output_dir}/tensorboard"
        if self.train.micro_batch_size > self.train.batch_size and not is_given(
            self, "train.micro_batch_size"
        ):
            yield "train.micro_batch_size", self.train.batch_size

    @model_validator(mode="after")
    def fill_derived(self) -> Self:
        """Put derived defaults in while the tree is being built, so that it is complete from then on."""
        for path, value in self.derived():
            section, _, rest = path.partition(".")
            part = with_value(getattr(self, section), rest, value)
            object.__setattr__(self, section, part)
        return self

    def problems(self) -> Iterator[str]:
        """Every way in which this config contradicts itself, one line each."""
        yield from self._lines("check_")

    def notices(self) -> Iterator[str]:
        """What a user should know before the run starts, one line each."""
        yield from self._lines("note_")

    def _lines(self, prefix: str) -> Iterator[str]:
        for name in dir(type(self)):
            if name.startswith(prefix):
                yield from getattr(self, name)()

    def note_remote_code(self) -> Iterator[str]:
        """Code from a hub is said loudly."""
        if self.trust_remote_code:
            yield "WARNING: --trust_remote_code: Python files that come with the models are run."
