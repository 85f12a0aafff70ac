"""Parts of the config tree that several commands share, from the optimizer to evaluation.

Defaults and flat names are those of the 0.8 command lines; a command with other defaults gives them
to the part: `AdamConfig(lr=1e-5)`.
"""

import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from openrlhf.config.base import Base, CommandConfig, is_given, option, switch, value_at

DType = Literal["auto", "bf16", "fp16", "fp32"]
# Names of transformers.SchedulerType, but those that watch the loss; written out because importing
# transformers takes seconds.
Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]


ADAPTER_LR = 1e-4  # to start from


def clashes(*pairs: tuple[str, str, bool]) -> Iterator[str]:
    """Yield a line for each pair of settings that do not work together, where it is so."""
    for one, other, is_so in pairs:
        if is_so:
            yield f"{one} with {other}: not supported. Leave one of them out."


def timed_folder(stem: str) -> str:
    """Return `./ckpt/ppo-20260131-235959`; ranks that were started together get the same."""
    now = datetime.now()
    if "LOCAL_RANK" in os.environ:  # by a launcher, the parent of its ranks
        import psutil  # noqa: PLC0415 - would slow --help

        now = datetime.fromtimestamp(psutil.Process(os.getppid()).create_time())
    return f"./ckpt/{stem}-{now:%Y%m%d-%H%M%S}"


def last_words(paths: Sequence[str]) -> list[str]:
    """Return the last word of each path, with a number where two have the same."""
    words = [PurePosixPath(path).name for path in paths]
    return [
        word if words.count(word) == 1 else f"{word}_{words[: k + 1].count(word)}"
        for k, word in enumerate(words)
    ]


ENDING_AT_MIN_LR = {
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "warmup_stable_decay",
}


Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamConfig(Base):
    """`adam.*`: AdamW."""

    lr: float = option(5e-6, "Peak learning rate.", "{model}learning_rate", ge=0, at_resume="kept")
    betas: tuple[Beta, Beta] = option((0.9, 0.95), "Adam betas.", "adam_betas")
    weight_decay: float = option(
        0.0, "Weight decay (not on biases and norms).", "l2", ge=0, at_resume="refused"
    )
    eps: float = option(1e-8, "Adam epsilon.", flat=False, gt=0)


class MuonConfig(Base):
    """`muon.*`: the Muon group of the optimizer."""

    lr: float = option(0.02, "Learning rate of the Muon group.", flat=False, ge=0, at_resume="kept")
    momentum: float = option(0.95, "Muon momentum.", flat=False, ge=0, lt=1)


class OptimizerConfig(Base):
    """Optimizer and schedule of one model: at the top of the tree, or under actor and critic."""

    optim: Literal["adam", "muon"] = option("adam", "Optimizer.", at_resume="refused")
    adam: AdamConfig = AdamConfig()
    muon: MuonConfig = MuonConfig()
    max_norm: float = option(1.0, "Gradient norm to clip at.", gt=0)
    lr_scheduler: Schedule = option(
        "cosine_with_min_lr", "Any Hugging Face schedule name.", at_resume="refused"
    )
    lr_warmup_ratio: float = option(0.03, "Warm-up, as a part of all updates.", ge=0, le=1)
    min_lr_ratio: float = option(0.1, "Last learning rate, as a part of the peak.", ge=0, le=1)

    def unread(self, section: str = "") -> Iterator[tuple[str, str, str, bool]]:
        """Yield settings that the schedule or the optimizer does not read, as
        `TrainingRunConfig.without_effect` does; `section` is "actor." for the policy of RL.
        """
        schedule = f"with --lr_scheduler {self.lr_scheduler}"
        has_no_end = self.lr_scheduler not in ENDING_AT_MIN_LR
        yield "--min_lr_ratio", f"{section}min_lr_ratio", schedule, has_no_end
        is_flat = self.lr_scheduler == "constant"
        yield "--lr_warmup_ratio", f"{section}lr_warmup_ratio", schedule, is_flat
        is_muon = self.optim == "muon"
        yield "--max_norm", f"{section}max_norm", "with --optim muon", is_muon


