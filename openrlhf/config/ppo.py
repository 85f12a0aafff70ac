"""Config of ppo and ppo-local: its parts, and `PPOConfig` with the rules they keep.

Field path = dotted flag; names after the help text are flat flags and what Hugging Face users type.
"""

from collections.abc import Iterator
from itertools import product
from typing import ClassVar, Literal

from pydantic import PositiveFloat, field_validator

from openrlhf.config.base import Base, Caution, OwnFunction, is_given, option, switch, walk
from openrlhf.config.common import (
    AdamConfig,
    CheckpointConfig,
    LoggerConfig,
    ModelConfig,
    OptimizerConfig,
    SampleLoggerConfig,
    TrainConfig,
    TrainedModelConfig,
    TrainingRunConfig,
    clashes,
    logger_of,
)
from openrlhf.config.generation import (
    AgentsConfig,
    EngineConfig,
    FrozenConfig,
    GenerationConfig,
    GenerationRunConfig,
    PlacementConfig,
    PromptDataConfig,
    RewardSourceConfig,
)

Estimator = Literal[
    "gae", "reinforce", "flash_reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"
]
# Those that compare the samples of a prompt, and those that can discount.
GROUP_ESTIMATORS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
DISCOUNTING_ESTIMATORS = ("gae", "reinforce")
DEFAULT_GROUP_SIZE = 8
# Level and mode that a name of the importance correction stands for.
IS_CORRECTION_TYPES = {
    "tis": ("token", "clip"),
    "icepop": ("token", "mask"),
    "seq-mask-tis": ("seq", "mask"),
}
# Largest distance at which a token counts, where none is typed.
DIVERGENCE_BOUNDS = {"binary_kl": 0.05, "tv": 0.1}
# Words of OpenRLHF 0.11 for aggregations.
LOSS_AGG_MODES = {"token-mean": "token_mean", "seq-mean-token-mean": "seq_mean"}
# What people type for an estimator, by the method's name: only said, as one may be wrong.
KNOWN_AS = {"ppo": "gae", "grpo": "group_norm"}


class ActorConfig(OptimizerConfig, ModelConfig, PlacementConfig):
    """`actor.*`: the policy and its loss."""

    adam: AdamConfig = AdamConfig(lr=1e-6)
    policy_loss_type: Literal["ppo", "gspo", "cispo", "sapo"] | OwnFunction = option(
        "ppo", "Policy loss, or your own.", opens="code"
    )
    sapo_tau: tuple[PositiveFloat, PositiveFloat] = option(
        (1.0, 1.05), "Steepness of SAPO's gate, good and bad."
    )
    eps_clip: float = option(0.2, "Clip range of the ratio.", gt=0)
    eps_clip_low_high: tuple[float, float] | None = option(
        None, "Clip ranges below and above; unset: --eps_clip twice."
    )
    dual_clip: float | None = option(None, "Bound c > 1 of the loss for negative advantages.", gt=1)

    entropy_coef: float | None = option(
        None, "Unset: entropy is not computed; 0: logged; above: bonus.", "entropy_loss_coef", ge=0
    )
    ptx_coef: float = option(0.05, "Weight of the language loss on --pretrain_data.", ge=0)


class CriticConfig(OptimizerConfig, TrainedModelConfig, PlacementConfig):
    """`critic.*`: the value model, used with the estimator gae only."""

    model_name_or_path: str | None = option(
        None,
        "Value model to start from; unset: the first reward model, else the policy.",
        "critic_pretrain",
        opens="model",
        at_resume="refused",
    )
    adam: AdamConfig = AdamConfig(lr=9e-6)
    value_clip: float = option(0.5, "Clip range of value changes.", gt=0)
    freezing_steps: int = option(-1, "First steps, for the critic alone.", "freezing_actor_steps")
    save_value_network: bool = switch("Export the critic at the end.")


