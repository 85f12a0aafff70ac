"""Asynchronous training as a state machine: which prompts may start, what is trained next, when
weights may change. The ledger holds the outcome of every prompt.

Pure decisions: no thread, clock, engine or tensor. Time is counted in steps, those of a critic that
warms up alone among them, so that weights which do not change hold nothing up.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ledger:
    """Outcome of every drawn prompt, keyed by (episode, row).

    Example: after five draws: `num_drawn` 5, `pending` {(0, 4)}, `outcomes` {"trained": 3, "no
    signal": 1}.
    """

    num_drawn: int = 0
    pending: set[tuple[int, int]] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)

    def draw(self, keys: Iterable[tuple[int, int]]) -> None:
        """Note prompts that were handed to the engines."""
        for key in keys:
            assert key not in self.pending, f"prompt {key} was drawn twice"
            self.pending.add(key)
            self.num_drawn += 1

    def settle(self, keys: Iterable[tuple[int, int]], outcome: str) -> None:
        """Note what became of prompts: "trained", "filtered:<why>" or "failed:<why>"."""
        for key in keys:
            assert key in self.pending, f"prompt {key} has no open entry for {outcome}"
            self.pending.remove(key)
            self.outcomes[outcome] += 1

    def check(self) -> None:
        """Assert drawn == trained + filtered + failed + pending."""
        settled = sum(self.outcomes.values())
        assert self.num_drawn == settled + len(self.pending), (
            f"ledger out of balance: drawn {self.num_drawn}, settled {dict(self.outcomes)}, "
            f"pending {len(self.pending)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers and lists, for JSON."""
        pending = [list(key) for key in sorted(self.pending)]
        return {
            "num_drawn": self.num_drawn,
            "pending": pending,
            "outcomes": dict(self.outcomes),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.num_drawn = state["num_drawn"]
        self.pending = {(episode, row) for episode, row in state["pending"]}
        self.outcomes = Counter(state["outcomes"])
        self.check()


Key = tuple[int, int]  # (episode, row)


@dataclass(frozen=True)
class AsyncLimits:
    """Limits on how far generation may run ahead of training.

    Example: `AsyncLimits(batch_size=32, max_staleness=1, max_running=64)`
    """

    batch_size: int  # groups of a step
    max_staleness: int  # steps that a group may be behind when it is trained on
    max_running: int  # groups that are generated at once
    keeps_running: bool = False  # weights change under running groups (partial rollout)

    @property
    def max_outstanding(self) -> int:
        """Return the most groups that may be started and not yet trained on: those that the
        running step and the `max_staleness` steps after it take.
        """
        return (self.max_staleness + 1) * self.batch_size


class AsyncController:
    """Groups on their way from the prompts to the optimizer.

    A group started in step s must be trained in step s + max_staleness at the latest. It is started
    only when that is certain, whatever becomes of the others, and no group is ever thrown away for
    being late: between any two calls, for every deadline d, the groups with deadlines up to d have
    places in the steps up to d (Hall's condition). `check` asserts it.

    The ledger and the ages of finished groups are all that a checkpoint needs: whatever else is
    pending in one that comes from a checkpoint is started again.
    """

    def __init__(self, limits: AsyncLimits, ledger: Ledger | None = None) -> None:
        self.limits = limits
        self.ledger = Ledger() if ledger is None else ledger
        self.step = 0  # steps that are finished since the start
        self.running: dict[Key, int] = {}  # group -> its deadline, a step
        self.ready: dict[Key, int] = {}  # the same of finished groups, in order of finishing
        self.taken: list[Key] = []  # by the step that is being trained
        self.again = dict.fromkeys(sorted(self.ledger.pending))  # drawn before a restart
        self.is_exhausted = False  # whoever draws prompts has no more of them
        self.is_syncing = False

    def age(self, key: Key) -> int:
        """Return the steps that ended since a finished group was started."""
        return self.step + self.limits.max_staleness - self.ready[key]

    def restore(self, ages: Mapping[Key, int]) -> list[Key]:
        """Take finished groups of a checkpoint up, before anything is started; the keys of those
        that will be trained on in time, which all are as long as the limits are the same.
        """
        assert not self.num_outstanding, "groups are on their way already"
        steps_left = {key: self.limits.max_staleness - age for key, age in ages.items()}
        taken: set[Key] = set()
        for key in sorted(steps_left, key=steps_left.__getitem__):
            num_places = (steps_left[key] + 1) * self.limits.batch_size
            if key in self.again and len(taken) < num_places:
                taken.add(key)
                del self.again[key]
        self.ready = {key: self.step + steps_left[key] for key in ages if key in taken}
        return list(self.ready)

    @property
    def num_outstanding(self) -> int:
        """Return the number of groups that were started and have no outcome yet."""
        return len(self.running) + len(self.ready) + len(self.taken)

    @property
    def is_over(self) -> bool:
        """Return True once every prompt has its outcome."""
        return self.is_exhausted and not (self.again or self.num_outstanding)

    def may_admit(self) -> bool:
        """Return True if one more group can be started and will be trained on in time."""
        return (
            (not self.is_syncing or self.limits.keeps_running)
            and len(self.running) < self.limits.max_running
            and self.num_outstanding < self.limits.max_outstanding
        )

    def admit(self, key: Key) -> None:
        """Note that a group is started; prompts of `again` come before new ones."""
        assert self.may_admit(), f"group {key} could not be trained on in time"
        if key in self.again:
            del self.again[key]
        else:
            assert not self.again, f"{key} is new, and {next(iter(self.again))} waits to be drawn"
            self.ledger.draw([key])
        self.running[key] = self.step + self.limits.max_staleness

    def finish(self, key: Key, outcome: str | None = None) -> None:
        """Note that a group is finished: to be trained on, or with its outcome "filtered:<why>" or
        "failed:<why>", which frees its place.
        """
        deadline = self.running.pop(key)
        if outcome is None:
            self.ready[key] = deadline
        else:
            self.ledger.settle([key], outcome)

    @property
    def is_ready(self) -> bool:
        """Return True once the next step has its groups; till then wait for more."""
        if self.taken or not self.ready or len(self.ready) < self._size_of_step():
            return False
        chosen = Counter(self.ready[key] for key in self._chosen())
        return all(
            sum(count for deadline, count in chosen.items() if deadline <= limit) >= num_due
            for limit, num_due in self._num_due().items()
        )

    def take(self) -> list[Key]:
        """Return the groups of the next step: those that are due first, else those finished first.

        Groups still running are waited for (`is_ready`) only when later steps have no place for
        them. Fewer than a batch at the end of the prompts alone.
        """
        assert self.is_ready and not self.is_syncing, "the step lacks groups"
        self.taken = self._chosen()
        for key in self.taken:
            del self.ready[key]
        return list(self.taken)

    def begin_sync(self) -> None:
        """Start nothing more, unless groups go on: the weights are about to change."""
        self.is_syncing = True

    @property
    def may_sync(self) -> bool:
        """Return True if weights may be sent: no group would be sampled under two versions, or
        that is wanted.
        """
        return self.is_syncing and (self.limits.keeps_running or not self.running)

    def end_sync(self) -> None:
        """Note that the engines hold the new weights."""
        assert self.may_sync, f"weights changed under {len(self.running)} running groups"
        self.is_syncing = False

    def update(self) -> None:
        """Note that the groups taken are trained on: the next step begins, under new weights if
        there was a sync.
        """
        assert self.taken, "no step is under way"
        if self.is_syncing:
            self.end_sync()
        self.ledger.settle(self.taken, "trained")
        self.taken = []
        self.step += 1

    def check(self) -> None:
        """Assert that the ledger balances, all groups are accounted for, none can miss its
        deadline, and memory is bounded.
        """
        self.ledger.check()
        places = [*self.running, *self.ready, *self.taken, *self.again]
        assert len(places) == len(set(places)), "a group is in two places"
        assert set(places) == self.ledger.pending, "a group was lost"
        assert self.num_outstanding <= self.limits.max_outstanding
        assert len(self.running) <= self.limits.max_running
        for deadline, num_due in self._num_due().items():
            room = 0 if self.taken else self.limits.batch_size
            assert num_due <= room, f"{num_due - room} groups will miss step {deadline}"

    def _size_of_step(self) -> int:
        """Return the size of the next step: less than a batch when no more groups will come."""
        will_get_more = bool(self.running or self.again or not self.is_exhausted)
        return self.limits.batch_size if will_get_more else len(self.ready)

    def _chosen(self) -> list[Key]:
        by_deadline = sorted(self.ready, key=self.ready.__getitem__)  # stable: by finishing, then
        return by_deadline[: self.limits.batch_size]

    def _num_due(self) -> dict[int, int]:
        """Return by deadline how many of the groups up to it have no place after this step."""
        deadlines = Counter([*self.running.values(), *self.ready.values()])
        num_due, num_groups = {}, 0
        for deadline, count in sorted(deadlines.items()):
            num_groups += count
            num_due[deadline] = num_groups - (deadline - self.step) * self.limits.batch_size
        return num_due
