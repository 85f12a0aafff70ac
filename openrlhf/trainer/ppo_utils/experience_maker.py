"""From scored rollouts to experience: the forwards of reference, old policy and critic, then
advantages.

Follows the order of operations in docs/algorithms.md. Forwards nobody needs are not made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from openrlhf.algorithms.advantages import (
    ESTIMATORS,
    AdvantageEstimator,
    estimator,
    group_stds,
    penalise_overlong,
    penalise_truncated,
)
from openrlhf.algorithms.kl import kl_per_token
from openrlhf.algorithms.tokens import all_finite
from openrlhf.config.ppo import AdvantageConfig, PPOConfig
from openrlhf.errors import NumericsError
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.worker_group import Forward, run_forwards
from openrlhf.utils.console import warn_once
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.own_functions import ESTIMATOR, find_function
from openrlhf.utils.rollout import Rollout


def make_experience(
    config: PPOConfig,
    forwards: Mapping[str, Forward],
    rollouts: Sequence[Rollout],
    kl_coef: float,
) -> tuple[Experience, Metrics]:
    """Return experience with advantages and returns, and the metrics of the batch; raise
    NumericsError for numbers that are not finite.

    `forwards` are those that are needed, by column: old_logprobs, values, ref_logprobs.
    """
    experience = Experience.from_rollouts(rollouts)
    in_turn = any(config.colocated_groups())  # two at once would not fit, and wait for each other
    columns = run_forwards(forwards, experience, in_turn=in_turn)
    for name, column in columns.items():
        if not all_finite(column):
            raise NumericsError(f"{name} of this batch are not finite")
    experience = replace(experience, **columns)
    kl_N = reward_kl(config, experience)
    found = estimator_of(config.algo.advantage).compute(
        penalised_rewards(config, experience),
        experience.group_ids,
        kl_N,
        experience.values,
        experience.num_actions,
        kl_coef=kl_coef,
        clip_range=config.reward.clip_range,
        episode_ids_B=experience.episode_ids,
    )
    if not all_finite(found.advantages_N):
        raise NumericsError("an advantage is not finite; check rewards, values and log-probs")
    experience = replace(experience, advantages=found.advantages_N, returns=found.returns_N)
    metrics = experience_metrics(experience, kl_N)
    metrics.add("kl_coef", kl_coef)
    if found.is_clipped_B.any():
        low, high = config.reward.clip_range
        warn_once(
            f"--reward_clip_range {low:g} {high:g} cuts shaped rewards (reward_clip_ratio is their "
            "share). Scale the rewards, or type a wider range."
        )
    metrics.add("reward_clip_ratio", found.is_clipped_B.float().mean(), weight=len(rollouts))
    return experience, metrics


@dataclass(frozen=True)
class RemoteExperienceMaker:
    """A run's settings and workers, by which rollouts become experience: OpenRLHF's name for it.

    Example: `RemoteExperienceMaker(config, {"ref_logprobs": forward, "values": forward})`
    """

    config: PPOConfig
    forwards: Mapping[str, Forward]

    def make_experience_batch(
        self, rollouts: Sequence[Rollout], kl_coef: float
    ) -> tuple[Experience, Metrics]:
        """Return experience and metrics as `make_experience` does."""
        return make_experience(self.config, self.forwards, rollouts, kl_coef)


def estimator_of(config: AdvantageConfig) -> AdvantageEstimator:
    """Return the estimator that the config names, or one that shapes rewards by the user's
    function.
    """
    name, no_std_norm = config.estimator, config.no_std_norm
    if name not in ESTIMATORS:
        return AdvantageEstimator(find_function(ESTIMATOR, name))
    return estimator(name, gamma=config.gamma, lambd=config.lambd, no_std_norm=no_std_norm)


def penalised_rewards(config: PPOConfig, experience: Experience) -> Tensor:
    """Return the rewards (B,) with the length penalties. An agent's episode is held against the
    room that prompt, turns and feedback share.
    """
    rewards_B, reward = experience.rewards, config.reward
    if reward.overlong_buffer_len is not None:
        is_agent = config.train.agent_func_path is not None
        rewards_B = penalise_overlong(
            rewards_B,
            experience.context_lengths if is_agent else experience.response_lengths,
            max_tokens=config.max_penalised_len,
            buffer_len=reward.overlong_buffer_len,
            penalty_factor=reward.overlong_penalty_factor,
        )
    if (coef := reward.stop_properly_penalty_coef) is not None:
        if 0 <= coef < 1 and (rewards_B[experience.is_truncated] < 0).any():
            warn_once(
                f"--stop_properly_penalty_coef {coef:g} raises the rewards of truncated samples "
                "that are below 0. Type a number below 0, which replaces their rewards."
            )
        rewards_B = penalise_truncated(rewards_B, experience.is_truncated, coef=coef)
    return rewards_B


def reward_kl(config: PPOConfig, experience: Experience) -> Tensor | None:
    """Return KL estimates (N,) for the token reward; None if KL is off or part of the loss."""
    old_N, ref_N, kl = experience.old_logprobs, experience.ref_logprobs, config.algo.kl
    if kl.use_loss or old_N is None or ref_N is None:
        return None
    return kl_per_token(old_N, ref_N, estimator=kl.estimator)


def experience_metrics(experience: Experience, kl_N: Tensor | None) -> Metrics:
    """Return reward, length and KL of a batch under their logged names.

    The sequences of an agent's episode count once, their tokens together; `return`, `kl` and
    `values` are means over sequences and tokens.
    """
    metrics = Metrics()
    _, first = experience.episode_of
    columns: dict[str, Tensor | None] = {
        "reward": experience.rewards[first],
        "response_length": experience.response_lengths[first].float(),
        "total_length": experience.per_episode(experience.seq_lengths).float(),
        "response_clip_ratio": experience.is_truncated[first].float(),
    }
    assert experience.returns is not None
    columns["return"] = experience.sample_means(experience.returns)
    columns |= {"kl": kl_N, "values": experience.values}
    for name, column in columns.items():
        if column is not None:
            metrics.add(name, column.mean().item(), weight=len(column))
    stds = group_stds(experience.rewards[first], experience.group_ids[first])
    if len(stds) < len(first):  # one sample a prompt has no spread
        metrics.add("group_reward_std", stds.mean().item(), weight=len(stds))
    return metrics