class RewardConfig(RewardSourceConfig):
    """`reward.*`: where rewards come from and how they are shaped."""

    clip_range: tuple[float, float] = option(
        (-10.0, 10.0), "Bounds of the shaped reward.", "reward_clip_range"
    )

    overlong_buffer_len: float | None = option(
        None, "Tokens at the end where a penalty grows (DAPO).", gt=0
    )
    overlong_penalty_factor: float = option(1.0, "The penalty at the limit.", ge=0)
    stop_properly_penalty_coef: float | None = option(
        None, "Truncated samples: 0 to 1 scales their reward, below 0 replaces it.", le=1
    )


class RolloutConfig(GenerationConfig):
    """`rollout.*`: how samples are made."""

    batch_size: int = option(
        1024, "Prompts a step.", "rollout_batch_size", gt=0, at_resume="refused"
    )
    vllm_generate_batch_size: int | None = option(None, "Prompts at once; unset: a step's.", gt=0)
    n_samples_per_prompt: int = option(
        1,
        f"Samples of a prompt; unset: 1, for group estimators {DEFAULT_GROUP_SIZE}.",
        "n_samples_per_prompt",
        "num_generations",
        gt=0,
        at_resume="refused",
    )
    max_tokens_per_gpu: int | None = option(
        None, "Tokens in a forward pass; unset: as training.", "rollout_max_tokens_per_gpu", gt=0
    )
    num_kept_files: int = option(
        1000, "Files of samples (one a step) that stay in the run folder.", flat=False, ge=1
    )


class VLLMConfig(EngineConfig):
    """`vllm.*`: the engines that generate."""

    sync_backend: Literal["nccl", "gloo"] = option(
        "nccl",
        "nccl sends weights from GPU memory (on shared GPUs by CUDA IPC), gloo from host memory.",
        "vllm_sync_backend",
    )
    sync_with_ray: bool = switch(
        "Send weights through Ray, where NCCL and gloo cannot connect.", "vllm_sync_with_ray"
    )
    enable_sleep: bool = switch("Engines give memory to training.", "vllm_enable_sleep")


