"""The core of asynchronous training under random schedules: whatever finishes, fails or crashes
when, no group is trained on too late, none is lost, and nothing ever waits for nothing.
"""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.rollout.async_controller import AsyncController, AsyncLimits, Ledger

LIMITS = AsyncLimits(batch_size=2, max_staleness=1, max_running=8)
PARTIAL = replace(LIMITS, keeps_running=True)
SCHEDULES_PER_EXAMPLE = 50


def admit_all(core: AsyncController, rows: list[int]) -> None:
    while rows and core.may_admit():
        core.admit((0, rows.pop(0)))
    core.is_exhausted = not rows


def restored(ledger: Ledger) -> Ledger:
    """The ledger as a checkpoint gives it back."""
    copy = Ledger()
    copy.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    return copy


def train(core: AsyncController) -> list[int]:
    """A step with a weight update; the rows that were trained on."""
    keys = core.take()
    core.begin_sync()
    core.update()
    core.check()
    return [row for _, row in keys]


def test_no_more_is_started_than_the_steps_in_time_have_places_for():
    core, rows = AsyncController(LIMITS), list(range(20))
    admit_all(core, rows)
    assert sorted(core.running) == [(0, 0), (0, 1), (0, 2), (0, 3)]  # of this step and the next
    for row in (0, 1):
        core.finish((0, row))
    core.take()
    assert not core.may_admit()  # the running step takes two places of its own
    core.update()
    admit_all(core, rows)
    assert sorted(core.running) == [(0, 2), (0, 3), (0, 4), (0, 5)]


def test_a_slow_group_holds_the_others_up_only_when_it_is_due():
    core, rows = AsyncController(PARTIAL), list(range(20))
    admit_all(core, rows)
    for row in (1, 2, 3):
        core.finish((0, row))
    assert train(core) == [1, 2]  # row 0, started at the same time, still runs
    admit_all(core, rows)
    for row in (4, 5):
        core.finish((0, row))
    assert len(core.ready) == 3 and not core.is_ready  # rows 0 and 3 are due in this step
    core.finish((0, 0))
    assert train(core) == [3, 0]


def test_finished_groups_of_a_checkpoint_keep_their_deadlines():
    limits = replace(PARTIAL, max_staleness=2)
    core, rows = AsyncController(limits), list(range(20))
    admit_all(core, rows)  # rows 0 to 5, as a step has two
    for row in (1, 5, 4):
        core.finish((0, row))
    assert train(core) == [1, 5]
    admit_all(core, rows)
    core.finish((0, 6))
    ages = {key: core.age(key) for key in core.ready}
    assert ages == {(0, 4): 1, (0, 6): 0}
    again = AsyncController(limits, restored(core.ledger))
    assert again.restore(ages) == [(0, 4), (0, 6)]
    again.check()
    assert again.ready == {(0, 4): 1, (0, 6): 2}  # in steps from now on
    assert list(again.again) == [(0, 0), (0, 2), (0, 3), (0, 7)]
    assert again.is_ready and train(again) == [4, 6]


def test_what_a_smaller_limit_has_no_place_for_is_generated_again():
    ages = {(0, row): age for row, age in enumerate((0, 2, 0, 1, 1, 1, 0))}
    ledger = Ledger()
    ledger.draw(ages)
    core = AsyncController(LIMITS, ledger)  # one step behind, two groups a step
    assert core.restore(ages) == [(0, 0), (0, 2), (0, 3), (0, 4)]
    core.check()
    assert list(core.again) == [(0, 1), (0, 5), (0, 6)]


