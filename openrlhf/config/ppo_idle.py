"""Settings of reinforcement learning that nothing reads in a run: said, not refused."""

from __future__ import annotations

from typing import Any

from openrlhf.config.checks import is_blank
from openrlhf.config.idle import Idle
from openrlhf.config.idle_training import (
    IDLE_ANYWHERE,
    checkpointing_rule,
    optimizer_rules,
)


def has_critic(config: Any) -> bool:
    """Whether the estimator needs a value model."""
    return bool(config.algo.advantage.estimator == "gae")


def has_no_engines(config: Any) -> bool:
    """Whether the policy was told to generate itself."""
    return bool(config.vllm.num_engines == 0)


TEXT_PATHS = ("data.pretrain_probs", "data.pretrain_split", "data.pretrain_key", "actor.ptx_coef")
HAS_NO_CRITIC = "without a critic (--advantage_estimator gae has one)"
REWARD_RULES = (
    Idle(
        ("reward.normalize_enable",),
        lambda config: is_blank(config.reward.model_name_or_path),
        "without --reward_pretrain, whose config has the mean and std",
    ),
    Idle(
        ("reward.timeout_s",),
        lambda config: (
            is_blank(config.reward.remote_url) and is_blank(config.train.agent_func_path)
        ),
        "with --reward_pretrain",
    ),
    Idle(
        ("reward.try_timeout_s",),
        lambda config: is_blank(config.reward.remote_url) or config.reward.is_function_file,
        "without URLs in --remote_rm_url",
    ),
    Idle(
        ("reward.memory_gib", "reward.num_workers"),
        lambda config: not config.reward.is_function_file,
        "without a .py file in --remote_rm_url",
    ),
    Idle(
        ("reward.max_dropped",),
        lambda config: config.reward.failure != "drop_group",
        "without --reward_failure drop_group",
    ),
    Idle(
        ("reward.overlong_penalty_factor",),
        lambda config: config.reward.overlong_buffer_len is None,
        "without --overlong_buffer_len",
    ),
)
IDLE = (
    *IDLE_ANYWHERE,
    *optimizer_rules("actor."),
    *optimizer_rules("critic."),
    checkpointing_rule("actor"),
    checkpointing_rule("critic"),
    *REWARD_RULES,
    Idle(
        (
            "critic.adam.lr",
            "critic.value_clip",
            "critic.freezing_steps",
            "critic.save_value_network",
            "critic.model_name_or_path",
        ),
        lambda config: not has_critic(config),
        HAS_NO_CRITIC,
    ),
    Idle(
        ("algo.advantage.lambd",),
        lambda config: not has_critic(config),
        "without --advantage_estimator gae",
    ),
    Idle(
        ("algo.kl.target", "algo.kl.horizon", "algo.kl.use_loss", "algo.kl.unbiased_gradient"),
        lambda config: config.algo.kl.init_coef == 0,
        "with --init_kl_coef 0",
    ),
    Idle(
        ("algo.kl.unbiased_gradient",),
        lambda config: not config.algo.kl.use_loss,
        "without --use_kl_loss",
    ),
    Idle(("algo.kl.horizon",), lambda config: config.algo.kl.target is None, "without --kl_target"),
    Idle(
        ("train.async_queue_size",),
        lambda config: not config.train.async_enable,
        "without --async_train",
    ),
    Idle(
        ("train.agent_timeout_s", "train.async_num_tasks"),
        lambda config: is_blank(config.train.agent_func_path),
        "without --agent_func_path",
    ),
    Idle(
        TEXT_PATHS,
        lambda config: is_blank(config.data.pretrain_dataset),
        "without --pretrain_data",
    ),
    Idle(
        ("data.pretrain_dataset",), lambda config: config.actor.ptx_coef == 0, "with --ptx_coef 0"
    ),
    Idle(
        ("algo.loss_aggregation",),
        lambda config: config.actor.policy_loss_type == "gspo" and not has_critic(config),
        "with --policy_loss_type gspo, which is defined with seq_mean",
    ),
    Idle(
        ("actor.dual_clip",),
        lambda config: config.actor.policy_loss_type == "cispo",
        "with --policy_loss_type cispo",
    ),
    Idle(
        ("actor.dual_clip", "actor.eps_clip", "actor.eps_clip_low_high"),
        lambda config: config.actor.policy_loss_type == "sapo",
        "with --policy_loss_type sapo, which has no clip range",
    ),
    Idle(
        ("actor.eps_clip",),
        lambda config: (
            config.actor.eps_clip_low_high is not None and config.actor.policy_loss_type != "sapo"
        ),
        "with --eps_clip_low_high",
    ),
    Idle(
        ("actor.sapo_tau",),
        lambda config: config.actor.policy_loss_type in ("ppo", "gspo", "cispo"),
        "without --policy_loss_type sapo",
    ),
    Idle(
        ("rollout.max_tokens_per_gpu",),
        lambda config: not config.train.dynamic_batch_enable,
        "without --use_dynamic_batch",
    ),
    Idle(
        ("rollout.micro_batch_size",),
        # sources of rewards take as many samples at once
        lambda config: config.train.dynamic_batch_enable and is_blank(config.reward.remote_url),
        "with --use_dynamic_batch",
    ),
    Idle(
        (
            "vllm.enable_prefix_caching",
            "vllm.enable_sleep",
            "vllm.enforce_eager",
            "vllm.gpu_memory_utilization",
            "vllm.sync_backend",
            "vllm.sync_with_ray",
            "vllm.tensor_parallel_size",
        ),
        has_no_engines,
        "with --vllm_num_engines 0",
    ),
    Idle(
        ("vllm.enable_sleep",),
        lambda config: not (has_no_engines(config) or config.train.colocate_all),
        "without --colocate_all_models",
    ),
    Idle(
        ("vllm.enable_sleep",),
        lambda config: config.train.colocate_all and config.train.async_enable,
        "with --async_train",
    ),
    Idle(("train.ema_beta",), lambda config: not config.train.enable_ema, "without --enable_ema"),
    Idle(
        (
            "algo.advantage.is_correction_type",
            "algo.advantage.is_correction_level",
            "algo.advantage.is_correction_mode",
            "algo.advantage.is_correction_gating",
            "algo.advantage.is_correction_threshold",
            "algo.advantage.is_correction_clamp_survivors",
        ),
        lambda config: not config.algo.advantage.is_corrected,
        "without --enable_vllm_is_correction",
    ),
    Idle(
        ("algo.dynamic_filtering_range", "algo.dynamic_filtering_max_empty"),
        lambda config: not config.algo.dynamic_filtering_enable,
        "without --dynamic_filtering",
    ),
    Idle(
        ("eval.temperature", "eval.n_samples_per_prompt", "ckpt.best_metric_key"),
        lambda config: is_blank(config.eval.dataset),
        "without --eval_dataset",
    ),
)