class LoraConfig(Base):
    """`ds.lora.*`: low-rank adapters."""

    rank: int = option(
        0, "LoRA rank; 0: all weights learn.", "lora_rank", ge=0, at_resume="refused"
    )
    alpha: int = option(16, "LoRA alpha.", "lora_alpha", gt=0, at_resume="refused")
    target_modules: tuple[str, ...] = option(
        ("all-linear",), "Modules that get an adapter.", min_length=1, at_resume="refused"
    )
    dropout: float = option(0.0, "LoRA dropout.", "lora_dropout", ge=0, lt=1)


class TrainedModelConfig(Base):
    """Settings of every model that is trained."""

    gradient_checkpointing_enable: bool = switch(
        "Recompute activations in the backward pass.", "gradient_checkpointing"
    )
    gradient_checkpointing_reentrant: bool = switch(
        "The reentrant variant of it.", "gradient_checkpointing_use_reentrant"
    )


class ModelConfig(TrainedModelConfig):
    """A model that is named by --pretrain."""

    model_name_or_path: str | None = option(
        None,
        "Model to start from: hub id or path.",
        "pretrain",
        "model_name_or_path",
        needed="model",
        opens="model",
        at_resume="refused",
    )
    aux_loss_coef: float = option(0.0, "Weight of the load-balancing loss of experts.", ge=0)
    freeze_visual_encoder: bool = switch(
        "Train the language model of a vision-language model only.", at_resume="refused"
    )

    def problems(self) -> Iterator[str]:
        """Yield a line if the load-balancing loss of experts would have no gradient."""
        is_reentrant = self.gradient_checkpointing_enable and self.gradient_checkpointing_reentrant
        is_so = self.aux_loss_coef > 0 and is_reentrant
        yield from clashes(("--aux_loss_coef", "--gradient_checkpointing_use_reentrant", is_so))


