"""The lines of an RL run before its first step: models and their places, rewards, batch arithmetic.

Pure functions from the config and what was placed to sections of a banner; prints nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from openrlhf.config.ppo import PPOConfig
from openrlhf.trainer.ppo_setup import Schedule
from openrlhf.trainer.ray.placement import RoleCounts, reward_roles
from openrlhf.utils.logging import format_count


def banner_sections(
    config: PPOConfig,
    schedule: Schedule,
    counts: RoleCounts,
    *,
    sizes: Mapping[str, int],
    num_prompts: int,
    dtype: str,
) -> dict[str, Mapping[str, object]]:
    """Return the banner; `sizes` are parameter counts by role, `num_prompts` of one episode."""
    cluster, train = counts.cluster, config.train
    devices = "this process"
    if cluster is not None:
        on_cpu = f"CPU ranks on {cluster.num_cpus} core(s)"
        devices = f"{cluster.num_gpus} GPU(s)" if cluster.has_gpus else on_cpu
    num_drawn = min(config.rollout.batch_size, num_prompts)
    num_samples = num_drawn * config.rollout.n_samples_per_prompt
    run = {
        "estimator": config.algo.advantage.estimator,
        "reward": reward_words(config),
        "devices": devices,
        "dtype": dtype,
        "batch": f"{num_drawn} prompts x {config.rollout.n_samples_per_prompt} samples = "
        f"{num_samples}; {schedule.updates_per_rollout} update(s) of "
        f"{min(train.batch_size, num_samples)} samples a step",
        "steps": f"{schedule.num_steps} ({num_prompts} prompts x {train.num_episodes} episode(s))",
        "folder": os.fspath(Path(config.ckpt.output_dir)),
    }
    if train.async_enable:
        num_at_once = config.rollout.vllm_generate_batch_size or config.rollout.batch_size
        run["queue"] = (
            f"samples at most {train.async_queue_size} update(s) behind, {num_at_once} prompts "
            f"at once, weights change {'under' if train.partial_rollout_enable else 'between'} "
            "samples"
        )
    return {"models": model_entries(config, counts, sizes), "run": run}


def model_entries(
    config: PPOConfig, counts: RoleCounts, sizes: Mapping[str, int]
) -> dict[str, object]:
    """Return one line a role: its model, size, ranks and place; then what generates."""
    policy = config.policy_path
    paths = {"actor": policy, "ref": policy, "critic": config.critic_source, **reward_roles(config)}
    entries: dict[str, object] = {
        role: f"{paths[role]}: {format_count(size)} parameters, {counts.ranks[role]} rank(s)"
        f"{place_words(counts, role)}"
        for role, size in sizes.items()
    }
    entries["generation"] = "the actor itself"
    if counts.num_engines:
        width = config.vllm.tensor_parallel_size
        each = f" of {width} devices each" if width > 1 else ""
        entries["generation"] = f"{counts.num_engines} x vLLM{each}{place_words(counts, 'vllm')}"
    return entries


def place_words(counts: RoleCounts, role: str) -> str:
    """Return the roles that share the devices of a role; nothing without Ray."""
    if counts.cluster is None:
        return ""
    pools = {demand.role: demand.pool for demand in counts.demands}
    others = [name for name, pool in pools.items() if pool == pools[role] and name != role]
    return f", colocated with {', '.join(others)}" if others else ", in a place of its own"


def reward_words(config: PPOConfig) -> str:
    """Return the source of rewards."""
    reward = config.reward
    if config.train.agent_func_path:
        return f"agents of {config.train.agent_func_path}"
    if reward.remote_url:
        return reward.remote_url
    weights = f", weights {' '.join(f'{w:g}' for w in reward.weights)}" if reward.weights else ""
    return f"the model(s) {', '.join(reward_roles(config))}{weights}"
