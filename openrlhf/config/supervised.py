"""Config of train_sft, and the parts of the tree that all supervised commands share.

Field path = dotted flag; the names after the help text are the flat flag and what Hugging Face
users type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from openrlhf.config.base import Base, is_given, option, switch
from openrlhf.config.checks import (
    batch_problems,
    decay_problems,
    is_blank,
    precision_problems,
    router_loss_problems,
    schedule_problems,
    split_problems,
    universal_problems,
)
from openrlhf.config.common import (
    CheckedDataConfig,
    CheckpointConfig,
    DeepSpeedConfig,
    LoggerConfig,
    OptimizerConfig,
    TrainConfig,
    logger_of,
)
from openrlhf.config.run import RunConfig


class ModelConfig(Base):
    """`model.*`: the model a supervised command trains."""

    model_name_or_path: str | None = option(
        None,
        "Model to start from: hub id or path.",
        "pretrain",
        "model_name_or_path",
        opens="model",
        at_resume="refused",
    )
    gradient_checkpointing_enable: bool = switch(
        "Recompute activations in the backward pass.", "gradient_checkpointing"
    )
    gradient_checkpointing_reentrant: bool = switch(
        "The reentrant variant of it.", "gradient_checkpointing_use_reentrant"
    )
    aux_loss_coef: float = option(
        0.0, "Weight of the load-balancing loss of experts.", "aux_loss_coef", ge=0
    )


class SFTModelConfig(ModelConfig):
    """`model.*` of train_sft."""

    pretrain_mode_enable: bool = switch(
        "Continued pre-training: every token of --input_key is learnt.", "pretrain_mode"
    )


class DatasetConfig(CheckedDataConfig):
    """`data.*`: where rows come from, and how their text becomes tokens."""

    dataset: str | None = option(
        None,
        "Rows: hub ids or paths, with commas between.",
        "dataset",
        "dataset_name",
        opens="data",
    )
    dataset_probs: str | None = option(
        None,
        "Mixing probabilities of --dataset, with commas; unset: one data set after the other.",
        "dataset_probs",
    )
    dataset_split: str = option("train", "Split of the rows.", "dataset_split")
    max_len: int = option(2048, "Most tokens in a row.", "max_len", "max_length", gt=0)
    max_samples: int = option(
        1_000_000,
        "Most rows of each data set and of all together; evaluation data is capped alike.",
        "max_samples",
        gt=0,
    )
    apply_chat_template: bool = switch(
        "Use the tokenizer's chat template; unset: for message lists.", "apply_chat_template"
    )
    tokenizer_chat_template: str | None = option(
        None, "A chat template to use instead.", "tokenizer_chat_template", opens="template"
    )
    overlong_rows: Literal["filter", "truncate", "error"] = option(
        "filter", "Rows over --max_len: counted and left out, cut, or refused.", "overlong_rows"
    )
    disable_fast_tokenizer: bool = switch(
        "Use the slow tokenizer.",
        "disable_fast_tokenizer",
        unused="with transformers 5: all are fast",
    )


class AnsweredDataConfig(DatasetConfig):
    """`data.*` of commands that read prompts with answers."""

    input_key: str = option("input", "Column of the prompt, text or messages.", "input_key")
    output_key: str | None = option(
        None,
        "Column of the answer; unset: `completion`, or the last message of a chat.",
        "output_key",
    )
    input_template: str | None = option(
        "User: {}\nAssistant: ",
        "Text around a plain prompt, with {} for it.",
        "input_template",
        only_with="!data.apply_chat_template",
    )


class SupervisedDataConfig(DatasetConfig):
    """`data.*` of commands that train on rows."""

    dataloader_num_workers: int = option(
        0,
        "Accepted for old commands: the trainer packs batches itself.",
        "dataloader_num_workers",
        unused="here: the trainer packs batches itself",
        ge=0,
    )


class PromptedDataConfig(SupervisedDataConfig, AnsweredDataConfig):
    """`data.*` of commands that train on prompts with answers."""


class SFTDataConfig(PromptedDataConfig):
    """`data.*` of train_sft."""

    multiturn: bool = switch("Learn every assistant turn.", "multiturn")


class SupervisedConfig(RunConfig, OptimizerConfig):
    """What the config of every supervised trainer has; each has its own defaults."""

    has_value_head: ClassVar[bool] = False

    model: ModelConfig = ModelConfig()
    data: SupervisedDataConfig = SupervisedDataConfig()
    train: TrainConfig = TrainConfig()
    ds: DeepSpeedConfig = DeepSpeedConfig()

    def check_model_is_named(self) -> Iterator[str]:
        """There is no default model."""
        if is_blank(self.model.model_name_or_path):
            yield "No model is named. Type --pretrain with a hub id or a path."

    def check_dataset_is_named(self) -> Iterator[str]:
        """There is no default dataset."""
        if is_blank(self.data.dataset):
            yield "No training data is named. Type --dataset with a hub id or a path."

    def check_batch_sizes(self) -> Iterator[str]:
        """A micro-batch is a part of a batch."""
        yield from batch_problems(self.train.micro_batch_size, self.train.batch_size)

    def check_weights_can_be_trained(self) -> Iterator[str]:
        """In this number of bits, split like this, summed like this."""
        yield from precision_problems(self.ds)
        yield from universal_problems(self.ds, self)
        yield from split_problems(self.ds, self)

    def check_router_loss_has_a_gradient(self) -> Iterator[str]:
        """The reentrant variant runs layers without a graph."""
        model = self.model
        yield from router_loss_problems(
            model.aux_loss_coef,
            is_checkpointed=model.gradient_checkpointing_enable,
            is_reentrant=model.gradient_checkpointing_reentrant,
        )

    def check_learning_rate_schedule(self) -> Iterator[str]:
        """The schedule has a name that exists, and a decay has somewhere to go."""
        yield from schedule_problems(self.lr_scheduler)
        yield from decay_problems(self, "learning_rate")


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning and continued pre-training (train_sft)."""

    dead_flags: ClassVar[tuple[str, ...]] = ("train_split",)

    model: SFTModelConfig = SFTModelConfig()
    data: SFTDataConfig = SFTDataConfig()
    train: TrainConfig = TrainConfig(max_epochs=2)
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_sft")
    logger: LoggerConfig = logger_of("openrlhf_train_sft", "sft")

    def check_multiturn_has_a_template(self) -> Iterator[str]:
        """Turns are found from the chat template, which message lists take unasked."""
        is_refused = is_given(self, "data.apply_chat_template")
        if self.data.multiturn and is_refused and not self.data.apply_chat_template:
            yield "--multiturn is set with --apply_chat_template false. Leave one of them out."

    def check_pretrain_mode_is_plain_text(self) -> Iterator[str]:
        """Continued pre-training reads text, not conversations."""
        for name in ("multiturn", "apply_chat_template"):
            if self.model.pretrain_mode_enable and getattr(self.data, name):
                yield f"--pretrain_mode is set together with --{name}. Leave one of them out."
