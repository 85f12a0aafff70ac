"""A step gets the groups it needs, groups without a signal are replaced, every prompt has an
outcome.
"""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.datasets.sampler import PromptCursor
from openrlhf.errors import RewardError
from openrlhf.rollout.rollout import FinishedGroup, SampleBatch
from openrlhf.rollout.scoring import FailurePolicy
from openrlhf.rollout.step_sampler import GroupFilter, StepSampler
from openrlhf.utils.metrics import Metrics
from tests.helpers.rollouts import rollout


class InFileOrder(PromptCursor):
    def order(self, episode: int) -> torch.Tensor:
        return torch.arange(self.num_rows)


def group(scores, *, row=0, index=0):
    return [
        replace(rollout([5], [6], group=index, reward=score), sample_id=f"{row}/{k}", row_id=row)
        for k, score in enumerate(scores)
    ]


@pytest.mark.parametrize(
    ("scores", "is_kept"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0], False),
        ([0.0, 0.0], False),
        ([0.3, 0.3, 0.3, 0.3], False),  # inside the range, and nothing to learn
        ([0.29, 0.31], True),
        ([-3.0, 1.0], False),  # mean outside
    ],
)
def test_a_group_is_kept_by_mean_and_spread(scores, is_kept):
    assert GroupFilter(0.0, 1.0).keeps(group(scores)) is is_kept


@pytest.mark.parametrize("scale", [lambda x: x, lambda x: 2 * x - 1, lambda x: 100 * x])
def test_without_a_range_a_group_is_kept_whatever_the_scale_of_its_scores(scale):
    for num_right in range(9):
        scores = [scale(float(k < num_right)) for k in range(8)]
        assert GroupFilter().keeps(group(scores)) is (0 < num_right < 8)


class FakeStream:
    """Finishes groups in rounds, or one by one in an order drawn by the test; notes how many run at
    once.
    """

    def __init__(self, generate, choose=None):
        self.generate = generate
        self.choose = choose
        self.in_rounds = choose is None
        self.running = []
        self.done = []
        self.most_running = 0

    def submit(self, prompts, *, tag):
        self.running += [(key, prompt, tag) for key, prompt in prompts]
        self.most_running = max(self.most_running, len(self.running))

    async def next(self):
        if not self.done:
            self.done = self.finish_some()
        return self.done.pop(0)

    def finish_some(self):
        if self.in_rounds:
            done, self.running = self.running, []
        else:
            done = [self.running.pop(self.choose(len(self.running)))]
        found = []
        for tag in dict.fromkeys(tag for _, _, tag in done):
            of_tag = [(key, prompt) for key, prompt, other in done if other == tag]
            samples = self.generate([prompt for _, prompt in of_tag], tag)
            found += [
                FinishedGroup(
                    key,
                    [r for r in samples.rollouts if r.row_id == prompt.row_id],
                    samples.failed.get(prompt.row_id),
                )
                for key, prompt in of_tag
            ]
        return found

    @property
    def num_running(self):
        return len(self.running) + len(self.done)

    def take_metrics(self):
        return Metrics()

    timings = take_metrics

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, *error):
        assert kind or not self.num_running, "groups were left over"


def collect(sampler, open_stream, tag):
    return asyncio.run(sampler.collect(open_stream(), tag))


def make(num_prompts, batch_size, scores_of, *, group_filter=None, failed_rows=(), episodes=1):
    """A sampler, batches and streams for it, what it asked for; `scores_of(row)` are the scores of
    the row's samples.
    """
    prompts = [SimpleNamespace(row_id=row) for row in range(num_prompts)]
    cursor = InFileOrder(num_prompts, 0, num_episodes=episodes)
    asked = []

    def generate(batch, tag):
        asked.append((tag, [p.row_id for p in batch]))
        rollouts = [
            sample
            for index, p in enumerate(batch)
            if p.row_id not in failed_rows
            for sample in group(scores_of(p.row_id), row=p.row_id, index=index)
        ]
        failed = {p.row_id: "no reward" for p in batch if p.row_id in failed_rows}
        return SampleBatch(rollouts, Metrics(), failed)

    policy = FailurePolicy(batch_size, drops=True, max_dropped=math.inf)
    sampler = StepSampler(
        prompts, cursor, batch_size=batch_size, policy=policy, group_filter=group_filter
    )
    return sampler, generate, lambda: FakeStream(generate), asked


def make_of(signals, batch_size, episodes):
    """A sampler of rows that are good, flat or failed, two samples each."""
    return make(
        len(signals),
        batch_size,
        lambda row: [0.0, 1.0] if signals[row] == "good" else [1.0, 1.0],
        group_filter=GroupFilter(max_empty=1000),
        failed_rows={row for row, signal in enumerate(signals) if signal == "failed"},
        episodes=episodes,
    )


def rows(samples):
    return sorted({r.row_id for r in samples.rollouts})


