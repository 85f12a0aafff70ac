"""Config of the supervised commands: sft, rm, dpo, kto, prm and kd.

Field path = dotted flag; the names after the help text are the flat flag and what Hugging Face
users type.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from openrlhf.config.base import Base, OwnFunction, is_given, option, switch
from openrlhf.config.common import (
    AdamConfig,
    CheckpointConfig,
    EvalConfig,
    LoggerConfig,
    ModelConfig,
    OptimizerConfig,
    StopConfig,
    TextDataConfig,
    TrainConfig,
    TrainingRunConfig,
    clashes,
    logger_of,
)

PreferenceLossName = Literal[
    "sigmoid", "ipo", "hinge", "robust", "simpo", "orpo", "cpo", "apo_zero", "apo_down", "exo_pair"
]
REFERENCE_FREE_LOSSES = ("simpo", "orpo", "cpo")
SMOOTHED_LOSSES = ("sigmoid", "robust", "exo_pair")
EXO_LABEL_SMOOTHING = 1e-3  # the loss takes its logarithm


class SupervisedModelConfig(ModelConfig):
    """`model.*`: the model that is trained."""

    export_fp32: bool = switch("Export the fp32 weights that the optimizer holds in 16-bit runs.")


class SFTModelConfig(SupervisedModelConfig):
    """`model.*` of sft."""

    pretrain_mode_enable: bool = switch(
        "Continued pre-training: every token of --input_key is learnt.", "pretrain_mode"
    )


class DatasetConfig(TextDataConfig):
    """`data.*`: where rows come from, and which columns are read."""

    dataset: str | None = option(
        None,
        "Rows: hub ids or paths, with commas between.",
        "dataset",
        "dataset_name",
        needed="data set",
        opens="data",
    )
    dataset_probs: str | None = option(
        None, "Mixing probabilities of --dataset, with commas; unset: one data set after the other."
    )
    dataset_split: str = option("train", "Split of the rows.")
    max_len: int = option(2048, "Most tokens in a row.", "max_len", "max_length", gt=0)
    overlong_rows: Literal["filter", "truncate", "error"] = option(
        "filter", "Rows over --max_len: counted and left out, cut, or refused."
    )
    output_key: str | None = option(
        None, "Column of the response; unset: `completion`, or the last message."
    )
    multiturn: bool = switch("Learn every assistant turn.")
    prompt_key: str | None = option(None, "Column of the prompt; unset: `prompt`, if it is there.")
    chosen_key: str = option("chosen", "Column of the better response.")
    rejected_key: str = option("rejected", "Column of the worse response.")
    label_key: str = option("label", "Column of the label: 1 good, 0 bad (prm: one a step).")
    overlong_texts: Literal["error", "truncate_left", "truncate_right"] = option(
        "error", "Texts over --max_len: refused, or cut and marked in the response."
    )
    ta_prompt: str | None = option(None, "File of a text before the conversation.", opens="file")


# Leaves of `data.*`: of every command that reads rows, and of those that train.
ROWS = (
    *("tokenizer_chat_template", "chat_template_kwargs", "expect_rows", "expect_sha256"),
    *("duplicate_ids", "bad_rows"),
    *("allow_special_tokens", "dataset", "dataset_probs", "dataset_split", "max_len"),
    *("max_samples", "overlong_rows"),
)
IMAGES = ("image_key", "max_images_per_prompt", "image_min_pixels", "image_max_pixels")
ANSWERED = (*ROWS, "apply_chat_template", "input_template", "input_key", "output_key")
PAIRS = (*ROWS, "apply_chat_template", "input_template", "prompt_key", "chosen_key", "rejected_key")
HELD_OUT = ("dataset", "split", "steps", "early_stop")  # of `eval.*`


# Of what `--help` shows: before and behind the settings of each method.
FIRST = ("model.model_name_or_path", "data.dataset")
LAST = (
    *("data.max_len", "data.max_samples", "train.batch_size", "train.micro_batch_size"),
    *("train.max_epochs", "adam.lr", "ds.param_dtype", "ds.zero_stage", "ds.lora.rank"),
    *("model.gradient_checkpointing_enable", "eval.dataset", "ckpt.save_steps", "ckpt.load_enable"),
    "ckpt.output_dir",
)
ANSWER_COLUMNS = ("data.input_key", "data.output_key")
SIDE_COLUMNS = ("data.chosen_key", "data.rejected_key")
STEP_TOKENS = ("model.placeholder_token", "model.reward_tokens")
START = "--pretrain Qwen/Qwen2.5-0.5B-Instruct --save_path ./output/run"


class SupervisedConfig(TrainingRunConfig, OptimizerConfig):
    """Top of every supervised trainer's tree; each has its own defaults."""

    model: SupervisedModelConfig = SupervisedModelConfig()
    data: DatasetConfig = DatasetConfig()

    @property
    def num_sampled(self) -> int:
        """Return the most tokens that are sampled behind a prompt; 0 if rows have responses."""
        return 0

    @property
    def num_exported(self) -> int:
        is_doubled = self.model.export_fp32 and self.ds.param_dtype != "fp32"
        return 2 if is_doubled else 1

    def problems(self) -> Iterator[str]:
        """Report weights that cannot be trained as they are held, and losses without a gradient."""
        yield from super().problems()
        yield from self.ds.problems(self)
        yield from self.model.problems()
        is_split = self.model.export_fp32 and self.ds.tensor_parallel_size > 1
        yield from clashes(("--export_fp32", "--ds_tensor_parallel_size", is_split))

    def notices(self) -> Iterator[str]:
        """Report a learning rate that is too low for an adapter, and one that is not of Muon's
        matrices.
        """
        yield from super().notices()
        yield from self.adapter_notices(self.ds.lora, "adam.lr", "--learning_rate")
        yield from self.muon_notices(self, "", "--learning_rate")

    def without_effect(self) -> Iterator[tuple[str, str, str, bool]]:
        yield from super().without_effect()
        yield from self.unread()