class DeepSpeedConfig(Base):
    """`ds.*`: how weights are loaded, held, sharded and computed with."""

    param_dtype: DType = option(
        "auto",
        "Parameter type; auto: the checkpoint's on GPU, fp32 on CPU. `--bf16` means bf16.",
        meanings={"bf16": {"true": "bf16"}},
        at_resume="refused",
    )
    attn_implementation: str = option(
        "flash_attention_2",
        "Attention; flash_attention_2 is torch's own kernel, SDPA where there is no GPU.",
        meanings={"flash_attn": {"true": "flash_attention_2", "false": "sdpa"}},
    )
    load_in_4bit: bool = switch("QLoRA: base weights in 4 bits.", at_resume="refused")
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm", "deepgemm"] | None = (
        option(None, "Kernels of mixture-of-experts layers.", flat=False)
    )
    value_head_prefix: str = option(
        "score",
        "Attribute name of the scalar head; the model's own config wins.",
        "value_head_prefix",
        "value_prefix_head",
        at_resume="refused",
    )
    zero_stage: Literal[0, 1, 2, 3] = option(2, "ZeRO stage.")
    zpg: int = option(1, "ZeRO++ secondary partition size.", ge=1)
    adam_offload: bool = switch("Keep the optimizer in CPU memory.")
    overlap_comm: bool = switch("Overlap gradient reduction with the backward pass.")
    grad_accum_dtype: Literal["bf16", "fp16", "fp32"] | None = option(
        None, "Type gradients are accumulated in; unset: DeepSpeed's choice."
    )
    deepcompile: bool = switch("DeepSpeed DeepCompile.")
    tensor_parallel_size: int = option(1, "DeepSpeed AutoTP size.", "ds_tensor_parallel_size", ge=1)
    use_liger_kernel: bool = switch("Liger kernels.")
    packing_samples: bool = switch("Accepted for old commands: batches are packed on every device.")
    ring_attn_size: int = option(1, "Ranks that share a packed row (context parallelism).", ge=1)
    ring_attn_head_stride: int = option(
        1, "Key heads gathered at a time: more are faster.", "ring_head_stride", ge=1
    )
    cp_mode: Literal["ring", "ulysses"] = option(
        "ring", "Ranks gather keys and values, or exchange tokens for heads."
    )
    enable_sleep: bool = switch("Offload training states between phases.", "deepspeed_enable_sleep")
    lora: LoraConfig = LoraConfig()
    use_universal_ckpt: bool = switch(
        "Resume with another number of ranks or ZeRO stage.", "use_ds_universal_ckpt"
    )
    config: str | None = option(
        None, "A DeepSpeed JSON; its `auto` is filled in.", "deepspeed_config", opens="file"
    )

    def problems(self, *optims: OptimizerConfig) -> Iterator[str]:
        """Yield a line for each pair of settings that do not work together."""
        is_muon = any(optim.optim == "muon" for optim in optims)
        split = f"--ds_tensor_parallel_size {self.tensor_parallel_size}"
        is_split, compiles = self.tensor_parallel_size > 1, self.deepcompile
        rings, lora, four_bits = self.ring_attn_size, self.lora.rank > 0, self.load_in_4bit
        sums, stage = self.grad_accum_dtype or "fp32", f"--zero_stage {self.zero_stage}"
        yield from clashes(
            (split, "--zero_stage 3", is_split and self.zero_stage == 3),
            (split, "--optim muon", is_split and is_muon),
            (split, "--lora_rank", is_split and lora),
            (split, "--load_in_4bit", is_split and four_bits),
            (split, "--deepcompile", is_split and compiles),
            ("--deepcompile", "--zero_stage 0", compiles and self.zero_stage == 0),
            (f"--zpg {self.zpg}", stage, self.zpg > 1 and self.zero_stage < 3),
            ("--deepcompile", f"--ring_attn_size {rings}", compiles and rings > 1),
            ("--use_ds_universal_ckpt", "--optim muon", self.use_universal_ckpt and is_muon),
            (f"--grad_accum_dtype {sums}", "fp32", self.param_dtype == "fp32" and sums != "fp32"),
        )
        if four_bits:
            yield from self.four_bit_problems(can_learn=lora)

    def four_bit_problems(self, *, can_learn: bool) -> Iterator[str]:
        """Yield a line if weights of 4 bits would be split, or if nothing on them could learn."""
        yield from clashes(
            ("--load_in_4bit", "--lora_rank 0", not can_learn),
            ("--load_in_4bit", "--zero_stage 3", self.zero_stage == 3),
        )

    @property
    def ranks_per_share(self) -> int:
        """Return the number of ranks that work on the same samples."""
        return self.ring_attn_size * self.tensor_parallel_size

    @property
    def attention(self) -> str:
        """Return the attention that models are loaded with: shared rows need the project's own."""
        return "sdpa" if self.ring_attn_size > 1 else self.attn_implementation


class RunFolderConfig(Base):
    """`ckpt.*`: where the results go."""

    output_dir: str = option(
        "./ckpt",
        "Run folder and exported model; unset: a folder in ./ckpt with command and time.",
        "save_path",
        "output_dir",
        opens="output",
        min_length=1,
    )

    @property
    def folders(self) -> dict[str, str]:
        """Return every folder that the run writes to, by its flag."""
        return {"--save_path": self.output_dir}


