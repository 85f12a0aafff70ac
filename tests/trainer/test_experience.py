"""Experience of samples laid end to end, the forwards that it needs, and its optimizer steps: every
sample once an epoch, on exactly one rank, with global denominators.
"""

import pickle
import time
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.config.ppo import PPOConfig
from openrlhf.trainer.ppo_utils.experience import Experience, opened
from openrlhf.trainer.ppo_utils.experience_maker import experience_metrics
from openrlhf.trainer.ppo_utils.samples import Samples
from openrlhf.trainer.ppo_utils.update_plan import (
    num_updates_per_rollout,
    plan_updates,
)
from openrlhf.trainer.ppo_utils.worker_group import WorkerGroup, start_forward
from openrlhf.trainer.workers.model_worker import ModelWorker
from openrlhf.utils.images import Picture
from tests.helpers.rollouts import rollout
from tests.helpers.updates import planned_shares

THREE = [rollout([1], [2, 3]), rollout([4, 5], [6], reward=2.0, group=1), rollout([7], [8, 9, 10])]


def test_the_spread_of_rewards_is_that_of_groups_and_absent_where_there_are_none() -> None:
    several = replace(Experience.from_rollouts(THREE), returns=torch.zeros(6))
    alone = several.select([0, 1])
    assert experience_metrics(several, None).values()["group_reward_std"] == 0.0
    assert "group_reward_std" not in experience_metrics(alone, None).values()


def test_the_mean_of_each_sample_is_over_its_own_tokens_and_0_without_any() -> None:
    samples = [rollout([1], [0] * size) for size in (0, 2, 0, 3, 0)]
    means = Experience.from_rollouts(samples).sample_means(torch.tensor([1.0, 2, 6, 7, 8]))
    assert means.tolist() == [0, 1.5, 0, 7, 0] and means.dtype == torch.float32
    assert Experience.from_rollouts(samples[:1]).sample_means(torch.zeros(0)).tolist() == [0]


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
        seen += [g for share in shares for g in share.samples.group_ids.tolist()]
        tokens = sum(int(share.samples.num_actions.sum()) for share in shares)
        assert {share.num_tokens for share in shares} == {tokens}
        assert {share.num_samples for share in shares} == {sum(len(s.samples) for s in shares)}
    assert sorted(seen) == sorted(list(range(count)) * epochs)


def test_the_parts_of_an_episode_stay_together_wherever_they_stand() -> None:
    parts = [replace(rollout([0], [0]), episode_id=name) for name in "a1ba2ba"]
    experience = Experience.from_rollouts(parts)
    assert experience.num_episodes == 4
    assert experience.samples_of([2, 0, 1]).tolist() == [2, 5, 0, 3, 6, 1]
    plan = plan_updates(experience, 1, train_batch_size=2, max_epochs=1, seed=0)
    steps = [set(step.members[0]) for step in plan]
    assert len(steps) == 2 and set.union(*steps) == set(range(7))
    assert all(whole <= step or not whole & step for step in steps for whole in ({0, 3, 6}, {2, 5}))


def test_a_sample_of_several_epochs_is_sent_to_a_rank_once() -> None:
    shares = planned_shares(numbered(6), 2, train_batch_size=3, max_epochs=4, seed=0)
    for share in shares:
        ids = share.samples.group_ids.tolist()
        assert len(ids) == len(set(ids)) and len(share) == 8
        assert set(ids) == {g for one in share for g in one.samples.group_ids.tolist()}


def test_a_share_is_pickled_as_its_own_samples_alone() -> None:
    whole = numbered(400)
    [first, *_] = planned_shares(whole, 100, train_batch_size=400, max_epochs=1, seed=0)
    sent = pickle.dumps(first)
    [everything] = whole.cut([range(len(whole))])
    assert len(sent) < len(pickle.dumps(everything)) / 4
    [step] = pickle.loads(sent)
    assert sorted(step.samples.group_ids.tolist()) == first.samples.group_ids.tolist()


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.lists(st.integers(0, 29), max_size=9), max_size=12))
def test_cut_gives_what_select_gives_of_each_part(parts: list[list[int]]) -> None:
    whole = Experience.from_rollouts(
        [rollout([k], [0] * (k % 4), images=(BIG,) * (k % 2)) for k in range(30)]
    )
    whole = replace(whole, values=torch.arange(float(whole.num_actions.sum())))
    shares = list(whole.cut(parts))
    assert len(shares) == len(parts)
    for share, part in zip(shares, parts, strict=True):
        own, arrays = whole.select(part), list[pickle.PickleBuffer]()
        sent = pickle.dumps(share, protocol=5, buffer_callback=arrays.append)
        assert len(arrays) == 1  # each is a call of Ray's
        for seen in map(opened, (share, pickle.loads(sent, buffers=arrays))):
            assert seen.images == own.images
            for name in Samples.axes():
                column, expected = getattr(seen, name), getattr(own, name)
                assert (column is None) == (expected is None), name
                assert column is None or torch.equal(column, expected), name
                assert column is None or column.dtype == expected.dtype, name