class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning and continued pre-training (openrlhf sft)."""

    shows: ClassVar = {"eval": HELD_OUT, "data": (*ANSWERED, *IMAGES, "multiturn")}
    essentials: ClassVar = (
        *FIRST,
        *ANSWER_COLUMNS,
        "data.apply_chat_template",
        "data.multiturn",
        *LAST,
    )
    example: ClassVar = (
        f"{START} --dataset rows.jsonl --input_key question --output_key answer "
        "--apply_chat_template"
    )

    model: SFTModelConfig = SFTModelConfig()
    train: TrainConfig = TrainConfig(max_epochs=2)
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_sft")
    logger: LoggerConfig = logger_of("openrlhf_train_sft", "sft")

    def problems(self) -> Iterator[str]:
        """Report settings of dialogues that contradict each other."""
        yield from super().problems()
        is_plain = self.model.pretrain_mode_enable
        has_template = is_plain and self.data.apply_chat_template
        yield from clashes(
            ("--pretrain_mode", "--multiturn", is_plain and self.data.multiturn),
            ("--pretrain_mode", "--apply_chat_template", has_template),
        )


class RMModelConfig(SupervisedModelConfig):
    """`model.*` of rm."""

    loss_type: Literal["sigmoid", "logexp"] = option(
        "sigmoid", "-log sigmoid(difference), or log(1 + exp(-difference)).", "loss"
    )
    margin_loss_enable: bool = switch("Subtract the column `margin`.", "margin_loss")


class RMConfig(SupervisedConfig):
    """Pairwise reward model (openrlhf rm)."""

    shows: ClassVar = {"eval": HELD_OUT, "data": PAIRS}
    essentials: ClassVar = (
        *FIRST,
        "data.prompt_key",
        *SIDE_COLUMNS,
        "data.apply_chat_template",
        *LAST,
    )
    example: ClassVar = f"{START} --dataset pairs.jsonl --prompt_key prompt --apply_chat_template"

    adam: AdamConfig = AdamConfig(lr=9e-6)
    model: RMModelConfig = RMModelConfig()
    data: DatasetConfig = DatasetConfig(max_len=512, input_template=None)
    train: TrainConfig = TrainConfig(micro_batch_size=1)
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_rm")
    logger: LoggerConfig = logger_of("openrlhf_train_rm", "rm")


class DPOModelConfig(SupervisedModelConfig):
    """`model.*` of dpo."""

    loss_type: PreferenceLossName | OwnFunction = option(
        "sigmoid", "Preference loss, or your own.", opens="code"
    )
    ipo_enable: bool = switch("The same as --loss_type ipo.", "ipo")
    beta: float = option(0.1, "Strength of the preference.", gt=0)
    label_smoothing: float = option(
        0.0, f"Part of labels that is wrong; exo_pair: {EXO_LABEL_SMOOTHING}.", ge=0, lt=0.5
    )
    ipo_length_average: bool = switch("IPO on the mean log-probability of a token, not on sums.")
    simpo_gamma: float = option(0.5, "Margin of SimPO, subtracted from the difference.", ge=0)
    nll_loss_coef: float = option(0.0, "Weight of the language-model loss on better answers.", ge=0)


class RefConfig(Base):
    """`ref.*`: the frozen model that log-probabilities are compared with."""

    offload: bool = switch("Keep its weights in CPU memory.", "ref_offload")
    precompute_log_probs: bool = switch(
        "Compute its log-probabilities once, before training.", "precompute_ref_log_probs"
    )
    model_name_or_path: str | None = option(
        None, "Reference model; unset: the same as --pretrain.", "ref_pretrain", opens="model"
    )


class DPOConfig(SupervisedConfig):
    """Direct preference optimisation and its relatives (openrlhf dpo)."""

    shows: ClassVar = {"eval": HELD_OUT, "data": (*PAIRS, *IMAGES)}
    essentials: ClassVar = (*FIRST, *SIDE_COLUMNS, "model.loss_type", "model.beta", *LAST)
    example: ClassVar = (
        f"{START} --dataset pairs.jsonl --prompt_key prompt --apply_chat_template --beta 0.1"
    )

    adam: AdamConfig = AdamConfig(lr=1e-5)
    model: DPOModelConfig = DPOModelConfig()
    ref: RefConfig = RefConfig()
    data: DatasetConfig = DatasetConfig(max_len=512, input_template=None)
    eval: EvalConfig = EvalConfig(split="test")
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_dpo")
    logger: LoggerConfig = logger_of("openrlhf_train_dpo", "exp")

    def derived(self) -> Iterator[tuple[str, object]]:
        """Fill in the loss of --ipo, and label smoothing where a loss needs some."""
        yield from super().derived()
        if self.model.ipo_enable and not is_given(self, "model.loss_type"):
            yield "model.loss_type", "ipo"
        is_smoothed = is_given(self, "model.label_smoothing")
        if self.model.loss_type == "exo_pair" and not is_smoothed:
            yield "model.label_smoothing", EXO_LABEL_SMOOTHING

    @property
    def has_reference(self) -> bool:
        """Return True if the loss compares the policy with a reference model."""
        return self.model.loss_type not in REFERENCE_FREE_LOSSES

    def problems(self) -> Iterator[str]:
        """Report a loss that is named twice, and settings that the loss does not read."""
        yield from super().problems()
        model, ref, loss_type = self.model, self.ref, self.model.loss_type
        value, is_built_in = model.label_smoothing, ":" not in loss_type
        smoothing, loss = f"--label_smoothing {value}", f"--loss_type {loss_type}"
        margin, path = model.simpo_gamma, ref.model_name_or_path
        has_margin, has_none = margin != DPOModelConfig().simpo_gamma, not self.has_reference
        no_ipo, no_simpo = (is_built_in and loss_type != name for name in ("ipo", "simpo"))
        yield from clashes(
            ("--ipo", loss, model.ipo_enable and loss_type != "ipo"),
            (smoothing, loss, value > 0 and is_built_in and loss_type not in SMOOTHED_LOSSES),
            (smoothing, loss, value == 0 and loss_type == "exo_pair"),
            (f"--ref_pretrain {path}", loss, has_none and path is not None),
            ("--ref_offload", loss, has_none and ref.offload),
            ("--precompute_ref_log_probs", loss, has_none and ref.precompute_log_probs),
            (f"--simpo_gamma {margin}", loss, has_margin and no_simpo),
            ("--ipo_length_average", loss, model.ipo_length_average and no_ipo),
        )


class KTOModelConfig(SupervisedModelConfig):
    """`model.*` of kto."""

    beta: float = option(0.01, "Strength of the preference.", gt=0)
    desirable_loss_weight: float = option(
        1.0, "Weight of good answers.", "desirable_loss_weight", "desirable_weight", ge=0
    )
    undesirable_loss_weight: float = option(
        1.0, "Weight of bad answers.", "undesirable_loss_weight", "undesirable_weight", ge=0
    )


class KTOConfig(SupervisedConfig):
    """Kahneman-Tversky optimisation, from single good and bad responses (openrlhf kto)."""

    shows: ClassVar = {
        "eval": HELD_OUT,
        "data": (*ANSWERED, "label_key"),
        "ref": ("offload", "precompute_log_probs"),
    }
    essentials: ClassVar = (*FIRST, *ANSWER_COLUMNS, "data.label_key", "model.beta", *LAST)
    example: ClassVar = (
        f"{START} --dataset labelled.jsonl --input_key prompt --output_key completion "
        "--apply_chat_template"
    )

    adam: AdamConfig = AdamConfig(lr=1e-5)
    model: KTOModelConfig = KTOModelConfig(model_name_or_path="bigscience/bloomz-1b7")
    ref: RefConfig = RefConfig()
    eval: EvalConfig = EvalConfig(split="test")
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_kto")
    logger: LoggerConfig = logger_of("openrlhf_train_dpo", "rm")

    def problems(self) -> Iterator[str]:
        """Report a batch that has no other prompt whose response the reference point could take."""
        yield from super().problems()
        if self.train.batch_size < 2:
            yield "--train_batch_size must be at least 2: 1. Type --train_batch_size 2."

    def notices(self) -> Iterator[str]:
        """Report a model that is not named."""
        yield from super().notices()
        if not is_given(self, "model.model_name_or_path"):
            yield f"--pretrain is not set: starting from {self.model.model_name_or_path}."


class PRMModelConfig(SupervisedModelConfig):
    """`model.*` of prm."""

    placeholder_token: str | None = option(None, "Token at which a step ends.", needed="step end")
    reward_tokens: tuple[str, ...] | None = option(
        None,
        "Tokens a label may be, the good one first (numbers as labels need two); unset: any.",
        min_length=2,
    )


class PRMConfig(SupervisedConfig):
    """Process reward model (openrlhf prm)."""

    # The text is taken as it is, without a template.
    shows: ClassVar = {"eval": HELD_OUT, "data": (*ROWS, "input_key", "label_key")}
    essentials: ClassVar = (*FIRST, "data.input_key", "data.label_key", *STEP_TOKENS, *LAST)
    example: ClassVar = f"{START} --dataset steps.jsonl --placeholder_token ки --reward_tokens + -"

    adam: AdamConfig = AdamConfig(lr=1e-6)
    model: PRMModelConfig = PRMModelConfig()
    train: TrainConfig = TrainConfig(micro_batch_size=1)
    eval: EvalConfig = EvalConfig(split="test")
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_prm")
    logger: LoggerConfig = logger_of("openrlhf_train_prm", "prm")


class TeacherConfig(Base):
    """`teacher.*`: the model that is learnt from; it has the student's vocabulary."""

    model_name_or_path: str | None = option(
        None,
        "Teacher model: hub id or path.",
        "teacher_model",
        "teacher_model_name_or_path",
        needed="teacher",
        opens="model",
    )
    offload: bool = switch("Keep its weights in CPU memory.", "teacher_offload")