class CheckpointConfig(RunFolderConfig):
    """`ckpt.*`: what is written, where, and how much of it is kept."""

    path: str = option("./ckpt/checkpoints", "Root of checkpoints.", "ckpt_path", opens="output")

    save_steps: int = option(-1, "Checkpoint every N global steps; -1: never.", ge=-1)
    save_hf: bool = switch("Export a model with each checkpoint.", "save_hf_ckpt")
    disable_ds: bool = switch("Leave out the resumable part of checkpoints.", "disable_ds_ckpt")
    max_num: int = option(3, "How many checkpoints to keep.", "max_ckpt_num", ge=1)
    max_mem: float = option(
        float("inf"), "Size cap of all checkpoints in GB.", "max_ckpt_mem", gt=0, allow_inf_nan=True
    )
    grace_s: float = option(
        120.0, "Seconds to end the step and save after Ctrl-C or SIGTERM.", gt=0
    )
    load_enable: bool = switch("Resume from the checkpoint root.", "load_checkpoint")
    reset_lr: bool = switch("Resume with the learning rate typed now, not the checkpoint's.")
    best_metric_key: str = option(
        "auto",
        "Keep the model of the best evaluation by this metric; alone: by the first pass@1, "
        "accuracy or loss; none: off; auto: alone with --save_steps, else off.",
        "save_best",
        "best_metric_key",
        bare="first",
    )
    push_to_hub: str | None = option(
        None,
        "Upload the trained model to this repository of the Hugging Face hub: org/name.",
        "push_to_hub",
        "hub_model_id",
        forms="org/name",
    )

    @field_validator("push_to_hub")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if (name or "").lower() in ("true", "yes", "on", "1"):  # as TRL's switch has it
            raise ValueError
        return name

    @property
    def names_best(self) -> bool:
        """Return True if somebody asked for the best model."""
        return self.best_metric_key not in ("auto", "none")

    @property
    def keeps_best(self) -> bool:
        """Return True if the model of the best evaluation is kept."""
        return self.names_best or (self.best_metric_key == "auto" and self.save_steps > 0)

    @property
    def uses_root(self) -> bool:
        """Return True if the run reads or writes anything under `path`."""
        return self.save_steps > 0 or self.load_enable or self.names_best

    @property
    def folders(self) -> dict[str, str]:
        has_root = os.path.realpath(self.output_dir) != os.path.realpath(self.path)
        has_root = has_root and self.uses_root
        return super().folders | ({"--ckpt_path": self.path} if has_root else {})


class WandbConfig(Base):
    """`logger.wandb.*`: Weights & Biases."""

    key: str | None = option(
        None,
        "`true`: log to W&B with the environment's key. A key is moved to WANDB_API_KEY.",
        "use_wandb",
        meanings={"report_to": {"wandb": "true", "all": "true"}},
        bare="true",
        secret_env="WANDB_API_KEY",
    )
    org: str | None = option(None, "W&B entity.", "wandb_org")
    group: str | None = option(None, "W&B group.", "wandb_group")
    project: str = option("openrlhf", "W&B project.", "wandb_project")
    run_name: str = option("run", "Name of the run.", "wandb_run_name")


class LoggerConfig(Base):
    """`logger.*`: where metrics go beside the run folder."""

    logging_steps: int = option(1, "Log every N global steps.", ge=1)
    wandb: WandbConfig = WandbConfig()
    trackio: bool = switch(
        "Log to trackio, with W&B's names for project, group and run.",
        "use_trackio",
        meanings={"report_to": {"trackio": "true"}},
    )
    mlflow: bool = switch(
        "Log to MLflow at MLFLOW_TRACKING_URI, with W&B's names for project and run.",
        "use_mlflow",
        meanings={"report_to": {"mlflow": "true"}},
    )
    tensorboard_dir: str | None = option(
        None,
        "TensorBoard directory; true: `tensorboard` in the run folder.",
        "use_tensorboard",
        meanings={"report_to": {"tensorboard": "true", "all": "true"}},
        bare="true",
        env="TENSORBOARD_LOGGING_DIR",
        opens="output",
    )


class SampleLoggerConfig(Base):
    """`logger.*` of samples."""

    print_samples: int = option(
        2, "Samples shown at each evaluation and every 10th step; 0: none.", ge=0
    )


def logger_of(project: str, stem: str, kind: type[LoggerConfig] = LoggerConfig) -> Any:
    """Return the logging of a command: its W&B project, and the name of its runs."""
    name = f"{stem}_{datetime.now():%m%dT%H:%M}"
    return kind(wandb=WandbConfig(project=project, run_name=name))


