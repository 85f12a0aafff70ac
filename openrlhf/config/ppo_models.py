"""The four models of the PPO config tree, with their placement.

Field path = dotted flag; the names after the help text are the flat flag and what Hugging Face
users type.
"""

from __future__ import annotations

from pydantic import field_validator

from openrlhf.config.base import Base, option, switch
from openrlhf.config.common import AdamConfig, OptimizerConfig

POLICY_LOSS_NAMES = ("ppo", "gspo", "cispo", "sapo")
GPUS_HELP = "GPUs on each node (CPU ranks where there is no GPU); unset: "
FROZEN_GPUS_HELP = (
    GPUS_HELP + "as the model it is colocated with, else all visible ones that others leave."
)


class ActorAdamConfig(AdamConfig):
    """`actor.adam.*`."""

    lr: float = option(1e-6, "Peak learning rate.", "actor_learning_rate", ge=0, at_resume="kept")


class CriticAdamConfig(AdamConfig):
    """`critic.adam.*`."""

    lr: float = option(9e-6, "Peak learning rate.", "critic_learning_rate", ge=0, at_resume="kept")


class ActorConfig(OptimizerConfig):
    """`actor.*`: the policy and its loss."""

    num_nodes: int = option(1, "Nodes of the actor.", "actor_num_nodes", ge=1)
    num_gpus_per_node: int | None = option(
        None,
        GPUS_HELP + "as a colocated model that has it set, else all visible ones, one CPU rank.",
        "actor_num_gpus_per_node",
        ge=1,
    )
    model_name_or_path: str | None = option(
        None,
        "Policy to start from: hub id or path.",
        "pretrain",
        "model_name_or_path",
        opens="model",
        at_resume="refused",
    )
    adam: ActorAdamConfig = ActorAdamConfig()
    gradient_checkpointing_enable: bool = switch(
        "Recompute activations in the backward pass.", "gradient_checkpointing"
    )
    gradient_checkpointing_reentrant: bool = switch(
        "The reentrant variant of it.", "gradient_checkpointing_use_reentrant"
    )
    policy_loss_type: str = option(
        "ppo",
        "ppo: token ratios; gspo: sequence ratios; cispo: capped weights; sapo: a soft gate; or "
        "your own function as module:name or file.py:name.",
        "policy_loss_type",
        opens="code",
    )
    sapo_tau: tuple[float, float] = option(
        (1.0, 1.05), "Steepness of SAPO's gate for good and for bad tokens.", "sapo_tau"
    )

    @field_validator("policy_loss_type")
    @classmethod
    def check_policy_loss_type(cls, value: str) -> str:
        """A name that is known, or an import path."""
        if value not in POLICY_LOSS_NAMES and ":" not in value:
            names = ", ".join(POLICY_LOSS_NAMES)
            near = value.lower() if value.lower() in POLICY_LOSS_NAMES else f"one of {names}"
            raise ValueError(
                f"it is not known. Type {near}, or module:name or file.py:name of a function"
            )
        return value

    @field_validator("sapo_tau")
    @classmethod
    def check_sapo_tau(cls, value: tuple[float, float]) -> tuple[float, float]:
        """A gate that closes."""
        if min(value) <= 0:
            raise ValueError("both must be above 0. Type 1.0 1.05")
        return value

    eps_clip: float = option(
        0.2, "Clip range of the ratio.", "eps_clip", gt=0, only_with="!actor.eps_clip_low_high"
    )
    eps_clip_low_high: tuple[float, float] | None = option(
        None, "Clip ranges below and above; unset: --eps_clip twice.", "eps_clip_low_high"
    )
    dual_clip: float | None = option(
        None, "Bound c > 1 of the loss for negative advantages.", "dual_clip"
    )
    entropy_coef: float | None = option(
        None,
        "Unset: entropy is not computed; 0: logged; above: bonus.",
        "entropy_loss_coef",
        ge=0,
    )
    aux_loss_coef: float = option(
        0.0, "Weight of the load-balancing loss of experts.", "aux_loss_coef", ge=0
    )
    ptx_coef: float = option(
        0.05,
        "Weight of the language-modelling loss on --pretrain_data.",
        "ptx_coef",
        ge=0,
        only_with="data.pretrain_dataset",
    )
    freeze_visual_encoder: bool = switch("Train language parameters only.", "freeze_visual_encoder")