class KDLossConfig(StopConfig):
    """`kd.*`: what is learnt from the teacher, and on whose responses."""

    coef: float = option(0.4, "Weight of distillation; on-policy: 1.", "kd_coef", ge=0, le=1)
    divergence: Literal["forward", "reverse", "jsd"] = option(
        "forward",
        "KL(teacher, student), KL(student, teacher), or Jensen-Shannon; on-policy: reverse.",
        "kd_divergence",
    )
    on_policy_enable: bool = switch(
        "The student answers the prompts, and the teacher scores its answers.", "kd_on_policy"
    )
    max_new_tokens: int = option(
        512, "Most tokens of the student; unset: half of --max_len.", "kd_max_new_tokens", gt=0
    )
    temperature: float = option(1.0, "Temperature at which the student answers.", gt=0, le=2)


class KDConfig(SupervisedConfig):
    """Knowledge distillation (openrlhf kd)."""

    shows: ClassVar = {"eval": HELD_OUT, "data": ANSWERED}
    essentials: ClassVar = (
        *FIRST,
        *ANSWER_COLUMNS,
        "teacher.model_name_or_path",
        "kd.on_policy_enable",
        *LAST,
    )
    example: ClassVar = (
        f"{START} --teacher_model Qwen/Qwen2.5-7B-Instruct --dataset rows.jsonl "
        "--apply_chat_template"
    )

    model: SFTModelConfig = SFTModelConfig()
    teacher: TeacherConfig = TeacherConfig()
    kd: KDLossConfig = KDLossConfig()
    data: DatasetConfig = DatasetConfig(output_key="output")
    eval: EvalConfig = EvalConfig(split="test")
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_kd")
    logger: LoggerConfig = logger_of("openrlhf_train_sft", "sft")

    @property
    def num_sampled(self) -> int:
        return self.kd.max_new_tokens if self.kd.on_policy_enable else 0

    def derived(self) -> Iterator[tuple[str, object]]:
        """Fill in no language-model loss on own responses, their divergence, and room for the
        prompt.
        """
        yield from super().derived()
        if not self.kd.on_policy_enable:
            return
        if not is_given(self, "kd.coef"):
            yield "kd.coef", 1.0
        if not is_given(self, "kd.divergence"):
            yield "kd.divergence", "reverse"
        if not is_given(self, "kd.max_new_tokens"):
            room = max(1, self.data.max_len // 2)
            yield "kd.max_new_tokens", min(self.kd.max_new_tokens, room)

    def without_effect(self) -> Iterator[tuple[str, str, str, bool]]:
        yield from super().without_effect()
        for flag, name in (
            ("--temperature", "temperature"),
            ("--kd_max_new_tokens", "max_new_tokens"),
        ):
            reason = "without --kd_on_policy: the student answers nothing"
            yield flag, f"kd.{name}", reason, not self.kd.on_policy_enable

    def problems(self) -> Iterator[str]:
        """Report text without prompts to respond to, and responses that leave no room for a
        prompt.
        """
        yield from super().problems()
        is_plain, answers = self.model.pretrain_mode_enable, self.kd.on_policy_enable
        has_template = is_plain and self.data.apply_chat_template
        new, total = self.kd.max_new_tokens, self.data.max_len
        yield from clashes(
            ("--pretrain_mode", "--apply_chat_template", has_template),
            ("--pretrain_mode", "--kd_on_policy", is_plain and answers),
            (f"--kd_max_new_tokens {new}", f"--max_len {total}", answers and new >= total),
        )
        if (self.kd.stop or self.kd.stop_token_ids) and not answers:
            yield "--stop ends answers of the student: it has none. Type --kd_on_policy."
