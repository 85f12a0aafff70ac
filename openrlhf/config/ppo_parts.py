"""Parts of the PPO config tree: models, rollouts, vLLM, algorithm, training, data, evaluation.

Field path = dotted flag; the names after the help text are the flat flag and what Hugging Face
users type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from openrlhf.config.base import Base, option, switch
from openrlhf.config.common import (
    AdamConfig,
    CheckedDataConfig,
    EvalConfig,
    OptimizerConfig,
    PromptTemplateConfig,
    RewardModelsConfig,
    TrainConfig,
    TrainedModelConfig,
)

Estimator = Literal[
    "gae", "reinforce", "flash_reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"
]
GROUP_ESTIMATORS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
DEFAULT_GROUP_SIZE = 8
# Level and mode that a name of the importance correction stands for.
IS_CORRECTION_TYPES = {
    "tis": ("token", "clip"),
    "icepop": ("token", "mask"),
    "seq-mask-tis": ("seq", "mask"),
}
# Words of OpenRLHF 0.11 for aggregations.
LOSS_AGG_MODES = {"token-mean": "token_mean", "seq-mean-token-mean": "seq_mean"}
# What people type for an estimator, by the method's name: only said, as one may be wrong.
KNOWN_AS = {
    "ppo": "gae",
    "grpo": "group_norm",
    "reinforce++": "reinforce",
    "reinforce++_baseline": "reinforce_baseline",
    "reinforce++-baseline": "reinforce_baseline",
    "drgrpo": "dr_grpo",
}
POLICY_LOSS_NAMES = ("ppo", "gspo", "cispo", "sapo")


def rising(value: tuple[float, float]) -> tuple[float, float]:
    """Raise ValueError unless the first is smaller."""
    if value[0] >= value[1]:
        raise ValueError(f"the first must be smaller. Type {value[1]:g} {value[0]:g}")
    return value


def positive(value: tuple[float, float] | None) -> tuple[float, float] | None:
    """Raise ValueError unless both are above 0."""
    if value is not None and min(value) <= 0:
        raise ValueError("both must be above 0. Leave it out, or type two such numbers")
    return value


class PlacementConfig(Base):
    """Where a model runs."""

    num_nodes: int = option(1, "Nodes of the model.", "{model}num_nodes", ge=1)
    num_gpus_per_node: int | None = option(
        None,
        "GPUs on each node (CPU ranks where there is no GPU); unset: as a model it is colocated "
        "with, else all visible ones that others leave, one CPU rank.",
        "{model}num_gpus_per_node",
        ge=1,
    )


class FrozenConfig(PlacementConfig):
    """A model that is not trained."""

    offload: bool = switch("Keep its weights in CPU memory.", "ref_reward_offload")


class ActorConfig(OptimizerConfig, TrainedModelConfig, PlacementConfig):
    """`actor.*`: the policy and its loss."""

    model_name_or_path: str | None = option(
        None,
        "Policy to start from: hub id or path.",
        "pretrain",
        "model_name_or_path",
        needed="policy model",
        opens="model",
        at_resume="refused",
    )
    adam: AdamConfig = AdamConfig(lr=1e-6)
    policy_loss_type: str = option(
        "ppo",
        "ppo: token ratios; gspo: sequence ratios; cispo: capped weights; sapo: a soft gate; or "
        "your own function as module:name or file.py:name.",
        opens="code",
    )
    sapo_tau: tuple[float, float] = option(
        (1.0, 1.05), "Steepness of SAPO's gate for good and for bad tokens."
    )

    @field_validator("policy_loss_type")
    @classmethod
    def check_policy_loss_type(cls, value: str) -> str:
        """Raise ValueError for a name that is neither known nor an import path."""
        if value not in POLICY_LOSS_NAMES and ":" not in value:
            names = ", ".join(POLICY_LOSS_NAMES)
            near = value.lower() if value.lower() in POLICY_LOSS_NAMES else f"one of {names}"
            raise ValueError(
                f"it is not known. Type {near}, or module:name or file.py:name of a function"
            )
        return value

    eps_clip: float = option(0.2, "Clip range of the ratio.", gt=0)
    eps_clip_low_high: tuple[float, float] | None = option(
        None, "Clip ranges below and above; unset: --eps_clip twice."
    )
    dual_clip: float | None = option(None, "Bound c > 1 of the loss for negative advantages.", gt=1)

    _positive = field_validator("sapo_tau", "eps_clip_low_high")(positive)

    entropy_coef: float | None = option(
        None, "Unset: entropy is not computed; 0: logged; above: bonus.", "entropy_loss_coef", ge=0
    )
    aux_loss_coef: float = option(0.0, "Weight of the load-balancing loss of experts.", ge=0)
    ptx_coef: float = option(
        0.05, "Weight of the language-modelling loss on --pretrain_data.", ge=0
    )
    freeze_visual_encoder: bool = switch("Train language parameters only.")


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
    freezing_steps: int = option(
        -1, "The first N steps train the critic alone.", "freezing_actor_steps"
    )
    save_value_network: bool = switch("Export the critic at the end.")


class RewardConfig(RewardModelsConfig, FrozenConfig):
    """`reward.*`: where rewards come from and how they are shaped."""

    model_name_or_path: str | None = option(
        None, "Reward models, with commas between.", "reward_pretrain", opens="models"
    )
    remote_url: str | None = option(
        None,
        "A .py file with reward_func, or URLs of reward servers with commas between.",
        "remote_rm_url",
        opens="code",
    )
    failure: str = option(
        "fail",
        "When a reward cannot be had: fail, drop_group, retry or retry(n).",
        "reward_failure",
    )

    @field_validator("failure")
    @classmethod
    def check_failure(cls, value: str) -> str:
        """Raise ValueError for a policy that is not one of three."""
        if not re.fullmatch(r"fail|drop_group|retry(\(0*[1-9]\d*\))?", value):
            raise ValueError("it is not known. Type fail, drop_group, retry or 'retry(5)'")
        return value

    max_dropped: float = option(
        0.01,
        "Share of a step's prompts that --reward_failure drop_group may drop; more end the run.",
        "reward_max_dropped",
        ge=0,
        lt=1,
    )
    timeout_s: float = option(
        300.0,
        "Seconds for one call of a reward function, or for all tries of a request to servers.",
        "reward_timeout_s",
        gt=0,
    )
    try_timeout_s: float = option(
        60.0, "Seconds for one try at a reward server.", "reward_try_timeout_s", gt=0
    )
    memory_gib: float = option(
        8.0,
        "Memory in GiB of each process that calls a reward function.",
        "reward_memory_gib",
        gt=0,
    )
    num_workers: int | None = option(
        None,
        "Processes that call a reward function; unset: one a core, at least 4, at most 16.",
        "reward_num_workers",
        ge=1,
    )
    clip_range: tuple[float, float] = option(
        (-10.0, 10.0), "Bounds of the shaped reward.", "reward_clip_range"
    )
    _rising = field_validator("clip_range")(rising)

    overlong_buffer_len: float | None = option(
        None, "Tokens before the limit in which a penalty grows (DAPO).", gt=0
    )
    overlong_penalty_factor: float = option(1.0, "The penalty at the limit.", ge=0)
    stop_properly_penalty_coef: float | None = option(
        None, "Truncated samples: 0 to 1 scales their reward, below 0 replaces it.", le=1
    )

    @property
    def model_paths(self) -> tuple[str, ...]:
        """Every local reward model named."""
        names = (self.model_name_or_path or "").split(",")
        return tuple(name.strip() for name in names if name.strip())

    @property
    def is_function_file(self) -> bool:
        """Whether the reward comes from a function in a local file."""
        url = self.remote_url or ""
        return url.endswith(".py") and "," not in url and "://" not in url


class RolloutConfig(Base):
    """`rollout.*`: how samples are made."""

    batch_size: int = option(
        1024, "Prompts in a step.", "rollout_batch_size", gt=0, at_resume="refused"
    )
    micro_batch_size: int = option(
        8, "Samples in one forward pass of a device.", "micro_rollout_batch_size", gt=0
    )
    vllm_generate_batch_size: int | None = option(
        None, "Prompts generated at once; unset: a step's.", gt=0
    )
    n_samples_per_prompt: int = option(
        1,
        f"Samples of a prompt; unset: 1, for group estimators {DEFAULT_GROUP_SIZE}.",
        "n_samples_per_prompt",
        "num_generations",
        gt=0,
        at_resume="refused",
    )
    max_new_tokens: int = option(
        1024, "Most tokens in a response.", "generate_max_len", "max_completion_length", gt=0
    )
    temperature: float = option(1.0, "Sampling temperature.", gt=0)
    top_p: float = option(1.0, "Nucleus sampling.", gt=0, le=1)
    max_tokens_per_gpu: int | None = option(
        None,
        "Token budget of a forward pass; unset: --train_max_tokens_per_gpu.",
        "rollout_max_tokens_per_gpu",
        gt=0,
    )
    num_kept_files: int = option(
        1000,
        "Files of samples that stay in the run folder, one a step; the oldest go.",
        flat=False,
        ge=1,
    )


class VLLMConfig(Base):
    """`vllm.*`: the engines that generate."""

    num_engines: int | None = option(
        None,
        "Engines; unset: one for each rank group of the actor (train_ppo: none), 0: the actor "
        "generates itself.",
        "vllm_num_engines",
        ge=0,
    )
    tensor_parallel_size: int = option(1, "GPUs of an engine.", "vllm_tensor_parallel_size", ge=1)
    sync_backend: Literal["nccl", "gloo"] = option(
        "nccl", "How weights travel between GPUs.", "vllm_sync_backend"
    )
    sync_with_ray: bool = switch(
        "Send weights through Ray's object store: where NCCL or gloo cannot connect the nodes.",
        "vllm_sync_with_ray",
    )
    enable_prefix_caching: bool = switch("Cache common prefixes between weight updates.")
    enforce_eager: bool = switch("No CUDA graphs.")
    enable_sleep: bool = switch(
        "Engines give memory back while training runs.", "vllm_enable_sleep"
    )
    gpu_memory_utilization: float = option(
        0.95, "Part of GPU memory an engine takes.", "vllm_gpu_memory_utilization", gt=0, le=1
    )
    timeout_s: float = option(
        300.0,
        "Seconds an engine with requests may take for the next token, or to say that it lives.",
        "engine_timeout_s",
        gt=0,
    )


class AdvantageConfig(Base):
    """`algo.advantage.*`: from rewards to advantages."""

    estimator: Estimator = option(
        "gae",
        "Advantage estimator: gae is PPO, group_norm GRPO, reinforce REINFORCE++.",
        "advantage_estimator",
        known_as=KNOWN_AS,
        at_resume="refused",
    )
    gamma: float = option(1.0, "Discount.", ge=0, le=1)
    lambd: float = option(1.0, "Lambda of GAE.", ge=0, le=1)
    no_std_norm: bool = switch("Do not divide by the standard deviation.", "no_advantage_std_norm")
    is_correction_enable: bool = switch(
        "Correct for engine and trainer disagreeing.", "enable_vllm_is_correction"
    )
    is_correction_type: Literal["tis", "icepop", "seq-mask-tis"] = option(
        "tis",
        "A name for level and mode. tis: token, clip; icepop: token, mask; seq-mask-tis: seq, "
        "mask, survivors clamped.",
    )
    is_correction_level: Literal["off", "token", "seq", "sequence", "geometric"] | None = option(
        None,
        "What the gate is read of: every token, or the mean of a sequence (seq; geometric for the "
        "ratio). token and seq switch the correction on and weigh tokens; sequence and geometric "
        "weigh by the ratio of the sequence. Unset: by the type.",
    )
    is_correction_mode: Literal["mask", "clip", "truncate"] | None = option(
        None,
        "What is outside the band is dropped (mask) or held in it (clip; truncate: at its upper "
        "end only). Unset: by the type; mask where nothing else can be.",
        "is_correction_mode",
        ".is_correction_treatment",
        "is_correction_treatment",
    )
    is_correction_gating: Literal["ratio", "binary_kl", "tv"] = option(
        "ratio",
        "What the band is held against: the ratio trainer / engine, or a distance of the two "
        "probabilities of the sampled token, which has an upper bound only.",
    )
    is_correction_threshold: tuple[float, float] = option(
        (0.5, 5.0),
        "The band: HIGH, or LOW HIGH.",
        "vllm_is_truncated_threshold",
        "is_correction_threshold",
    )
    is_correction_clamp_survivors: bool = switch(
        "What a mask lets pass is weighted by at most HIGH."
    )

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
        is_preset = self.is_correction_type == "seq-mask-tis" and self.is_correction_level is None
        return self.is_correction_clamp_survivors or is_preset

    @field_validator("is_correction_threshold", mode="before")
    @classmethod
    def read_one_threshold(cls, value: object) -> object:
        """Read a single value as the upper bound."""
        return (0.0, *value) if isinstance(value, tuple) and len(value) == 1 else value

    _rising = field_validator("is_correction_threshold")(rising)

    def problems(self) -> Iterator[str]:
        """Yield a line for each pair of settings of the correction that contradict each other."""
        level, mode = self.correction_level_and_mode
        gating, (_, high) = self.is_correction_gating, self.is_correction_threshold
        if self.is_correction_enable and level == "off":
            yield "--is_correction_level off and --enable_vllm_is_correction: leave one out."
        if level == "off" or not self.is_corrected:
            return
        if mode != "mask" and (level == "seq" or gating != "ratio"):
            what = "level seq" if level == "seq" else f"gating {gating}"
            yield (
                f"--is_correction_mode {mode} holds ratios of tokens in a band, and "
                f"--is_correction_{what} is something else. Type --is_correction_mode mask."
            )
        if gating != "ratio" and level not in ("token", "seq"):
            yield (
                f"--is_correction_gating {gating} weighs tokens, and --is_correction_level {level} "
                "weighs sequences. Type --is_correction_level seq."
            )
        if gating == "tv" and high >= 1:
            yield (
                f"--is_correction_gating tv is at most 1, and --is_correction_threshold {high:g} "
                "lets everything pass. Type --is_correction_threshold 0.1."
            )


class KLConfig(Base):
    """`algo.kl.*`: staying near the reference model."""

    init_coef: float = option(
        0.01, "KL coefficient; 0 or below: no reference model is started.", "init_kl_coef", "beta"
    )
    target: float | None = option(
        None, "KL that the coefficient adapts to; unset: fixed.", "kl_target", gt=0
    )
    horizon: int = option(10_000, "Samples over which it adapts.", "kl_horizon", gt=0)
    estimator: Literal["k1", "k2", "k3"] = option("k1", "KL estimator.", "kl_estimator")
    use_loss: bool = switch("KL in the loss, not in the reward.", "use_kl_loss")
    unbiased_gradient: bool = switch(
        "With --use_kl_loss: the gradient is that of the KL itself, for every estimator.",
        "kl_unbiased_gradient",
    )

    @field_validator("init_coef")
    @classmethod
    def read_negative_as_off(cls, value: float) -> float:
        """Old commands switch KL off with any number that is not above 0."""
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
    dynamic_filtering_enable: bool = switch(
        "Replace groups without a learning signal (DAPO).", "dynamic_filtering"
    )
    dynamic_filtering_range: tuple[float, float] = option(
        (0.0, 1.0), "Mean score of a group that is kept.", "dynamic_filtering_reward_range"
    )
    _rising = field_validator("dynamic_filtering_range")(rising)

    dynamic_filtering_max_empty: int = option(
        10, "Batches without a kept group before stopping.", gt=0
    )


class PPOTrainConfig(TrainConfig):
    """`train.*`: steps, memory and placement."""

    max_epochs: int = option(1, "Passes over a step's samples.", gt=0, at_resume="refused")
    num_episodes: int = option(
        1, "Passes over the prompts.", "num_episodes", "num_train_epochs", gt=0
    )
    colocate_all: bool = switch("All models and engines share the GPUs.", "colocate_all_models")
    colocate_actor_ref: bool = switch("Actor and reference share GPUs.")
    colocate_critic_reward: bool = switch("Critic and reward model share GPUs.")
    enable_ema: bool = switch(
        "Export an average of the weights; the last ones go to its folder policy.",
        at_resume="refused",
    )
    ema_beta: float = option(0.992, "Decay of the average.", ge=0, lt=1)
    async_enable: bool = switch(
        "Generate while training; engines have devices of their own.",
        "async_train",
        at_resume="refused",
    )
    async_queue_size: int = option(
        1,
        "Updates a sample may be behind when it is trained on.",
        env="OPENRLHF_ASYNC_QUEUE_SIZE",
        gt=0,
    )
    async_num_tasks: int = option(
        128, "Agents an engine runs.", env="OPENRLHF_ASYNC_NUM_TASKS", gt=0
    )
    partial_rollout_enable: bool = switch(
        "Weights change under running samples instead of after them.", "partial_rollout"
    )
    agent_func_path: str | None = option(None, "A .py file with AgentExecutor.", opens="file")
    agent_timeout_s: float = option(
        3600.0, "Seconds for an agent's episode, generation included.", gt=0
    )


class PPODataConfig(CheckedDataConfig, PromptTemplateConfig):
    """`data.*`: where prompts come from."""

    prompt_dataset: str | None = option(
        None,
        "Prompts: hub ids or paths, with commas between.",
        "prompt_data",
        "dataset_name",
        needed="prompt data",
        opens="data",
    )
    prompt_probs: str | None = option(
        None, "Mixing probabilities, with commas; unset: one after the other.", "prompt_data_probs"
    )
    prompt_split: str = option("train", "Split of the prompts.")
    max_len: int | None = option(
        None, "Most tokens of prompt and response; unset: both limits together.", gt=0
    )
    prompt_max_len: int = option(
        1024, "Most tokens in a prompt; unset with --max_len: what the response leaves.", gt=0
    )
    max_samples: int = option(100_000_000, "Most prompts of a dataset.", gt=0)
    overlong_prompts: Literal["filter", "truncate_left", "error"] = option(
        "filter", "Prompts over --prompt_max_len: counted and left out, cut, or refused."
    )
    input_key: str = option("input", "Column of the prompt or messages.")
    label_key: str | None = option(None, "Column handed to the reward function.")
    dataloader_num_workers: int = option(
        0, "Has no effect: the trainer packs batches itself.", ge=0
    )
    pretrain_dataset: str | None = option(
        None, "Text whose language-modelling loss is mixed in.", "pretrain_data", opens="data"
    )
    pretrain_probs: str | None = option(
        None, "Mixing probabilities of --pretrain_data.", "pretrain_data_probs"
    )
    pretrain_split: str = option("train", "Split of --pretrain_data.")
    pretrain_key: str = option("text", "Column of the text in --pretrain_data.")
    image_key: str = option("images", "Column of the images.")
    max_images_per_prompt: int = option(
        0, "Images of a prompt; above 0: a vision-language model.", ge=0
    )


class PPOEvalConfig(EvalConfig):
    """`eval.*`: pass rates on held-out prompts."""

    steps: int = option(
        -1,
        "Evaluate every N global steps; before the first and after the last in any case, with -1 "
        "only then.",
        "eval_steps",
        ge=-1,
    )
    temperature: float = option(0.6, "Sampling temperature; 0: greedy.", "eval_temperature", ge=0)
    n_samples_per_prompt: int = option(
        4, "Samples of a prompt: k of pass@k.", "eval_n_samples_per_prompt", gt=0
    )
