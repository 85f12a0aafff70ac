"""Experience of samples laid end to end, the forwards that it needs, and its optimizer steps: every
sample once an epoch, on exactly one rank, with global denominators.
"""

import pickle
import time
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.trainer.ppo_utils.experience import Experience, scatter_back
from openrlhf.trainer.ppo_utils.experience_maker import experience_metrics
from openrlhf.trainer.ppo_utils.update_plan import (
    num_updates_per_rollout,
    without_zero_advantages,
)
from tests.helpers.rollouts import rollout
from tests.helpers.updates import planned_shares

THREE = [rollout([1], [2, 3]), rollout([4, 5], [6], reward=2.0, group=1), rollout([7], [8, 9, 10])]


def test_rollouts_are_laid_end_to_end() -> None:
    experience = Experience.from_rollouts(THREE)
    assert experience.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert experience.num_actions.tolist() == [2, 1, 3]
    assert experience.packed().targets.tolist() == [2, 3, 6, 8, 9, 10]
    assert experience.packed().position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]


def test_select_takes_every_axis_along() -> None:
    experience = replace(Experience.from_rollouts(THREE), advantages=torch.arange(6.0))
    part = experience.select([2, 1])
    assert part.token_ids.tolist() == [7, 8, 9, 10, 4, 5, 6]
    assert part.advantages.tolist() == [3.0, 4.0, 5.0, 2.0]
    assert part.rewards.tolist() == [1.0, 2.0]


def test_scatter_back_undoes_a_partition() -> None:
    experience = Experience.from_rollouts(THREE)
    parts = [[2, 0], [1], []]
    columns = [experience.select(p).packed().targets.float() for p in parts]
    whole = scatter_back(columns, parts, experience.num_actions)
    assert whole.tolist() == [2, 3, 6, 8, 9, 10]


def test_the_spread_of_rewards_is_that_of_groups_and_absent_where_there_are_none() -> None:
    several = replace(Experience.from_rollouts(THREE), returns=torch.zeros(6))
    alone = several.select([0, 1])
    assert experience_metrics(several, None).values()["group_reward_std"] == 0.0
    assert "group_reward_std" not in experience_metrics(alone, None).values()


def numbered(count: int) -> Experience:
    """Samples whose first token is their number, with 1 to 5 actions."""
    return Experience.from_rollouts(
        [rollout([i], [0] * (1 + i % 5), group=i) for i in range(count)]
    )


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 25),
    num_ranks=st.integers(1, 4),
    batch_size=st.integers(1, 30),
    epochs=st.integers(1, 2),
)
def test_every_sample_is_trained_once_an_epoch_on_one_rank(
    count: int, num_ranks: int, batch_size: int, epochs: int
) -> None:
    plan = planned_shares(
        numbered(count), num_ranks, train_batch_size=batch_size, max_epochs=epochs, seed=1
    )
    num_steps = num_updates_per_rollout(count, batch_size, epochs)
    assert [len(steps) for steps in plan] == [num_steps] * num_ranks
    seen: list[int] = []
    for k in range(num_steps):
        shares = [plan[rank][k] for rank in range(num_ranks)]
        seen += [g for share in shares for g in share.experience.group_ids.tolist()]
        tokens = sum(int(share.experience.num_actions.sum()) for share in shares)
        assert {share.num_tokens for share in shares} == {tokens}
        assert {share.num_samples for share in shares} == {sum(len(s.experience) for s in shares)}
    assert sorted(seen) == sorted(list(range(count)) * epochs)


def test_idle_samples_leave_but_stay_in_the_denominators() -> None:
    experience = replace(
        Experience.from_rollouts(THREE), advantages=torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, -1.0])
    )
    [[step]] = planned_shares(experience, 1, train_batch_size=3, max_epochs=1, seed=0)
    busy = without_zero_advantages(step)
    assert len(busy.experience) == 2
    assert (busy.num_tokens, busy.num_samples) == (6, 3)


def test_a_sample_of_several_epochs_is_sent_to_a_rank_once() -> None:
    shares = planned_shares(numbered(6), 2, train_batch_size=3, max_epochs=4, seed=0)
    for share in shares:
        ids = share.experience.group_ids.tolist()
        assert len(ids) == len(set(ids)) and len(share) == 8
        assert set(ids) == {g for one in share for g in one.experience.group_ids.tolist()}


def test_a_share_is_pickled_as_its_own_samples_alone() -> None:
    whole = numbered(400)
    [first, *_] = planned_shares(whole, 100, train_batch_size=400, max_epochs=1, seed=0)
    sent = pickle.dumps(first)
    assert len(sent) < len(pickle.dumps(whole)) / 4
    [step] = pickle.loads(sent)
    assert sorted(step.experience.group_ids.tolist()) == first.experience.group_ids.tolist()


def test_the_time_for_all_shares_does_not_grow_with_the_ranks() -> None:
    whole = numbered(4000)

    def seconds(num_ranks: int) -> float:
        start = time.perf_counter()
        planned_shares(whole, num_ranks, train_batch_size=1000, max_epochs=1, seed=0)
        return time.perf_counter() - start

    few, many = (min(seconds(n) for _ in range(5)) for n in (4, 64))
    assert many < 4 * few  # sixteen times as long if each share walked through the whole batch