class CriticConfig(OptimizerConfig):
    """`critic.*`: the value model, used with the estimator gae only."""

    num_nodes: int = option(1, "Nodes of the critic.", "critic_num_nodes", ge=1)
    num_gpus_per_node: int | None = option(
        None,
        GPUS_HELP + "as the model it is colocated with, else all visible ones.",
        "critic_num_gpus_per_node",
        ge=1,
    )
    model_name_or_path: str | None = option(
        None,
        "Value model to start from; unset: the first reward model, else the policy.",
        "critic_pretrain",
        opens="model",
        at_resume="refused",
    )
    adam: CriticAdamConfig = CriticAdamConfig()
    gradient_checkpointing_enable: bool = switch(
        "Recompute activations; unset: as the actor.", "gradient_checkpointing"
    )
    gradient_checkpointing_reentrant: bool = switch(
        "The reentrant variant of it; unset: as the actor.",
        "gradient_checkpointing_use_reentrant",
    )
    value_clip: float = option(
        0.5,
        "Clip range of value changes.",
        "value_clip",
        gt=0,
        only_with="algo.advantage.estimator=gae",
    )
    freezing_steps: int = option(
        -1,
        "The first N steps train the critic alone.",
        "freezing_actor_steps",
        only_with="algo.advantage.estimator=gae",
    )
    save_value_network: bool = switch(
        "Export the critic at the end.",
        "save_value_network",
        only_with="algo.advantage.estimator=gae",
    )


class RefConfig(Base):
    """`ref.*`: the frozen policy that KL is measured from."""

    num_nodes: int = option(1, "Nodes of the reference model.", "ref_num_nodes", ge=1)
    num_gpus_per_node: int | None = option(None, FROZEN_GPUS_HELP, "ref_num_gpus_per_node", ge=1)
    offload: bool = switch("Keep its weights in CPU memory.", "ref_reward_offload")


class RewardConfig(Base):
    """`reward.*`: where rewards come from and how they are shaped."""

    num_nodes: int = option(1, "Nodes of the reward model.", "reward_num_nodes", ge=1)
    num_gpus_per_node: int | None = option(None, FROZEN_GPUS_HELP, "reward_num_gpus_per_node", ge=1)
    model_name_or_path: str | None = option(
        None, "Reward models, with commas between.", "reward_pretrain", opens="models"
    )
    weights: tuple[float, ...] | None = option(
        None, "Weights of several reward models; unset: 1 each.", "reward_weights"
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
    max_dropped: float = option(
        0.01,
        "Share of a step's prompts that --reward_failure drop_group may drop; more end the run.",
        "reward_max_dropped",
        ge=0,
        lt=1,
        only_with="reward.failure=drop_group",
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
    offload: bool = switch("Keep its weights in CPU memory.", "ref_reward_offload")
    normalize_enable: bool = switch(
        "(reward - mean) / std, both from the model's config.",
        "normalize_reward",
        only_with="reward.model_name_or_path",
    )
    clip_range: tuple[float, float] = option(
        (-10.0, 10.0), "Bounds of the shaped reward.", "reward_clip_range"
    )
    overlong_buffer_len: float | None = option(
        None, "Tokens before the limit in which a penalty grows (DAPO).", "overlong_buffer_len"
    )
    overlong_penalty_factor: float = option(
        1.0,
        "The penalty at the limit.",
        "overlong_penalty_factor",
        ge=0,
        only_with="reward.overlong_buffer_len",
    )
    stop_properly_penalty_coef: float | None = option(
        None,
        "Truncated samples: 0 to 1 scales their reward, below 0 replaces it.",
        "stop_properly_penalty_coef",
        le=1,
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