def test_rejected_groups_are_replaced_until_the_step_is_full():
    sampler, _, open_stream, asked = make(
        8, 3, lambda row: [0.0, float(row % 2)], group_filter=GroupFilter()
    )
    samples = collect(sampler, open_stream, "step1")
    assert asked == [("step1", [0, 1, 2]), ("step1", [3, 4]), ("step1", [5])]
    assert rows(samples) == [1, 3, 5]
    assert samples.metrics.values()["dynamic_filtering_pass_rate"] == 0.5
    groups = {r.group_id for r in samples.rollouts}
    assert len(groups) == 3
    sampler.settle(groups)
    assert sampler.ledger.outcomes == {"trained": 3, "filtered:no signal": 3}


def test_without_a_filter_a_step_is_one_draw():
    sampler, _, open_stream, asked = make(5, 3, lambda row: [0.0, 0.0], failed_rows=(1,))
    samples = collect(sampler, open_stream, "step1")
    assert asked == [("step1", [0, 1, 2])]
    assert rows(samples) == [0, 2] and samples.failed == {1: "no reward"}
    sampler.settle({r.group_id for r in samples.rollouts})
    assert sampler.ledger.outcomes == {"trained": 2, "failed:reward": 1}


@pytest.mark.parametrize("group_filter", [None, GroupFilter(max_empty=1000)])
def test_failures_are_held_against_the_whole_step_whatever_makes_it(group_filter):
    def step(*failed_rows):
        sampler, _, open_stream, _ = make(
            24, 8, lambda row: [0.0, 1.0], group_filter=group_filter, failed_rows=failed_rows
        )
        sampler.num_at_once = 2
        sampler.policy = FailurePolicy(8, drops=True, max_dropped=0.3)
        return collect(sampler, open_stream, "step1"), sampler, open_stream

    samples, *_ = step(4)  # one of two, in its call
    assert samples.failed == {4: "no reward"}
    samples, sampler, open_stream = step(2, 3, 12, 13)  # all of a call, and none is left
    sampler.settle({r.group_id for r in samples.rollouts})
    assert list(samples.failed) == [2, 3]
    assert list(collect(sampler, open_stream, "step2").failed) == [12, 13]
    with pytest.raises(RewardError) as info:
        step(0, 3, 6)
    assert str(info.value) == (
        "3 prompt(s) got no rewards, more than --reward_max_dropped 0.3 of the 8 of a step: "
        "no reward"
    )


def test_a_constant_reward_ends_the_run_and_says_why():
    group_filter = GroupFilter(max_empty=10)
    sampler, _, open_stream, asked = make(100, 2, lambda row: [1.0, 1.0], group_filter=group_filter)
    with pytest.raises(RewardError, match=r"10 batches in a row .*: pass rate 0 %"):
        collect(sampler, open_stream, "step1")
    assert len(asked) == 10


@settings(deadline=None, max_examples=60)
@given(
    signals=st.lists(st.sampled_from(["good", "flat", "failed"]), min_size=1, max_size=12),
    batch_size=st.integers(1, 4),
    data=st.data(),
)
def test_what_a_step_takes_does_not_depend_on_what_finishes_first(signals, batch_size, data):
    def step(choose):
        sampler, generate, _, _ = make_of(signals, batch_size, 2)
        stream = FakeStream(generate, choose)
        samples = collect(sampler, lambda: stream, "step1")
        assert stream.most_running <= batch_size  # never more than the step lacks
        sampler.settle({r.group_id for r in samples.rollouts})
        taken = [(r.group_id, r.sample_id) for r in samples.rollouts]
        return taken, sampler.ledger, sampler.cursor.state_dict()

    by_chance = step(lambda n: data.draw(st.integers(0, n - 1)))
    assert by_chance == step(lambda n: 0) == step(lambda n: n - 1)


@settings(deadline=None, max_examples=60)
@given(
    signals=st.lists(st.sampled_from(["good", "flat", "failed"]), min_size=1, max_size=20),
    batch_size=st.integers(1, 6),
    episodes=st.integers(1, 3),
)
def test_every_prompt_has_one_outcome(signals, batch_size, episodes):
    sampler, _, open_stream, _ = make_of(signals, batch_size, episodes)
    step = 0
    while not sampler.cursor.is_exhausted:
        step += 1
        samples = collect(sampler, open_stream, f"step{step}")
        groups = {r.group_id for r in samples.rollouts}
        assert len(groups) <= batch_size
        assert len(groups) == batch_size or sampler.cursor.is_exhausted
        assert len({r.sample_id for r in samples.rollouts}) == 2 * len(groups) or episodes > 1
        sampler.settle(groups)
    outcomes = sampler.ledger.outcomes
    assert outcomes["trained"] == episodes * signals.count("good")
    assert outcomes["failed:reward"] == episodes * signals.count("failed")
    assert outcomes["filtered:no signal"] == episodes * signals.count("flat")
