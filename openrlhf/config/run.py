"""What the config of every command has at its top, and how its rules are collected.

`problems` yields one line for each way in which a config contradicts itself, `notices` one for each
thing to say before a run starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import model_validator
from typing_extensions import Self

from openrlhf.config.base import (
    REMEDIES,
    Base,
    Caution,
    is_blank,
    is_given,
    option,
    switch,
    value_at,
    walk,
    with_default,
)
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
        """Yield leaves whose default follows from the rest; each is applied before the next."""
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
        """Yield one line for everything that is missing or contradicts something else."""
        for leaf in walk(type(self)):
            if leaf.info.needed and is_blank(value_at(self, leaf.path)):
                remedy = " or ".join(leaf.choices) or REMEDIES.get(leaf.info.opens or "", "a text")
                yield f"No {leaf.info.needed} is named. Type {leaf.flag} with {remedy}."

    def notices(self) -> Iterator[str]:
        """Yield one line for everything a user should know before the run starts."""
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
        """Yield the run folder and the folder of TensorBoard."""
        if not is_given(self, "ckpt.output_dir"):
            stem = type(self).__name__.removesuffix("Config").lower()
            yield "ckpt.output_dir", timed_folder(stem)
        if self.logger.tensorboard_dir == "true":
            yield "logger.tensorboard_dir", f"{self.ckpt.output_dir}/tensorboard"

    def problems(self) -> Iterator[str]:
        """Add checkpoints that hold neither what training goes on from nor a model."""
        yield from super().problems()
        if self.ckpt.save_steps > 0 and self.ckpt.disable_ds and not self.ckpt.save_hf:
            yield (
                f"--save_steps {self.ckpt.save_steps} with --disable_ds_ckpt saves nothing. "
                "Add --save_hf_ckpt, or leave one of them out."
            )