class TextDataConfig(Base):
    """`data.*`: templates of dialogues and prompts, facts that the data is held against before a
    model is loaded, and how far it is trusted.
    """

    apply_chat_template: bool = switch("Use the chat template; unset: for message lists.")
    tokenizer_chat_template: str | None = option(None, "Another chat template.", opens="template")
    chat_template_kwargs: str | None = option(
        None, "Variables of the chat template as JSON, e.g. '{\"enable_thinking\": false}'."
    )
    input_template: str | None = option("User: {}\nAssistant: ", "Text with {} for the prompt.")
    expect_rows: str | None = option(
        None, "Rows the data must have before --max_samples; of several data sets with commas."
    )
    expect_sha256: str | None = option(None, "SHA-256 of the data's file; several with commas.")
    duplicate_ids: Literal["error", "keep"] = option(
        "error", "Rows of a data set with the same `id`: refused, or kept."
    )
    bad_rows: Literal["fail", "skip"] = option(
        "fail",
        "Rows that cannot be used and damaged records: refused, or left out and written to "
        "bad_rows.jsonl.",
    )
    input_key: str = option("input", "Column of the prompt, text or messages.")
    max_samples: int = option(
        1_000_000, "Most rows of each data set and of all; evaluation data is capped alike.", gt=0
    )
    prompt_max_len: int = option(
        1024, "Most tokens in a prompt; RL, unset with --max_len: what the response leaves.", gt=0
    )
    overlong_prompts: Literal["filter", "truncate_left", "error"] = option(
        "filter", "Prompts over --prompt_max_len: counted and left out, cut, or refused."
    )
    image_key: str | None = option(None, "Column of images; unset: `images` or `image`.")
    max_images_per_prompt: int | None = option(
        None, "Most images of a row; 0: none are read; unset: as many as it has.", ge=0
    )
    image_min_pixels: int | None = option(
        None, "Smaller images are scaled up to it; unset: as the model's folder says.", gt=0
    )
    image_max_pixels: int | None = option(
        None, "Larger images are scaled down to it; unset: as the model's folder says.", gt=0
    )
    allow_special_tokens: bool = switch(
        "Control tokens in plain-text columns are read as such; false: as text.", default=True
    )