class AdvantageConfig(Base):
    """`algo.advantage.*`: from rewards to advantages."""

    estimator: Estimator | OwnFunction = option(
        "gae",
        "Advantage estimator: gae is PPO, group_norm GRPO, reinforce REINFORCE++; or your own.",
        "advantage_estimator",
        opens="code",
        known_as=KNOWN_AS,
        at_resume="refused",
    )
    gamma: float = option(1.0, "Discount.", ge=0, le=1)
    lambd: float = option(1.0, "Lambda of GAE.", ge=0, le=1)
    no_std_norm: bool = switch("Do not divide by the standard deviation.", "no_advantage_std_norm")
    is_correction_enable: bool = switch(
        "Weigh tokens by trainer / engine.",
        "enable_vllm_is_correction",
        "vllm_enable_is_correction",
    )
    is_correction_type: Literal["tis", "icepop", "seq-mask-tis"] = option(
        "tis",
        "tis: token, clip; icepop: token, mask; seq-mask-tis: seq, mask, clamp survivors.",
        "is_correction_type",
        "vllm_is_correction_type",
        meanings={"use_icepop": {"true": "icepop"}},
    )
    is_correction_level: Literal["off", "token", "seq", "sequence", "geometric"] | None = option(
        None,
        "What the gate reads: tokens, or the mean of a sequence; token and seq switch the "
        "correction on. Unset: by the type.",
    )
    is_correction_mode: Literal["mask", "clip", "truncate"] | None = option(
        None,
        "Outside the band: dropped (mask) or held in it (clip; truncate: below HIGH).",
        "is_correction_mode",
        "algo.advantage.is_correction_treatment",
        "is_correction_treatment",
    )
    is_correction_gating: Literal["ratio", "binary_kl", "tv"] = option(
        "ratio", "What the band holds: the ratio trainer / engine, or a distance of the two."
    )
    is_correction_threshold: tuple[float, float] = option(
        (0.5, 5.0),
        "The band: HIGH, or LOW HIGH; unset, binary_kl: 0.05, tv: 0.1.",
        "vllm_is_truncated_threshold",
        "is_correction_threshold",
    )
    is_correction_clamp_survivors: bool = switch("What a mask lets pass weighs at most HIGH.")

    @property
    def is_corrected(self) -> bool:
        """Return True if tokens are weighted for engine and trainer disagreeing."""
        return self.is_correction_enable or self.is_correction_level in ("token", "seq")

    @property
    def correction_level_and_mode(self) -> tuple[str, str]:
        """Return the level and the mode that were named, or those of the type."""
        level, mode = IS_CORRECTION_TYPES[self.is_correction_type]
        level = self.is_correction_level or level
        if level == "seq" or self.is_correction_gating != "ratio":
            mode = "mask"
        return level, self.is_correction_mode or mode

    @property
    def clamps_survivors(self) -> bool:
        """Return True if a mask also limits the weights of what it lets pass."""
        of_type = (None, IS_CORRECTION_TYPES["seq-mask-tis"][0])
        is_preset = (
            self.is_correction_type == "seq-mask-tis" and self.is_correction_level in of_type
        )
        return self.is_correction_clamp_survivors or is_preset

    @field_validator("is_correction_threshold", mode="before")
    @classmethod
    def read_one_threshold(cls, value: object) -> object:
        """Read a single value as the upper bound."""
        return (0.0, *value) if isinstance(value, tuple) and len(value) == 1 else value

    def problems(self) -> Iterator[str]:
        """Yield a line for each pair of settings of the correction that contradict each other."""
        (level, mode), gating = self.correction_level_and_mode, self.is_correction_gating
        of_level, of_mode = f"--is_correction_level {level}", f"--is_correction_mode {mode}"
        of_gating, has_gating = f"--is_correction_gating {gating}", gating != "ratio"
        is_on = self.is_corrected and level != "off"
        low, high = self.is_correction_threshold
        only_masks = is_on and mode != "mask"
        yield from clashes(
            (of_level, "--enable_vllm_is_correction", self.is_correction_enable and level == "off"),
            (of_mode, of_level, only_masks and level == "seq"),
            (of_mode, of_gating, only_masks and has_gating),
            (of_gating, of_level, is_on and has_gating and level not in ("token", "seq")),
        )
        for flag, is_set in (
            (of_gating, has_gating),
            (of_level, level in ("sequence", "geometric")),
        ):
            if is_set and not self.is_corrected:
                remedy = f"Add it, or leave {flag} out."
                yield f"{flag} needs --enable_vllm_is_correction. {remedy}"
        if has_gating and low > 0:
            yield (
                f"{of_gating} has an upper bound alone: --is_correction_threshold {low:g} {high:g}."
                f" Type --is_correction_threshold {DIVERGENCE_BOUNDS[gating]}."
            )


class KLConfig(Base):
    """`algo.kl.*`: staying near the reference model."""

    init_coef: float = option(
        0.01, "KL coefficient; 0 or below: no reference model is started.", "init_kl_coef", "beta"
    )
    target: float | None = option(None, "KL to adapt to; unset: fixed.", "kl_target", gt=0)
    horizon: int = option(10_000, "Samples over which it adapts.", "kl_horizon", gt=0)
    estimator: Literal["k1", "k2", "k3"] = option("k1", "KL estimator.", "kl_estimator")
    use_loss: bool = switch("KL in the loss, not in the reward.", "use_kl_loss")
    unbiased_gradient: bool = switch(
        "With --use_kl_loss: the gradient of the KL itself.", "kl_unbiased_gradient"
    )

    @field_validator("init_coef")
    @classmethod
    def read_negative_as_off(cls, value: float) -> float:
        """Read any number that is not above 0 as off, as old commands mean it."""
        return max(value, 0.0)


class AlgoConfig(Base):
    """`algo.*`."""

    advantage: AdvantageConfig = AdvantageConfig()
    kl: KLConfig = KLConfig()
    loss_aggregation: Literal["token_mean", "seq_mean", "seq_sum_norm"] = option(
        "token_mean",
        "What a loss is averaged over.",
        meanings={"actor.loss_agg_mode": LOSS_AGG_MODES},
    )
    dynamic_filtering_enable: bool = switch("Replace groups without a signal.", "dynamic_filtering")
    dynamic_filtering_range: tuple[float, float] | None = option(
        None,
        "Mean score of a group that is kept, between both; unset: any, if its scores differ.",
        "dynamic_filtering_reward_range",
    )

    dynamic_filtering_max_empty: int = option(10, "Batches without a group before stopping.", gt=0)