class World:
    """Engines, a trainer and prompts around the core, all moves picked by chance.

    Keeps its own books of versions: it does not read the core's deadlines.
    """

    def __init__(self, limits: AsyncLimits, num_rows: int, chance: random.Random) -> None:
        self.limits, self.num_rows, self.chance = limits, num_rows, chance
        self.core = AsyncController(limits)
        self.position = 0  # rows drawn
        self.version = 0  # of the weights that engines hold
        self.num_warm_up = chance.choice((0, 0, 1, 3))  # steps that change no weights
        self.versions: dict[tuple[int, int], set[int]] = {}  # of the tokens of each group
        self.phase = "idle"  # of the trainer
        self.num_steps = 0
        self.histogram: Counter[int] = Counter()
        self.trained: Counter[tuple[int, int]] = Counter()
        self.num_crashes = chance.choice((0, 0, 1, 2))
        self.saved = self.snapshot()

    def snapshot(self) -> tuple:
        return (
            restored(self.core.ledger),
            (self.position, self.version, self.num_steps, self.trained.copy()),
            # Finished samples are kept; what runs has to be begun again.
            {key: self.core.age(key) for key in self.core.ready},
            {key: self.versions[key].copy() for key in self.core.ready},
        )

    def moves(self) -> list:
        core = self.core
        core.is_exhausted = self.position == self.num_rows
        found = []
        if core.may_admit() and (core.again or not core.is_exhausted):
            found.append(self.admit)
        if core.running:
            found += [self.finish, self.sample]
        if self.phase == "idle" and core.is_ready:
            found.append(self.take)
        if self.phase == "training":
            found.append(self.trained_step)
        if self.phase == "syncing" and core.may_sync:
            found.append(self.sync)
        if self.num_crashes and self.chance.random() < 0.05:
            found.append(self.crash)
        return found

    def admit(self) -> None:
        if self.core.again:
            key = next(iter(self.core.again))
        else:
            key = (0, self.position)
            self.position += 1
        self.core.admit(key)
        self.versions[key] = {self.version}

    def sample(self) -> None:
        """A running group gets a token more."""
        self.versions[self.chance.choice(list(self.core.running))].add(self.version)

    def finish(self) -> None:
        key = self.chance.choice(list(self.core.running))
        outcomes = (None, None, None, "filtered:no signal", "failed:reward")
        self.core.finish(key, self.chance.choice(outcomes))

    def take(self) -> None:
        keys = self.core.take()
        assert 0 < len(keys) <= self.limits.batch_size
        if len(keys) < self.limits.batch_size:
            assert self.core.is_exhausted
            assert not (self.core.running or self.core.ready or self.core.again)
        for key in keys:
            staleness = self.version - min(self.versions[key])
            assert staleness <= self.limits.max_staleness, f"{key} is {staleness} behind"
            assert self.limits.keeps_running or len(self.versions[key]) == 1
            self.histogram[staleness] += 1
        self.trained.update(keys)
        self.phase = "training"

    def trained_step(self) -> None:
        self.num_steps += 1
        if self.num_steps <= self.num_warm_up:
            self.settle()
        else:
            self.core.begin_sync()
            self.phase = "syncing"

    def sync(self) -> None:
        self.version += 1
        self.settle()

    def settle(self) -> None:
        self.core.update()
        self.phase = "idle"
        if self.chance.random() < 0.3:
            self.saved = self.snapshot()

    def crash(self) -> None:
        """Everything but the last checkpoint is gone."""
        self.num_crashes -= 1
        ledger, (self.position, self.version, self.num_steps, trained), ages, versions = self.saved
        self.core = AsyncController(self.limits, restored(ledger))
        assert self.core.restore(ages) == list(ages)
        self.versions = {key: found.copy() for key, found in versions.items()}
        self.trained, self.phase = trained.copy(), "idle"

    def run(self) -> None:
        while not self.core.is_over:
            moves = self.moves()
            assert moves, f"nobody can do anything: {vars(self.core)}"
            self.chance.choice(moves)()
            self.core.check()
            self.core.is_exhausted = self.position == self.num_rows
        outcomes = self.core.ledger.outcomes
        assert self.core.ledger.num_drawn == self.num_rows == sum(outcomes.values())
        assert outcomes["trained"] == len(self.trained) == sum(self.trained.values())


@settings(deadline=None, max_examples=200)
@given(
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(1, 4),
    max_running=st.integers(1, 12),
    keeps_running=st.booleans(),
    num_rows=st.integers(1, 24),
    seed=st.integers(0, 2**32 - 1),
)
def test_ten_thousand_schedules(
    batch_size, max_staleness, max_running, keeps_running, num_rows, seed
):
    limits = AsyncLimits(batch_size, max_staleness, max_running, keeps_running)
    for number in range(SCHEDULES_PER_EXAMPLE):
        World(limits, num_rows, random.Random(f"{seed} {number}")).run()


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_the_limit_is_reached_so_that_it_is_no_idle_bound(max_staleness):
    histogram: Counter[int] = Counter()
    for seed in range(30):
        limits = AsyncLimits(2, max_staleness, 12)
        world = World(limits, 40, random.Random(seed))
        world.run()
        histogram += world.histogram
    assert max(histogram) == max_staleness and histogram[0] > 0
