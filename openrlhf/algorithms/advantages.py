"""From one reward per sample to one advantage and one return per action token.

The order is fixed: shape within the group, clip, spread over the tokens with the KL term,
accumulate, normalise. Shapes: B samples, N action tokens of all of them end to end, A actions of
the longest one. Tokens of the environment are not in N, so they neither discount nor carry value.
Failed samples must have been left out before: they have no part in a baseline.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.tokens import last_action_index, pad_flat, unpad


def penalise_overlong(
    rewards_B: Tensor,
    lengths_B: Tensor,
    *,
    max_tokens: int,
    buffer_len: float,
    penalty_factor: float = 1.0,
) -> Tensor:
    """Take off up to `penalty_factor`, linearly over the last `buffer_len` tokens allowed, (B,).

    e = min(length - (max_tokens - buffer_len), buffer_len); where e > 0,
    r - e / buffer_len * penalty_factor (DAPO, arXiv 2503.14476).
    """
    assert rewards_B.shape == lengths_B.shape, "one length per reward is needed"
    excess_B = lengths_B - (max_tokens - buffer_len)
    return rewards_B - excess_B.clamp(0, buffer_len) / buffer_len * penalty_factor


def penalise_truncated(rewards_B: Tensor, is_truncated_B: Tensor, *, coef: float) -> Tensor:
    """Return rewards, (B,), where those of truncated samples are multiplied by `coef` in [0, 1], or
    replaced by a negative `coef`.
    """
    assert rewards_B.shape == is_truncated_B.shape, "one flag per reward is needed"
    penalised_B = rewards_B * coef if coef >= 0 else torch.full_like(rewards_B, coef)
    return torch.where(is_truncated_B.bool(), penalised_B, rewards_B)


STD_EPSILON = 1e-9
MIN_VARIANCE = 1e-8


def unshaped(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Return rewards as they are, (B,)."""
    return rewards_B


