"""Config of the commands that learn from preferences: train_rm, train_dpo and train_kto.

Field path = dotted flag; the names after the help text are the flat flag and what Hugging Face
users type. A rule is a method `check_...` (refused) or `note_...` (said, then on we go).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from openrlhf.config.base import Base, is_given, option, switch
from openrlhf.config.common import (
    AdamConfig,
    CheckpointConfig,
    EvalConfig,
    LoggerConfig,
    TrainConfig,
    logger_of,
)
from openrlhf.config.notices import Caution
from openrlhf.config.supervised import (
    ModelConfig,
    PromptedDataConfig,
    SupervisedConfig,
    SupervisedDataConfig,
)

PreferenceLossName = Literal[
    "sigmoid",
    "ipo",
    "hinge",
    "robust",
    "simpo",
    "orpo",
    "cpo",
    "apo_zero",
    "apo_down",
    "exo_pair",
]
REFERENCE_FREE_LOSSES = ("simpo", "orpo", "cpo")
SMOOTHED_LOSSES = ("sigmoid", "robust", "exo_pair")
EXO_LABEL_SMOOTHING = 1e-3  # the loss takes its logarithm


class PairDataConfig(SupervisedDataConfig):
    """`data.*` of commands that learn from a better and a worse answer."""

    prompt_key: str | None = option(
        None, "Column of the prompt; unset: `prompt` if there is one, else no column.", "prompt_key"
    )
    chosen_key: str = option("chosen", "Column of the better answer.", "chosen_key")
    rejected_key: str = option("rejected", "Column of the worse answer.", "rejected_key")
    input_template: str | None = option(
        None,
        "Text around a plain prompt, with {} for it.",
        "input_template",
        only_with="!data.apply_chat_template",
    )
    max_len: int = option(512, "Most tokens in a row.", "max_len", "max_length", gt=0)


class RMModelConfig(ModelConfig):
    """`model.*` of train_rm."""

    loss_type: Literal["sigmoid", "logexp"] = option(
        "sigmoid", "-log sigmoid(difference), or log(1 + exp(-difference)).", "loss"
    )
    margin_loss_enable: bool = switch(
        "Subtract the column `margin` from the difference.", "margin_loss"
    )
    compute_fp32_loss_enable: bool = switch(
        "Accepted for old commands: the loss is always in fp32.",
        "compute_fp32_loss",
        unused="here: the loss is always in fp32",
    )


class RMConfig(SupervisedConfig):
    """Pairwise reward model (train_rm)."""

    has_value_head: ClassVar[bool] = True

    adam: AdamConfig = AdamConfig(lr=9e-6)
    model: RMModelConfig = RMModelConfig()
    data: PairDataConfig = PairDataConfig()
    train: TrainConfig = TrainConfig(micro_batch_size=1)
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_rm")
    logger: LoggerConfig = logger_of("openrlhf_train_rm", "rm")


class DPOModelConfig(ModelConfig):
    """`model.*` of train_dpo."""

    loss_type: PreferenceLossName = option("sigmoid", "Preference loss.", "loss_type")
    ipo_enable: bool = switch("The same as --loss_type ipo.", "ipo")
    beta: float = option(0.1, "Strength of the preference.", "beta", gt=0)
    label_smoothing: float = option(
        0.0,
        f"Part of the labels taken as wrong (cDPO); unset with exo_pair: {EXO_LABEL_SMOOTHING}.",
        "label_smoothing",
        ge=0,
        lt=0.5,
    )
    ipo_length_average: bool = switch(
        "IPO on the mean log-probability of a token, not on sums.",
        "ipo_length_average",
        only_with="model.loss_type=ipo",
    )
    simpo_gamma: float = option(
        0.5,
        "Margin of SimPO, subtracted from beta times the difference.",
        "simpo_gamma",
        ge=0,
        only_with="model.loss_type=simpo",
    )
    nll_loss_coef: float = option(
        0.0, "Weight of the language-model loss on better answers.", "nll_loss_coef", ge=0
    )


class RefConfig(Base):
    """`ref.*`: the frozen model that log-probabilities are compared with."""

    offload: bool = switch("Keep its weights in CPU memory.", "ref_offload")
    precompute_log_probs: bool = switch(
        "Compute its log-probabilities once, before training.", "precompute_ref_log_probs"
    )


class DPORefConfig(RefConfig):
    """`ref.*` of train_dpo."""

    model_name_or_path: str | None = option(
        None, "Reference model; unset: the same as --pretrain.", "ref_pretrain", opens="model"
    )


class DPOConfig(SupervisedConfig):
    """Direct preference optimisation and its relatives (train_dpo)."""

    adam: AdamConfig = AdamConfig(lr=1e-5)
    model: DPOModelConfig = DPOModelConfig()
    ref: DPORefConfig = DPORefConfig()
    data: PairDataConfig = PairDataConfig()
    eval: EvalConfig = EvalConfig(split="test")
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_dpo")
    logger: LoggerConfig = logger_of("openrlhf_train_dpo", "exp")

    def derived(self) -> Iterator[tuple[str, object]]:
        """Defaults that follow: the loss of --ipo, and label smoothing where a loss needs some."""
        yield from super().derived()
        if self.model.ipo_enable and not is_given(self, "model.loss_type"):
            yield "model.loss_type", "ipo"
        is_smoothed = is_given(self, "model.label_smoothing")
        if self.model.loss_type == "exo_pair" and not is_smoothed:
            yield "model.label_smoothing", EXO_LABEL_SMOOTHING

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with a reference model."""
        return self.model.loss_type not in REFERENCE_FREE_LOSSES

    def check_ipo_is_the_loss(self) -> Iterator[str]:
        """--ipo and --loss_type name one loss."""
        loss_type = self.model.loss_type
        if self.model.ipo_enable and loss_type != "ipo":
            yield f"--ipo is set with --loss_type {loss_type}. Leave one of them out."

    def check_label_smoothing_has_a_loss_that_takes_it(self) -> Iterator[str]:
        """Other losses have no formula for labels that may be wrong."""
        value, loss_type = self.model.label_smoothing, self.model.loss_type
        if value and loss_type not in SMOOTHED_LOSSES:
            yield (
                f"--label_smoothing {value} is set with --loss_type {loss_type}, which takes "
                f"none. Leave it out or type one of {', '.join(SMOOTHED_LOSSES)}."
            )

    def check_exo_smooths_its_labels(self) -> Iterator[str]:
        """The logarithm of the label smoothing is a part of the loss."""
        if self.model.loss_type == "exo_pair" and self.model.label_smoothing == 0:
            yield (
                "--loss_type exo_pair needs --label_smoothing above 0: 0.0. Type "
                f"--label_smoothing {EXO_LABEL_SMOOTHING}."
            )

    def note_robust_loss_has_wrong_labels_to_expect(self) -> Iterator[str]:
        """Where no label is taken as wrong, its formula is that of DPO."""
        if self.model.loss_type == "robust" and self.model.label_smoothing == 0:
            yield Caution(
                "--loss_type robust with --label_smoothing 0.0 is plain DPO, --loss_type sigmoid. "
                "Type --label_smoothing with the part of the labels that may be wrong, such as 0.1."
            )


