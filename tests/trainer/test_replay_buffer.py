"""Planning of optimizer steps: every sample once an epoch, on exactly one rank, with global
denominators.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.replay_buffer import (
    MicroBatchPlan,
    num_updates_per_rollout,
    plan_updates,
    without_idle_samples,
)
from tests.trainer.test_experience import THREE, rollout


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
    plan = plan_updates(
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
    experience = Experience.from_rollouts(THREE).with_columns(
        advantages=torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, -1.0])
    )
    [[step]] = plan_updates(experience, 1, train_batch_size=3, max_epochs=1, seed=0)
    busy = without_idle_samples(step)
    assert len(busy.experience) == 2
    assert (busy.num_tokens, busy.num_samples) == (6, 3)


def test_micro_batches_by_budget_and_by_count() -> None:
    lengths = [3, 9, 2, 4]
    assert MicroBatchPlan(3).cut(lengths) == [[0, 1, 2], [3]]
    by_budget = MicroBatchPlan(3, max_tokens=9).cut(lengths)
    assert sorted(i for part in by_budget for i in part) == [0, 1, 2, 3]
    assert all(sum(lengths[i] for i in part) <= 9 for part in by_budget)
    assert len(by_budget) == 2
