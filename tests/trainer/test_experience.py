"""Experience keeps its three axes in step, and partitions can be undone."""

from __future__ import annotations

import pytest
import torch

from openrlhf.trainer.ppo_utils.experience import Experience, scatter_back
from openrlhf.trainer.ppo_utils.experience_maker import experience_metrics
from openrlhf.utils.rollout import Rollout, sequence_tensors


def rollout(
    prompt: list[int], response: list[int], *, reward: float = 1.0, group: int = 0
) -> Rollout:
    token_ids, action_mask = sequence_tensors(prompt, response)
    return Rollout(
        sample_id=f"{group}/{prompt}",
        group_id=group,
        row_id=group,
        token_ids=token_ids,
        action_mask=action_mask,
        logprobs=torch.full((len(response),), -1.0),
        weight_versions=torch.zeros(len(response), dtype=torch.int32),
        finish_reason="stop",
        prompt_text="p",
        response_text="r",
        reward=reward,
    )


THREE = [rollout([1], [2, 3]), rollout([4, 5], [6], reward=2.0, group=1), rollout([7], [8, 9, 10])]


def test_rollouts_are_laid_end_to_end() -> None:
    experience = Experience.from_rollouts(THREE)
    assert experience.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert experience.num_actions.tolist() == [2, 1, 3]
    assert experience.packed().targets.tolist() == [2, 3, 6, 8, 9, 10]
    assert experience.packed().position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]


def test_select_takes_every_axis_along() -> None:
    experience = Experience.from_rollouts(THREE).with_columns(advantages=torch.arange(6.0))
    part = experience.select([2, 1])
    assert part.token_ids.tolist() == [7, 8, 9, 10, 4, 5, 6]
    assert part.advantages.tolist() == [3.0, 4.0, 5.0, 2.0]
    assert part.rewards.tolist() == [1.0, 2.0]


def test_an_empty_selection_is_an_empty_batch() -> None:
    part = Experience.from_rollouts(THREE).select([])
    assert len(part) == 0
    assert len(part.token_ids) == 0


def test_a_column_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(AssertionError, match="advantages"):
        Experience.from_rollouts(THREE).with_columns(advantages=torch.zeros(5))


def test_an_unscored_sample_is_refused() -> None:
    with pytest.raises(AssertionError, match="non-finite"):
        Experience.from_rollouts([rollout([1], [2], reward=float("nan"))])


def test_scatter_back_undoes_a_partition() -> None:
    experience = Experience.from_rollouts(THREE)
    parts = [[2, 0], [1], []]
    columns = [experience.select(p).packed().targets.float() for p in parts]
    whole = scatter_back(columns, parts, experience.num_actions)
    assert whole.tolist() == [2, 3, 6, 8, 9, 10]


def test_the_spread_of_rewards_is_that_of_groups_and_absent_where_there_are_none() -> None:
    several = Experience.from_rollouts(THREE).with_columns(returns=torch.zeros(6))
    alone = several.select([0, 1])
    assert experience_metrics(several, None).values()["group_reward_std"] == 0.0
    assert "group_reward_std" not in experience_metrics(alone, None).values()