class StopConfig(Base):
    """Texts and tokens that end a response, beside those that end a turn."""

    stop: tuple[str, ...] | None = option(
        None, "Texts that end a response; a line break is $'\\n'.", min_length=1, splits=False
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = option(
        None, "Token ids that end a response.", min_length=1
    )


class TokenChoiceConfig(Base):
    """Which tokens may be sampled, where nothing is learnt from their log-probs."""

    greedy_sampling: bool = switch("Always the likeliest token.")
    top_k: int = option(0, "Sample from the K likeliest tokens; 0: from all.", ge=0)
    min_p: float = option(
        0.0, "Sample from tokens of at least this part of the likeliest one's share.", ge=0, le=1
    )
    repetition_penalty: float = option(1.0, "Above 1: fewer repeated tokens.", gt=0)

    @property
    def token_choice(self) -> dict[str, float]:
        """Return these settings by name, with temperature and top_p; one of 0 is greedy."""
        names = ("top_k", "min_p", "repetition_penalty", "temperature", "top_p")
        greedy = {"temperature": 0.0} if self.greedy_sampling else {}
        return {name: getattr(self, name) for name in names} | greedy


class RewardModelsConfig(Base):
    """Several reward models, whose weighted scores are added."""

    model_name_or_path: str | None = option(
        None, "Reward models, with commas between.", "reward_pretrain", opens="models"
    )
    weights: tuple[float, ...] | None = option(
        None, "Weights of several reward functions or models; unset: 1 each.", "reward_weights"
    )
    normalize_enable: bool = switch(
        "(score - mean) / std of the model's config.", "normalize_reward"
    )

    @property
    def model_paths(self) -> tuple[str, ...]:
        """Return every reward model named."""
        names = (self.model_name_or_path or "").split(",")
        return tuple(name.strip() for name in names if name.strip())

    @property
    def model_names(self) -> list[str]:
        """Return the names of their scores: the last word of each path, with a number where two
        have the same.
        """
        return last_words(self.model_paths)

    def problems(self) -> Iterator[str]:
        """Yield a line unless every model has a weight."""
        if self.weights is not None and len(self.weights) != len(self.model_paths):
            yield (
                f"--reward_weights has {len(self.weights)} values for {len(self.model_paths)} "
                "models of --reward_pretrain. Type one weight for each model."
            )


class EvalConfig(Base):
    """`eval.*`: held-out data."""

    dataset: str | None = option(None, "Evaluation data.", "eval_dataset", opens="data")
    split: str = option("train", "Split of the evaluation data.", "eval_split")
    steps: int = option(
        -1, "Evaluate every N steps; -1: after each epoch, RL: first and last.", "eval_steps", ge=-1
    )
    early_stop: int = option(
        0, "End the run after N evaluations in a row without a better one; 0: never.", ge=0
    )
    temperature: float = option(
        0.6, "Sampling temperature; 0: greedy.", "eval_temperature", ge=0, le=2
    )
    n_samples_per_prompt: int = option(4, "k of pass@k.", "eval_n_samples_per_prompt", gt=0)


class RanksConfig(Base):
    """`train.*`: randomness and ranks."""

    seed: int = option(42, "Seed of everything random.", ge=0, lt=2**32, at_resume="refused")
    full_determinism_enable: bool = switch("Deterministic kernels only.", "full_determinism")
    rank_timeout_s: float = option(
        600.0, "Seconds for a sign of life or a micro-batch; ranks wait three times that.", gt=0
    )


class TrainConfig(RanksConfig):
    """`train.*`: batches, epochs and randomness."""

    batch_size: int = option(
        128, "Samples in an update.", "train_batch_size", gt=0, at_resume="refused"
    )
    micro_batch_size: int = option(
        8,
        "Samples (or pairs) in a micro-batch of one device.",
        "micro_train_batch_size",
        "per_device_train_batch_size",
        gt=0,
    )
    max_epochs: int = option(1, "Passes over the data.", "max_epochs", "num_train_epochs", gt=0)
    dynamic_batch_enable: bool = switch("Micro-batches by tokens.", "use_dynamic_batch")
    max_tokens_per_gpu: int = option(
        16192, "Token budget of a training micro-batch.", "train_max_tokens_per_gpu", gt=0
    )

    @property
    def token_budget(self) -> int | None:
        """Return the tokens of a micro-batch; None: micro-batches are counted in samples."""
        return self.max_tokens_per_gpu if self.dynamic_batch_enable else None

    @property
    def micro_batch_text(self) -> str:
        """Describe what a training micro-batch holds."""
        budget = self.token_budget
        return f"{self.micro_batch_size} rows" if budget is None else f"at most {budget} tokens"


class RunConfig(CommandConfig):
    """Top of every command's tree that loads models and leaves a run folder."""

    local_rank: int = option(-1, "Set by launchers; wins over LOCAL_RANK.")
    train: RanksConfig = RanksConfig()
    ckpt: RunFolderConfig = RunFolderConfig()
    ds: DeepSpeedConfig = DeepSpeedConfig()

    def derived(self) -> Iterator[tuple[str, object]]:
        """Fill in the run folder."""
        yield from super().derived()
        if not is_given(self, "ckpt.output_dir"):
            stem = type(self).__name__.removesuffix("Config").lower()
            yield "ckpt.output_dir", timed_folder(stem)


class TrainingRunConfig(RunConfig):
    """Top of every training command's tree."""

    trains: ClassVar = True

    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    ckpt: CheckpointConfig = CheckpointConfig()
    logger: LoggerConfig = LoggerConfig()

    @property
    def num_exported(self) -> int:
        """Return the size of an export, in sizes of the weights as they are trained."""
        return 1

    def derived(self) -> Iterator[tuple[str, object]]:
        """Fill in the folder of TensorBoard, and the best model that early stopping
        compares with.
        """
        yield from super().derived()
        if self.logger.tensorboard_dir == "true":
            named = os.environ.get("TENSORBOARD_LOGGING_DIR")
            yield "logger.tensorboard_dir", named or f"{self.ckpt.output_dir}/tensorboard"
        if self.eval.early_stop and not is_given(self, "ckpt.best_metric_key"):
            yield "ckpt.best_metric_key", "first"

    def problems(self) -> Iterator[str]:
        """Report checkpoints that hold neither states to resume from nor a model, and a best
        model without evaluations.
        """
        yield from super().problems()
        wishes = {
            f"--early_stop {self.eval.early_stop}": self.eval.early_stop > 0,
            "--save_best": is_given(self, "ckpt.best_metric_key") and self.ckpt.names_best,
        }
        for wish in (wish for wish, is_so in wishes.items() if is_so and not self.eval.dataset):
            yield f"{wish} needs evaluations. Type --eval_dataset, or leave {wish} out."
        if self.ckpt.save_steps > 0 and self.ckpt.disable_ds and not self.ckpt.save_hf:
            yield (
                f"--save_steps {self.ckpt.save_steps} with --disable_ds_ckpt saves nothing. "
                "Add --save_hf_ckpt, or leave one of them out."
            )
        if not is_given(self, "ds.lora.rank") and self.ds.lora != LoraConfig():
            yield (
                "settings of LoRA without --lora_rank: all weights would be trained. Type "
                "--lora_rank 16, or leave --lora_alpha, --target_modules and --lora_dropout out."
            )

    def notices(self) -> Iterator[str]:
        """Report settings that were typed, not as their defaults, and have no effect."""
        yield from super().notices()
        plain = type(self)()
        for flag, path, reason, is_so in self.without_effect():
            if is_so and is_given(self, path) and value_at(self, path) != value_at(plain, path):
                yield f"{flag} has no effect {reason}."

    def without_effect(self) -> Iterator[tuple[str, str, str, bool]]:
        """Yield settings that others switch off: flag, path, the reason, and whether it is so."""
        for name in ("steps", "temperature", "n_samples_per_prompt", "split"):
            flag = f"--eval_{name}"
            yield flag, f"eval.{name}", "without --eval_dataset", not self.eval.dataset
        yield "--save_hf_ckpt", "ckpt.save_hf", "without --save_steps", self.ckpt.save_steps <= 0
        is_counted = not self.train.dynamic_batch_enable
        budget = "train.max_tokens_per_gpu"
        yield "--train_max_tokens_per_gpu", budget, "without --use_dynamic_batch", is_counted

    def muon_notices(self, optim: OptimizerConfig, section: str, flag: str) -> Iterator[str]:
        """Yield a line where nobody chose the rate of Muon's matrices: `flag` sets that of the
        rest.
        """
        if optim.optim == "muon" and not is_given(self, f"{section}muon.lr"):
            name = f"--{section}muon.lr"
            yield (
                f"--optim muon: matrices of layers learn at {name} {optim.muon.lr:g}; {flag} "
                f"{optim.adam.lr:g} is the rate of the rest."
            )

    def adapter_notices(self, lora: LoraConfig, path: str, flag: str) -> Iterator[str]:
        """Yield a line where an adapter learns at a rate that nobody chose for it: that at `path`,
        which `flag` sets.
        """
        if lora.rank > 0 and not is_given(self, path):
            yield (
                f"--lora_rank {lora.rank} with {flag} {value_at(self, path):g}, the default for "
                "all weights: adapters usually need ten to a hundred times that. Type "
                f"{flag} {ADAPTER_LR:g}."
            )