class PPOTrainConfig(TrainConfig, AgentsConfig):
    """`train.*`: steps, memory and placement."""

    max_epochs: int = option(1, "Passes over a step's samples.", gt=0, at_resume="refused")
    num_episodes: int = option(1, "Passes over prompts.", "num_episodes", "num_train_epochs", gt=0)
    colocate_all: bool = switch("All models and engines share the GPUs.", "colocate_all_models")
    colocate_actor_ref: bool = switch("Actor and reference share GPUs.")
    colocate_critic_reward: bool = switch("Critic and reward model share GPUs.")
    enable_ema: bool = switch(
        "Export an average of the weights, the last ones in its policy/.", at_resume="refused"
    )
    ema_beta: float = option(0.992, "Decay of the average.", ge=0, lt=1)
    async_enable: bool = switch(
        "Generate while training, on own devices.", "async_train", at_resume="refused"
    )
    async_queue_size: int = option(
        1, "Most steps a sample may be behind.", env="OPENRLHF_ASYNC_QUEUE_SIZE", gt=0
    )
    partial_rollout_enable: bool = switch(
        "Weights change under running samples instead of after them.", "partial_rollout"
    )


class PPODataConfig(PromptDataConfig):
    """`data.*`: where prompts come from."""

    pretrain_dataset: str | None = option(
        None, "Text whose language-modelling loss is mixed in.", "pretrain_data", opens="data"
    )
    pretrain_probs: str | None = option(None, "Mixing of --pretrain_data.", "pretrain_data_probs")
    pretrain_split: str = option("train", "Split of --pretrain_data.")
    pretrain_key: str = option("text", "Column of the text in --pretrain_data.")


class PPOLoggerConfig(LoggerConfig, SampleLoggerConfig):
    """`logger.*` of RL: what is shown and kept of single steps, too."""

    dump_steps: tuple[int, ...] | None = option(
        None, "Steps kept for `openrlhf replay`, with commas between.", "dump"
    )


