"""The four models of the PPO config tree, with their placement.

Field path = dotted flag; the names after the help text are the flat flag and what Hugging Face
users type.
"""

from __future__ import annotations

from typing import Literal

from openrlhf.config.base import Base, option, switch
from openrlhf.config.common import AdamConfig, OptimizerConfig

GPUS_HELP = "GPUs on each node (CPU ranks where there is no GPU); unset: "


class ActorAdamConfig(AdamConfig):
    """`actor.adam.*`."""

    lr: float = option(1e-6, "Peak learning rate.", "actor_learning_rate", ge=0)


class CriticAdamConfig(AdamConfig):
    """`critic.adam.*`."""

    lr: float = option(9e-6, "Peak learning rate.", "critic_learning_rate", ge=0)


class ActorConfig(OptimizerConfig):
    """`actor.*`: the policy and its loss."""

    num_nodes: int = option(1, "Nodes of the actor.", "actor_num_nodes", ge=1)
    num_gpus_per_node: int | None = option(
        None, GPUS_HELP + "all visible ones, one CPU rank.", "actor_num_gpus_per_node", ge=1
    )
    model_name_or_path: str | None = option(
        None, "Policy to start from: hub id or path.", "pretrain", "model_name_or_path"
    )
    adam: ActorAdamConfig = ActorAdamConfig()
    gradient_checkpointing_enable: bool = switch(
        "Recompute activations in the backward pass.", "gradient_checkpointing"
    )
    gradient_checkpointing_reentrant: bool = switch(
        "The reentrant variant of it.", "gradient_checkpointing_use_reentrant"
    )
    policy_loss_type: Literal["ppo", "gspo", "cispo"] = option(
        "ppo", "Token ratio (ppo) or sequence ratio (gspo).", "policy_loss_type"
    )
    eps_clip: float = option(0.2, "Clip range of the ratio.", "eps_clip", gt=0)
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
        0.05, "Weight of the language-modelling loss on --pretrain_data.", "ptx_coef", ge=0
    )
    freeze_visual_encoder: bool = switch("Train language parameters only.", "freeze_visual_encoder")


class CriticConfig(OptimizerConfig):
    """`critic.*`: the value model, used with the estimator gae only."""

    num_nodes: int = option(1, "Nodes of the critic.", "critic_num_nodes", ge=1)
    num_gpus_per_node: int | None = option(
        None, GPUS_HELP + "as the actor.", "critic_num_gpus_per_node", ge=1
    )
    model_name_or_path: str | None = option(
        None,
        "Value model to start from; unset: the first reward model, else the policy.",
        "critic_pretrain",
    )
    adam: CriticAdamConfig = CriticAdamConfig()
    gradient_checkpointing_enable: bool = switch(
        "Recompute activations; unset: as the actor.", "gradient_checkpointing"
    )
    gradient_checkpointing_reentrant: bool = switch(
        "The reentrant variant of it; unset: as the actor.",
        "gradient_checkpointing_use_reentrant",
    )
    value_clip: float = option(0.5, "Clip range of value changes.", "value_clip", gt=0)
    freezing_steps: int = option(
        -1, "The first N steps train the critic alone.", "freezing_actor_steps"
    )
    save_value_network: bool = switch("Export the critic at the end.", "save_value_network")


class RefConfig(Base):
    """`ref.*`: the frozen policy that KL is measured from."""

    num_nodes: int = option(1, "Nodes of the reference model.", "ref_num_nodes", ge=1)
    num_gpus_per_node: int | None = option(
        None, GPUS_HELP + "as the actor.", "ref_num_gpus_per_node", ge=1
    )
    offload: bool = switch("Keep its weights in CPU memory.", "ref_reward_offload")


class RewardConfig(Base):
    """`reward.*`: where rewards come from and how they are shaped."""

    num_nodes: int = option(1, "Nodes of the reward model.", "reward_num_nodes", ge=1)
    num_gpus_per_node: int | None = option(
        None, GPUS_HELP + "as the actor.", "reward_num_gpus_per_node", ge=1
    )
    model_name_or_path: str | None = option(
        None, "Reward models, with commas between.", "reward_pretrain"
    )
    weights: tuple[float, ...] | None = option(
        None, "Weights of several reward models; unset: equal.", "reward_weights"
    )
    remote_url: str | None = option(
        None, "A .py file with reward_func, or URLs of reward servers.", "remote_rm_url"
    )
    failure: str = option(
        "fail", "When a reward cannot be had: fail, drop_group or retry(n).", "reward_failure"
    )
    offload: bool = switch("Keep its weights in CPU memory.", "ref_reward_offload")
    normalize_enable: bool = switch(
        "(reward - mean) / std, both from the model's config.", "normalize_reward"
    )
    clip_range: tuple[float, float] = option(
        (-10.0, 10.0), "Bounds of the shaped reward.", "reward_clip_range"
    )
    overlong_buffer_len: float | None = option(
        None, "Tokens before the limit in which a penalty grows (DAPO).", "overlong_buffer_len"
    )
    overlong_penalty_factor: float = option(
        1.0, "The penalty at the limit.", "overlong_penalty_factor", ge=0
    )
    stop_properly_penalty_coef: float | None = option(
        None,
        "Truncated samples: 0 to 1 scales their reward, below 0 replaces it.",
        "stop_properly_penalty_coef",
        le=1,
    )