def test_a_share_has_the_columns_that_its_rank_reads_and_no_others() -> None:
    whole = replace(numbered(9), values=torch.ones(25), advantages=torch.zeros(25))
    [of_critic] = whole.with_columns(["values"]).cut([[4, 2]])
    always = {"seq_lengths", "num_actions", "costs", "group_ids", "sample_indices"}
    samples = opened(of_critic)
    assert {*samples._columns} == always | {"values", "token_ids", "action_mask"}
    assert samples.group_ids.tolist() == [4, 2]


def test_the_time_for_all_shares_does_not_grow_with_the_ranks() -> None:
    whole = numbered(4000)

    def seconds(num_ranks: int) -> float:
        start = time.perf_counter()
        planned_shares(whole, num_ranks, train_batch_size=1000, max_epochs=1, seed=0)
        return time.perf_counter() - start

    few, many = (min(seconds(n) for _ in range(5)) for n in (4, 64))
    assert many < 4 * few  # sixteen times as long if each share walked through the whole batch


BIG, SMALL = (Picture(bytes([k]) * 100_000, f"sha{k}", 28, 28) for k in range(2))


def test_images_stay_with_their_samples_and_a_prompt_s_samples_carry_them_once() -> None:
    samples = [
        rollout([k], [1], group=k % 3, images=((BIG,), (), (SMALL, BIG))[k % 3]) for k in range(6)
    ]
    whole = Experience.from_rollouts(samples)
    assert whole.select([2, 1, 0]).images == ((SMALL, BIG), (), (BIG,))
    assert whole.with_columns(()).images == whole.images
    assert whole.stand_in().images == ()
    assert Experience.from_rollouts(THREE).images == ()
    sent = pickle.dumps(list(whole.cut([range(6)])))
    assert 200_000 < len(sent) < 210_000
    assert pickle.loads(sent)[0].images == whole.images
    for share in planned_shares(whole, 2, train_batch_size=3, max_epochs=2, seed=0):
        for step in share:
            numbers = step.samples.group_ids.tolist()
            assert step.samples.images == tuple(samples[k].images for k in numbers)


def test_tokens_of_images_cost_twice() -> None:
    """Placeholders are tokens 8: two of the first sample, none of the second."""
    seen = replace(rollout([3, 8, 8], [1], images=(BIG,)), num_image_tokens=2)
    experience = Experience.from_rollouts([seen, rollout([3, 4], [1, 2, 3])])
    assert experience.costs.tolist() == [6, 5]


def test_shares_of_ranks_are_balanced_by_what_images_cost() -> None:
    """Samples of 9 tokens: the tower has work with one of them, which is as much as both others."""
    seen = replace(rollout([8] * 8, [1], images=(BIG,)), num_image_tokens=8)
    experience = Experience.from_rollouts([seen] + [rollout([3] * 8, [1])] * 2)
    [step] = plan_updates(experience, 2, train_batch_size=3, max_epochs=1, seed=0)
    assert sorted(map(sorted, step.members)) == [[0], [1, 2]]


class LengthsWorker(ModelWorker):
    """A model whose forward returns a number for each sampled token."""

    def forward(self, samples: Samples) -> torch.Tensor:
        return samples.group_ids.repeat_interleave(samples.num_actions).float()


def test_a_forward_in_this_process_sees_samples() -> None:
    worker = LengthsWorker(PPOConfig.model_construct(), "ref", "run")
    whole = Experience.from_rollouts([rollout([k], [0] * (k + 1), group=k) for k in range(3)])
    column = start_forward(WorkerGroup(worker), LengthsWorker.forward, whole)()
    assert column.tolist() == [0, 1, 1, 2, 2, 2]