class PPOConfig(GenerationRunConfig, TrainingRunConfig):
    """Reinforcement learning: PPO, REINFORCE++, RLOO, GRPO and their kin."""

    essentials: ClassVar[tuple[str, ...]] = (
        *("actor.model_name_or_path", "data.prompt_dataset", "data.input_key", "data.label_key"),
        *("reward.remote_url", "reward.model_name_or_path", "algo.advantage.estimator"),
        *("rollout.n_samples_per_prompt", "rollout.batch_size", "train.batch_size"),
        *("train.num_episodes", "data.prompt_max_len", "rollout.max_new_tokens", "actor.adam.lr"),
        *("algo.kl.init_coef", "train.colocate_all", "actor.num_gpus_per_node"),
        *("vllm.num_engines", "eval.dataset", "ckpt.output_dir"),
    )
    example: ClassVar = (
        "--pretrain Qwen/Qwen2.5-0.5B-Instruct --prompt_data problems.jsonl --input_key question "
        "--label_key answer --apply_chat_template --remote_rm_url reward.py "
        "--advantage_estimator group_norm --rollout_batch_size 16 --train_batch_size 128"
    )

    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    ref: FrozenConfig = FrozenConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    vllm: VLLMConfig = VLLMConfig()
    algo: AlgoConfig = AlgoConfig()
    train: PPOTrainConfig = PPOTrainConfig(micro_batch_size=4)
    data: PPODataConfig = PPODataConfig(input_template=None, max_samples=100_000_000)
    ckpt: CheckpointConfig = CheckpointConfig(path="./ckpt/checkpoints_ppo_ray")
    logger: PPOLoggerConfig = logger_of("openrlhf_train_ppo", "ppo", PPOLoggerConfig)

    def derived(self) -> Iterator[tuple[str, object]]:
        """Fill in group size, placement, checkpointing of the critic, and the bound of a
        divergence.
        """
        yield from super().derived()
        if self.has_group_estimator and not is_given(self, "rollout.n_samples_per_prompt"):
            yield "rollout.n_samples_per_prompt", DEFAULT_GROUP_SIZE
        yield from self._shapes_of_partners()
        for name in ("gradient_checkpointing_enable", "gradient_checkpointing_reentrant"):
            if not is_given(self, f"critic.{name}"):
                yield f"critic.{name}", getattr(self.actor, name)
        threshold = "algo.advantage.is_correction_threshold"
        bound = DIVERGENCE_BOUNDS.get(self.algo.advantage.is_correction_gating)
        if bound is not None and not is_given(self, threshold):
            yield threshold, (0.0, bound)

    def _shapes_of_partners(self) -> Iterator[tuple[str, object]]:
        """Yield for models that share GPUs the shape that somebody gave one of them; a saved config
        gives "unset" too.
        """
        for group, name in product(self.colocated_groups(), ("num_nodes", "num_gpus_per_node")):
            shapes = {role: getattr(getattr(self, role), name) for role in group}
            typed = [role for role in group if is_given(self, f"{role}.{name}") and shapes[role]]
            for role in group if typed else ():
                if role not in typed:
                    yield f"{role}.{name}", shapes[typed[0]]

    @property
    def has_group_estimator(self) -> bool:
        """Return True if rewards are compared within the samples of a prompt, or may be: in a
        function of the user's.
        """
        name = self.algo.advantage.estimator
        return name in GROUP_ESTIMATORS or ":" in name

    @property
    def has_critic(self) -> bool:
        """Return True if a value model is trained: with the estimator gae only."""
        return self.algo.advantage.estimator == "gae"

    @property
    def has_reference(self) -> bool:
        """Return True if the KL to a reference model can have an effect."""
        return self.algo.kl.init_coef > 0

    @property
    def policy_path(self) -> str:
        """Return the model that is trained."""
        path = self.actor.model_name_or_path
        assert path is not None, "checked by the configuration"
        return path

    @property
    def critic_source(self) -> str | None:
        """Return the model of the critic: its own, else the first reward model, else the policy."""
        named = (self.critic.model_name_or_path, *self.reward.model_paths, self.policy_path)
        return next(filter(None, named)) if self.has_critic else None

    @property
    def placed(self) -> dict[str, PlacementConfig]:
        sections: dict[str, PlacementConfig] = {"actor": self.actor}
        if self.has_reference:
            sections["ref"] = self.ref
        sections |= super().placed
        return sections | ({"critic": self.critic} if self.has_critic else {})

    @property
    def colocates_all(self) -> bool:
        return self.train.colocate_all

    @property
    def mixes_versions(self) -> bool:
        return self.train.partial_rollout_enable

    @property
    def engines_share_devices(self) -> bool:
        return self.train.colocate_all and not self.train.async_enable

    @property
    def max_penalised_len(self) -> int:
        """Return the tokens of a response, or of an agent's whole episode, at which it is cut."""
        return self.total_len if self.train.agent_func_path else self.rollout.max_new_tokens

    @property
    def num_exported(self) -> int:
        return 2 if self.train.enable_ema else 1

    @property
    def scoring_budget(self) -> int | None:
        train = self.train
        budget = self.rollout.max_tokens_per_gpu or train.max_tokens_per_gpu
        return budget if train.dynamic_batch_enable else None

    @property
    def rewards_take_turns(self) -> bool:
        """Return True if reward models score during training, on devices of trained models."""
        with_critic = self.train.colocate_critic_reward and self.has_critic
        return self.train.async_enable and (self.train.colocate_all or with_critic)

    def colocated_groups(self) -> Iterator[tuple[str, ...]]:
        """Yield the roles that share GPUs; the first of them sets the shape."""
        critic = ("critic",) if self.has_critic else ()
        if self.train.colocate_all:
            yield ("actor", "ref", "reward", *critic)
            return
        if self.train.colocate_actor_ref:
            yield ("actor", "ref")
        if self.train.colocate_critic_reward and critic:
            yield ("critic", "reward")

    def problems(self) -> Iterator[str]:
        """Report problems of samples, placement and asynchronous training."""
        yield from super().problems()
        yield from self._range_problems()
        yield from self._sample_problems()
        yield from self.algo.advantage.problems()
        yield from self.ds.problems(self.actor, self.critic)
        yield from self.actor.problems()
        yield from self._shape_problems()
        yield from self._async_problems()
        if self.eval.early_stop and self.eval.steps < 1:
            yield (
                f"--early_stop {self.eval.early_stop} with --eval_steps {self.eval.steps}: the "
                "evaluations are the first and the last. Type how many steps are between two: "
                "--eval_steps 10."
            )

    def _range_problems(self) -> Iterator[str]:
        ranges = {
            "--reward_clip_range": self.reward.clip_range,
            "--is_correction_threshold": self.algo.advantage.is_correction_threshold,
            "--dynamic_filtering_reward_range": self.algo.dynamic_filtering_range,
        }
        for flag, (low, high) in ((f, pair) for f, pair in ranges.items() if pair is not None):
            if low >= high:
                known = f"{high:g} {low:g}" if low > high else "LOW HIGH, two numbers"
                yield f"{flag} {low:g} {high:g} is no range. Type {flag} {known}."
        clip, is_cispo = self.actor.eps_clip_low_high, self.actor.policy_loss_type == "cispo"
        if clip is not None and (clip[1] <= 0 or (clip[0] <= 0 and not is_cispo)):
            yield (
                f"--eps_clip_low_high {clip[0]:g} {clip[1]:g}: distances from the ratio 1. "
                "Type numbers above 0: --eps_clip_low_high 0.2 0.28."
            )

    def _sample_problems(self) -> Iterator[str]:
        estimator, gamma = self.algo.advantage.estimator, self.algo.advantage.gamma
        prompts, group = self.rollout.batch_size, self.rollout.n_samples_per_prompt
        batch_size, num_samples = self.train.batch_size, prompts * group
        buffer_len, max_len = self.reward.overlong_buffer_len, self.max_penalised_len
        if estimator in GROUP_ESTIMATORS and group == 1:
            yield (
                f"--advantage_estimator {estimator} compares the samples of a prompt, and "
                f"--n_samples_per_prompt is 1. Type --n_samples_per_prompt {DEFAULT_GROUP_SIZE} "
                "(or any number above 1)."
            )
        elif self.algo.dynamic_filtering_enable and group == 1:
            yield (
                "--dynamic_filtering replaces prompts whose samples have equal scores, and "
                "--n_samples_per_prompt is 1. Type --n_samples_per_prompt "
                f"{DEFAULT_GROUP_SIZE} (or any number above 1)."
            )
        if estimator not in DISCOUNTING_ESTIMATORS and gamma != 1:
            yield f"--advantage_estimator {estimator} needs --gamma 1: {gamma}. Type --gamma 1."
        limit = "--max_len" if self.train.agent_func_path else "--generate_max_len"
        if buffer_len is not None and buffer_len > max_len:
            yield (
                f"--overlong_buffer_len {buffer_len:g} is more than {limit} {max_len}, "
                f"so every response is penalised. Type --overlong_buffer_len {max_len // 4 or 1}."
            )
        if batch_size > num_samples:
            yield (
                f"--train_batch_size {batch_size} is more than the {num_samples} samples of a step "
                f"(--rollout_batch_size {prompts} x --n_samples_per_prompt {group}). Type "
                f"--train_batch_size {num_samples} or "
                f"--rollout_batch_size {-(-batch_size // group)}."
            )

    def _shape_problems(self) -> Iterator[str]:
        pairs = [(group[0], role) for group in self.colocated_groups() for role in group[1:]]
        for (first, second), name in product(pairs, ("num_nodes", "num_gpus_per_node")):
            mine, theirs = (getattr(getattr(self, role), name) for role in (first, second))
            if None not in (mine, theirs) and mine != theirs:
                yield (
                    f"--{second}_{name} {theirs} differs from --{first}_{name} {mine}, and the "
                    f"two models share their GPUs. Type --{second}_{name} {mine}."
                )

    def _async_problems(self) -> Iterator[str]:
        train, size = self.train, self.rollout.vllm_generate_batch_size
        if train.async_enable:
            yield from clashes(
                ("--async_train", "--vllm_num_engines 0", self.vllm.num_engines == 0)
            )
            return
        if train.partial_rollout_enable:
            yield "--partial_rollout needs --async_train. Add it, or leave --partial_rollout out."
        if size is not None and size > self.rollout.batch_size:
            yield (
                f"--vllm_generate_batch_size {size} is more than --rollout_batch_size "
                f"{self.rollout.batch_size}. Add --async_train, which generates ahead."
            )

    def notices(self) -> Iterator[str]:
        """Report the group size, a KL that does not do what it seems to, stale samples, and the
        rate of an adapter.
        """
        yield from super().notices()
        flag = "--actor_learning_rate"
        yield from self.adapter_notices(self.ds.lora, "actor.adam.lr", flag)
        yield from self.muon_notices(self.actor, "actor.", flag)
        advantage, kl = self.algo.advantage, self.algo.kl
        if self.has_group_estimator and not is_given(self, "rollout.n_samples_per_prompt"):
            group = self.rollout.n_samples_per_prompt
            yield f"--advantage_estimator {advantage.estimator}: {group} samples of each prompt."
        is_mended = kl.use_loss and kl.unbiased_gradient
        is_biased = kl.use_loss == (kl.estimator == "k1") and not is_mended
        if kl.init_coef > 0 and is_biased:
            how, better = ("with", "k2 or k3") if kl.use_loss else ("without", "k1")
            yield Caution(
                f"--kl_estimator {kl.estimator} {how} --use_kl_loss gives a wrong gradient "
                f"of the KL. Type --kl_estimator {better}."
            )
        is_tis = advantage.is_correction_type == "tis"  # the default, which is not named otherwise
        is_unread = is_tis and not advantage.is_corrected
        if is_unread and is_given(self, "algo.advantage.is_correction_type"):
            yield "--is_correction_type has no effect without --enable_vllm_is_correction."
        if self.rollout.top_p < 1:
            yield Caution(
                f"--top_p {self.rollout.top_p:g}: samples leave out tokens that the log-probs of "
                "the loss count, so its ratios are wrong. Leave --top_p out."
            )
        if self.actor.policy_loss_type == "gspo" and not self.has_own_clip:
            yield Caution(
                f"--policy_loss_type gspo with --eps_clip {self.actor.eps_clip:g}: ratios of whole "
                "sequences are never so far from 1. Type --eps_clip_low_high 3e-4 4e-4."
            )
        size = self.rollout.vllm_generate_batch_size or 0
        most = (self.train.async_queue_size + 1) * self.rollout.batch_size
        if self.train.async_enable and size > most:
            yield (
                f"--vllm_generate_batch_size {size}: at most {most} prompts are generated at once, "
                "(--async_queue_size + 1) x --rollout_batch_size, so that no sample is too old."
            )
        if self.train.async_enable and not advantage.is_corrected:
            yield (
                f"--async_train: samples up to {self.train.async_queue_size} step(s) old count "
                "as if they were new. --enable_vllm_is_correction weighs them by how likely they "
                "are now."
            )

    @property
    def has_own_clip(self) -> bool:
        """Return True if the clip range of the ratio was typed."""
        names = ("actor.eps_clip", "actor.eps_clip_low_high")
        return any(is_given(self, name) for name in names)

    def without_effect(self) -> Iterator[tuple[str, str, str, bool]]:
        yield from super().without_effect()
        yield from self.actor.unread("actor.")
        loss, kl = self.actor.policy_loss_type, self.algo.kl
        of_loss, estimator = f"with --policy_loss_type {loss}", self.algo.advantage.estimator
        is_smooth = loss in ("cispo", "sapo")  # without PPO's minimum
        yield "--dual_clip", "actor.dual_clip", of_loss, is_smooth
        yield "--eps_clip", "actor.eps_clip", of_loss, loss == "sapo"
        yield "--eps_clip_low_high", "actor.eps_clip_low_high", of_loss, loss == "sapo"
        is_unread = loss == "gspo" and not self.has_critic
        yield "--loss_aggregation", "algo.loss_aggregation", of_loss, is_unread
        of_critic = {
            "--lambd": "algo.advantage.lambd",
            "--critic_learning_rate": "critic.adam.lr",
            "--value_clip": "critic.value_clip",
        }
        for flag, path in of_critic.items():
            no_critic = f"with --advantage_estimator {estimator}, which has no critic"
            yield flag, path, no_critic, not self.has_critic
        of_kl = {
            "--kl_target": "target",
            "--use_kl_loss": "use_loss",
            "--kl_estimator": "estimator",
            "--kl_unbiased_gradient": "unbiased_gradient",
        }
        for flag, name in of_kl.items():
            reason = f"with --init_kl_coef {kl.init_coef:g}, which leaves the reference out"
            yield flag, f"algo.kl.{name}", reason, not self.has_reference
        yield (
            "--lora_dropout",
            "ds.lora.dropout",
            "in RL, which compares log-probs of the same weights",
            self.ds.lora.rank > 0,
        )
        yield (
            "--eps_clip",
            "actor.eps_clip",
            "beside --eps_clip_low_high",
            bool(self.actor.eps_clip_low_high),
        )
        yield "--sapo_tau", "actor.sapo_tau", of_loss, loss != "sapo"
        yield "--freezing_actor_steps", "critic.freezing_steps", no_critic, not self.has_critic
        yield from self._without_a_switch()
        no_engine, no_agent = self.vllm.num_engines == 0, self.train.agent_func_path is None
        for found in walk(type(self)):
            if found.path.startswith("vllm.") and found.path != "vllm.num_engines":
                yield found.flag, found.path, "with --vllm_num_engines 0", no_engine
            if found.path in ("train.async_num_tasks", "train.agent_timeout_s"):
                yield found.flag, found.path, "without --agent_func_path", no_agent

    def _without_a_switch(self) -> Iterator[tuple[str, str, str, bool]]:
        """Yield settings of what another flag switches on."""
        advantage, is_uncorrected = "algo.advantage", not self.algo.advantage.is_corrected
        for name in ("type", "mode", "threshold"):
            flag, path = f"--is_correction_{name}", f"{advantage}.is_correction_{name}"
            yield flag, path, "without --enable_vllm_is_correction", is_uncorrected
        is_unfiltered = not self.algo.dynamic_filtering_enable
        filtered, of_reward = "algo.dynamic_filtering_range", self.reward
        is_counted, tokens = not self.train.dynamic_batch_enable, "rollout_max_tokens_per_gpu"
        loses_none = is_uncorrected or self.algo.advantage.correction_level_and_mode[1] != "mask"
        clamp = "is_correction_clamp_survivors"
        yield f"--{clamp}", f"{advantage}.{clamp}", "without --is_correction_mode mask", loses_none
        rows = [
            ("ema_beta", "train.ema_beta", "enable_ema", not self.train.enable_ema),
            (
                "dynamic_filtering_max_empty",
                "algo.dynamic_filtering_max_empty",
                "dynamic_filtering",
                is_unfiltered,
            ),
            (tokens, "rollout.max_tokens_per_gpu", "use_dynamic_batch", is_counted),
            ("dynamic_filtering_reward_range", filtered, "dynamic_filtering", is_unfiltered),
            ("ptx_coef", "actor.ptx_coef", "pretrain_data", not self.data.pretrain_dataset),
            ("kl_horizon", "algo.kl.horizon", "kl_target", self.algo.kl.target is None),
            (
                "async_queue_size",
                "train.async_queue_size",
                "async_train",
                not self.train.async_enable,
            ),
            (
                "overlong_penalty_factor",
                "reward.overlong_penalty_factor",
                "overlong_buffer_len",
                of_reward.overlong_buffer_len is None,
            ),
        ]
        for name, path, other, is_so in rows:
            yield f"--{name}", path, f"without --{other}", is_so
        models = ("--normalize_reward", "reward.normalize_enable", "without --reward_pretrain")
        yield *models, not self.reward.model_paths
        is_apart = not self.engines_share_devices and self.vllm.num_engines != 0
        where = "without --colocate_all_models"
        if self.train.async_enable:
            where = "with --async_train, whose engines have devices of their own"
        yield "--vllm_enable_sleep", "vllm.enable_sleep", where, is_apart