def batch_centred(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Return r_i - mean of all rewards of the rollout batch, whatever their prompts, (B,)."""
    return (rewards_B - rewards_B.double().mean()).to(rewards_B.dtype)


def rloo(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Return r_i - mean of the others of its group (arXiv 2402.14740); 0 in a group of one,
    (B,).
    """
    owner_B, size_G = _groups(rewards_B, group_ids_B)
    mean_B, size_B = _means(rewards_B, owner_B, size_G)[owner_B], size_G[owner_B]
    # r - (n mean - r) / (n - 1) = (r - mean) n / (n - 1)
    return ((rewards_B - mean_B) * size_B / (size_B - 1).clamp(min=1)).to(rewards_B.dtype)


def group_centred(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Return r_i - mean of its group (Dr. GRPO, arXiv 2503.20783); 0 in a group of one, (B,)."""
    owner_B, size_G = _groups(rewards_B, group_ids_B)
    return (rewards_B - _means(rewards_B, owner_B, size_G)[owner_B]).to(rewards_B.dtype)


def group_standardised(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Return (r_i - mean) / (std + 1e-9) in the group, std with n - 1 (GRPO, arXiv 2402.03300),
    (B,).
    """
    owner_B, size_G = _groups(rewards_B, group_ids_B)
    centred_B = rewards_B - _means(rewards_B, owner_B, size_G)[owner_B]
    std_B = group_stds(rewards_B, group_ids_B)[owner_B]
    return (centred_B / (std_B + STD_EPSILON)).to(rewards_B.dtype)


def group_stds(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Return the standard deviation of the rewards of each group, with n - 1, (G,) in float64; 0
    for a group of one. Groups are in the order of their ids.
    """
    owner_B, size_G = _groups(rewards_B, group_ids_B)
    squares_B = (rewards_B - _means(rewards_B, owner_B, size_G)[owner_B]).square()
    return (_means(squares_B, owner_B, size_G) * size_G / (size_G - 1).clamp(min=1)).sqrt()


def _groups(rewards_B: Tensor, group_ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of each sample's group, (B,), and the size of each group, (G,)."""
    assert rewards_B.shape == group_ids_B.shape, "one group id per reward is needed"
    _, owner_B, size_G = group_ids_B.unique(return_inverse=True, return_counts=True)
    return owner_B, size_G


def _means(values_B: Tensor, owner_B: Tensor, size_G: Tensor) -> Tensor:
    """Return the mean of each group, (G,).

    It is float64, so that equal rewards differ from it by exactly 0: their std is 0 as well, and a
    rounding error divided by 1e-9 would be an advantage.
    """
    sum_G = torch.zeros(len(size_G), dtype=torch.float64, device=values_B.device)
    return sum_G.index_add_(0, owner_B, values_B.double()) / size_G


def shape_episodes(
    shape: Callable[[Tensor, Tensor], Tensor],
    rewards_B: Tensor,
    group_ids_B: Tensor,
    episode_ids_B: Tensor | None,
) -> Tensor:
    """Return shaped rewards where samples with the same id are parts of one episode, (B,).

    The parts have the same reward; their episode is compared once and all get its result.
    """
    if episode_ids_B is None:
        return shape(rewards_B, group_ids_B)
    ids_E, owner_B = episode_ids_B.unique(return_inverse=True)
    position_B = torch.arange(len(owner_B), device=owner_B.device)
    first_E = torch.zeros_like(ids_E).scatter_reduce(
        0, owner_B, position_B, "amin", include_self=False
    )
    return shape(rewards_B[first_E], group_ids_B[first_E])[owner_B]


def token_rewards(
    rewards_B: Tensor, kl_N: Tensor, num_actions_B: Tensor, *, kl_coef: float
) -> Tensor:
    """Return -kl_coef * kl on every action token, plus the sample's reward on its last one,
    (N,).
    """
    assert len(kl_N) == int(num_actions_B.sum()), "one KL per action token is needed"
    rewards_N = -kl_coef * kl_N
    last = last_action_index(num_actions_B)
    return rewards_N.index_add(0, last, rewards_B[num_actions_B > 0].to(rewards_N.dtype))


def discounted_sums(rewards_BA: Tensor, discount: float) -> Tensor:
    """Return S_t = r_t + discount * S_{t+1} along the last dimension, (B, A)."""
    if discount == 1:
        return rewards_BA.flip(-1).cumsum(-1).flip(-1)
    sums_BA = torch.empty_like(rewards_BA)
    running_B = rewards_BA.new_zeros(len(rewards_BA))
    for step in reversed(range(rewards_BA.size(-1))):
        running_B = rewards_BA[:, step] + discount * running_B
        sums_BA[:, step] = running_B
    return sums_BA


def gae(
    rewards_BA: Tensor, values_BA: Tensor, *, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, (B, A) each, by generalised advantage estimation on
    zero-padded blocks.

    delta_t = r_t + gamma V_{t+1} - V_t with V = 0 past the end,
    A_t = delta_t + gamma lambd A_{t+1}, R_t = A_t + V_t (arXiv 1506.02438).
    """
    assert rewards_BA.shape == values_BA.shape, "one value per reward is needed"
    next_values_BA = torch.nn.functional.pad(values_BA[:, 1:], (0, 1))[:, : values_BA.size(-1)]
    deltas_BA = rewards_BA + gamma * next_values_BA - values_BA
    advantages_BA = discounted_sums(deltas_BA, gamma * lambd)
    return advantages_BA, advantages_BA + values_BA


def normalise(values_N: Tensor, *, subtract_only: bool = False) -> Tensor:
    """Return (x - mean) / std in float64: population std, variance at least 1e-8, (N,)."""
    if not len(values_N):
        return values_N
    centred_N = values_N.double() - values_N.double().mean()
    if not subtract_only:
        centred_N = centred_N / centred_N.square().mean().clamp(min=MIN_VARIANCE).sqrt()
    return centred_N.to(values_N.dtype)


class Advantages(NamedTuple):
    """Advantages and returns of the action tokens of a rollout batch, and whose rewards were cut.

    Example: two samples of two actions and one, the second with a reward above the range:
    `Advantages(tensor([1., 1., 10.]), tensor([1., 1., 10.]), tensor([False, True]))`
    """

    advantages_N: Tensor
    returns_N: Tensor
    is_clipped_B: Tensor  # the shaped rewards, of samples that have actions


@dataclass(frozen=True)
class AdvantageEstimator:
    """Description of an advantage estimator; made by `estimator`.

    Example: `AdvantageEstimator(group_standardised, plain_shape=group_centred)` is "group_norm".
    """

    shape: Callable[[Tensor, Tensor], Tensor]  # (rewards_B, group_ids_B) -> (B,)
    plain_shape: Callable[[Tensor, Tensor], Tensor] | None = None  # without a standard deviation
    needs_critic: bool = False
    is_normalised: bool = False  # over all action tokens of the rollout batch
    gamma: float = 1.0
    lambd: float = 1.0
    no_std_norm: bool = False

    def compute(
        self,
        rewards_B: Tensor,
        group_ids_B: Tensor,
        kl_N: Tensor | None,
        values_N: Tensor | None,
        num_actions_B: Tensor,
        *,
        kl_coef: float,
        clip_range: tuple[float, float],
        episode_ids_B: Tensor | None = None,
    ) -> Advantages:
        """Return the advantages of a whole rollout batch, in fp32.

        `kl_N` is None where the reward holds no KL term. `values_N` is needed by, and only by, gae.
        Samples without actions have no part in the baseline of their group; parts of an episode,
        which share a reward, count in it once.
        """
        assert self.needs_critic == (values_N is not None), "values come from a critic"
        has_actions_B = num_actions_B > 0
        num_actions_B = num_actions_B[has_actions_B]
        episode_ids_B = None if episode_ids_B is None else episode_ids_B[has_actions_B]
        unclipped_B = shape_episodes(
            self.shape,
            rewards_B[has_actions_B].float(),
            group_ids_B[has_actions_B],
            episode_ids_B,
        )
        shaped_B = unclipped_B.clamp(*clip_range)
        if kl_N is None and values_N is None and self.gamma == 1:
            # The return of every token is the reward at the end; torch's own takes 9 times as long.
            returns = np.repeat(shaped_B.numpy(), num_actions_B.numpy())
            advantages_N = returns_N = torch.from_numpy(returns)
        else:
            kl_N = shaped_B.new_zeros(int(num_actions_B.sum())) if kl_N is None else kl_N.float()
            rewards_N = token_rewards(shaped_B, kl_N, num_actions_B, kl_coef=kl_coef)
            advantages_N, returns_N = self._accumulate(rewards_N, values_N, num_actions_B)
        if self.is_normalised:
            advantages_N = normalise(advantages_N, subtract_only=self.no_std_norm)
        return Advantages(advantages_N, returns_N, shaped_B != unclipped_B)

    def _accumulate(
        self, rewards_N: Tensor, values_N: Tensor | None, num_actions_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        rewards_BA = pad_flat(rewards_N, num_actions_B)
        if values_N is None:
            returns_N = unpad(discounted_sums(rewards_BA, self.gamma), num_actions_B)
            return returns_N, returns_N
        values_BA = pad_flat(values_N.float(), num_actions_B)
        advantages_BA, returns_BA = gae(rewards_BA, values_BA, gamma=self.gamma, lambd=self.lambd)
        return unpad(advantages_BA, num_actions_B), unpad(returns_BA, num_actions_B)


ESTIMATORS = {
    "gae": AdvantageEstimator(unshaped, needs_critic=True, is_normalised=True),
    "reinforce": AdvantageEstimator(unshaped, is_normalised=True),
    "flash_reinforce": AdvantageEstimator(batch_centred),
    "rloo": AdvantageEstimator(rloo),
    "reinforce_baseline": AdvantageEstimator(group_centred, is_normalised=True),
    "group_norm": AdvantageEstimator(group_standardised, plain_shape=group_centred),
    "dr_grpo": AdvantageEstimator(group_centred),
}


def estimator(
    name: str, *, gamma: float = 1.0, lambd: float = 1.0, no_std_norm: bool = False
) -> AdvantageEstimator:
    """Return the named estimator; with `no_std_norm` it divides by no std, neither group's nor
    batch's.
    """
    found = ESTIMATORS[name]
    return replace(
        found,
        shape=(no_std_norm and found.plain_shape) or found.shape,
        gamma=gamma,
        lambd=lambd,
        no_std_norm=no_std_norm,
    )