class KTOModelConfig(ModelConfig):
    """`model.*` of train_kto."""

    beta: float = option(0.01, "Strength of the preference.", "beta", gt=0)
    desirable_loss_weight: float = option(
        1.0, "Weight of good answers.", "desirable_loss_weight", "desirable_weight", ge=0
    )
    undesirable_loss_weight: float = option(
        1.0, "Weight of bad answers.", "undesirable_loss_weight", "undesirable_weight", ge=0
    )


class KTODataConfig(PromptedDataConfig):
    """`data.*` of train_kto."""

    label_key: str = option("label", "Column of the label: 1 good, 0 bad.", "label_key")


class KTOConfig(SupervisedConfig):
    """Kahneman-Tversky optimisation, from single good and bad answers (train_kto)."""

    adam: AdamConfig = AdamConfig(lr=1e-5)
    model: KTOModelConfig = KTOModelConfig(model_name_or_path="bigscience/bloomz-1b7")
    ref: RefConfig = RefConfig()
    data: KTODataConfig = KTODataConfig()
    eval: EvalConfig = EvalConfig(split="test")
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_kto")
    logger: LoggerConfig = logger_of("openrlhf_train_dpo", "rm")

    def check_some_answers_count(self) -> Iterator[str]:
        """With two weights of zero nothing is learnt."""
        if self.model.desirable_loss_weight == self.model.undesirable_loss_weight == 0:
            yield (
                "--desirable_loss_weight and --undesirable_loss_weight are both 0. Type "
                "--desirable_loss_weight 1."
            )

    def check_batch_has_mismatched_pairs(self) -> Iterator[str]:
        """The reference point pairs a prompt with the answer to another of its batch."""
        if self.train.batch_size < 2:
            yield (
                f"--train_batch_size must be at least 2: {self.train.batch_size}. Type "
                "--train_batch_size 2."
            )

    def note_default_model(self) -> Iterator[str]:
        """A model that nobody typed is named."""
        if not is_given(self, "model.model_name_or_path"):
            yield f"--pretrain is not set: starting from {self.model.model_name_or_path}."
