"""From scored rollouts to experience: the forwards of reference, old policy and critic, then
advantages.

Follows the order of operations of the documentation: penalties, KL, shaping, clipping, token
rewards, advantages, normalisation. Forwards nobody needs are not made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from openrlhf.algorithms.advantages import estimator
from openrlhf.algorithms.kl import kl_per_token
from openrlhf.algorithms.reward_shaping import penalise_overlong, penalise_truncated
from openrlhf.algorithms.tokens import segment_sum
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import NumericsError
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.worker_group import Forward, run_forwards
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout


class RemoteExperienceMaker:
    """Runs the forwards on their groups and the maths here."""

    def __init__(self, config: PPOConfig, forwards: Mapping[str, Forward]) -> None:
        """`forwards` are those that are needed, by column: old_logprobs, values, ref_logprobs."""
        self.reward, self.kl = config.reward, config.algo.kl
        self.max_new_tokens = config.rollout.max_new_tokens
        advantage = config.algo.advantage
        self.estimator = estimator(
            advantage.estimator,
            gamma=advantage.gamma,
            lambd=advantage.lambd,
            no_std_norm=advantage.no_std_norm,
        )
        self.forwards = forwards
        self.in_turn = config.train.colocate_all

    def make_experience_batch(
        self, rollouts: Sequence[Rollout], kl_coef: float
    ) -> tuple[Experience, Metrics]:
        """Return experience with advantages and returns, and the metrics of the batch; raise
        NumericsError for numbers that are not finite.
        """
        experience = Experience.from_rollouts(rollouts)
        columns = run_forwards(self.forwards, experience, in_turn=self.in_turn)
        for name, column in columns.items():
            if not torch.isfinite(column).all():
                raise NumericsError(f"{name} of this batch are not finite")
        experience = replace(experience, **columns)
        kl_N = self._reward_kl(experience)
        advantages_N, returns_N = self.estimator.compute(
            self._shaped_rewards(experience),
            experience.group_ids,
            torch.zeros_like(experience.rollout_logprobs) if kl_N is None else kl_N,
            experience.values,
            experience.num_actions,
            kl_coef=kl_coef,
            clip_range=self.reward.clip_range,
            episode_ids_B=experience.episode_ids,
        )
        if not torch.isfinite(advantages_N).all():
            raise NumericsError("an advantage is not finite; check rewards, values and log-probs")
        experience = replace(experience, advantages=advantages_N, returns=returns_N)
        return experience, experience_metrics(experience, kl_N)

    def _shaped_rewards(self, experience: Experience) -> Tensor:
        """Return the rewards (B,) with the length penalties."""
        rewards_B, reward = experience.rewards, self.reward
        if reward.overlong_buffer_len is not None:
            rewards_B = penalise_overlong(
                rewards_B,
                experience.response_lengths,
                max_new_tokens=self.max_new_tokens,
                buffer_len=reward.overlong_buffer_len,
                penalty_factor=reward.overlong_penalty_factor,
            )
        if reward.stop_properly_penalty_coef is not None:
            rewards_B = penalise_truncated(
                rewards_B, experience.is_truncated, coef=reward.stop_properly_penalty_coef
            )
        return rewards_B

    def _reward_kl(self, experience: Experience) -> Tensor | None:
        """KL estimates (N,) for the token reward; None when KL is off or part of the loss."""
        if self.kl.use_loss or experience.ref_logprobs is None:
            return None
        assert experience.old_logprobs is not None
        return kl_per_token(
            experience.old_logprobs, experience.ref_logprobs, estimator=self.kl.estimator
        )


def experience_metrics(experience: Experience, kl_N: Tensor | None) -> Metrics:
    """Reward, length and KL of a batch under their logged names.

    The sequences of an agent's episode count once, their tokens together; `return`, `kl` and
    `values` are means over sequences and tokens.
    """
    metrics = Metrics()
    episodes = experience.episodes
    first = [members[0] for members in episodes]
    columns = {
        "reward": experience.rewards[first],
        "response_length": experience.response_lengths[first].float(),
        "total_length": torch.stack([experience.seq_lengths[m].sum() for m in episodes]).float(),
        "response_clip_ratio": experience.is_truncated[first].float(),
    }
    assert experience.returns is not None
    columns["return"] = segment_sum(experience.returns, experience.num_actions) / (
        experience.num_actions.clamp(min=1)
    )
    for name, column in columns.items():
        metrics.add(name, column.mean().item(), weight=len(column))
    stds = group_stds(experience.rewards[first], experience.group_ids[first])
    if len(stds) < len(episodes):  # one sample a prompt has no spread
        metrics.add("group_reward_std", stds.mean().item(), weight=len(stds))
    if kl_N is not None:
        metrics.add("kl", kl_N.mean().item(), weight=len(kl_N))
    if experience.values is not None:
        metrics.add("values", experience.values.mean().item(), weight=len(experience.values))
    return metrics


def group_stds(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Standard deviation of the rewards of each group, (P,); 0 for a group of one."""
    groups = [rewards_B[group_ids_B == group] for group in group_ids_B.unique()]
    return torch.stack([g.std() if len(g) > 1 else g.new_zeros(()) for g in groups])
