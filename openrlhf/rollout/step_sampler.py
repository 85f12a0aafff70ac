"""The samples of one step: prompts are drawn until the step has its groups, and the ledger knows
what became of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.sampler import PromptCursor
from openrlhf.errors import RewardError
from openrlhf.rollout.ledger import Ledger
from openrlhf.rollout.rollout import FinishedGroup, GroupKey, GroupStream, SampleBatch
from openrlhf.rollout.scoring import FailurePolicy, check_scores
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.progress import progress
from openrlhf.utils.rollout import Rollout

NO_SIGNAL = "filtered:no signal"


@dataclass(frozen=True)
class GroupFilter:
    """Keeps a group that can teach something (dynamic sampling, DAPO, arXiv 2503.14476): its mean
    task score lies strictly between `low` and `high`, and its scores are not all equal.
    """

    low: float = 0.0
    high: float = 1.0
    max_empty: int = 10  # batches in a row without a kept group before the run ends

    def keeps(self, group: Sequence[Rollout]) -> bool:
        """Return True if the samples of a prompt are kept; the parts of an episode count once."""
        scores = list({r.episode_id or r.sample_id: r.task_score for r in group}.values())
        return len(set(scores)) > 1 and self.low < sum(scores) / len(scores) < self.high


class StepSampler:
    """Draws prompts for one step after the other; a group without a signal is replaced at once.

    Never are more groups started than the step still lacks, so that none is left over and every
    sample is made by the policy of its step. The last step takes what is left of the prompts. Which
    prompts a step uses and the order of its samples do not depend on which group is finished first,
    only on the samples themselves, which engines draw from one generator unless they have a seed.
    """

    def __init__(
        self,
        prompts: PromptDataset,
        cursor: PromptCursor,
        *,
        batch_size: int,
        policy: FailurePolicy,
        group_filter: GroupFilter | None = None,
        num_at_once: int | None = None,
    ) -> None:
        """`policy`: how many of a step may fail. `num_at_once`: prompts that are generated at the
        same time; unset: all that lack.
        """
        self.prompts = prompts
        self.cursor = cursor
        self.batch_size = batch_size
        self.group_filter = group_filter
        self.num_at_once = num_at_once or batch_size
        self.policy = policy
        self.ledger = Ledger()
        self._keys: list[GroupKey] = []  # of the groups of this step, by group id
        self._num_started = 0  # of these

    async def collect(self, stream: GroupStream, tag: str) -> SampleBatch:
        """Return the kept samples of a step, at most `batch_size` groups with unique group ids.

        Raises RewardError when many batches in a row have no group with a signal, or too many
        groups of the step failed.
        """
        self._keys, self._num_started = [], 0
        metrics = Metrics()
        kept: dict[int, list[Rollout]] = {}  # by group id
        failed: dict[int, str] = {}  # by row
        reasons: list[str] = []  # a row may fail in two episodes of one step
        num_rejected = 0  # in a row
        async with stream:
            self._start(stream, tag, len(kept))
            with progress("generating", self.batch_size) as advance:
                while stream.num_running:
                    group = await stream.next()
                    if group.failure is not None:
                        self.ledger.settle([group.key], "failed:reward")
                        failed[self.prompts[group.key[1]].row_id] = group.failure
                        reasons.append(group.failure)
                        self.policy.check_dropped(reasons)
                    elif self.group_filter is None or self._keeps(group, metrics):
                        kept[self._keys.index(group.key)] = group.rollouts
                        advance(1)
                        num_rejected = 0
                    else:
                        num_rejected += 1
                        self.check_not_hopeless(num_rejected // self.batch_size)
                    self._start(stream, tag, len(kept))
            metrics.merge(stream.timings()).merge(stream.take_metrics())
        rollouts = [
            replace(rollout, group_id=group_id)
            for group_id, group in sorted(kept.items())
            for rollout in group
        ]
        check_scores(rollouts)
        return SampleBatch(rollouts, metrics, failed)

    def settle(self, trained_groups: set[int]) -> None:
        """Note the groups that reached the update; raises AssertionError when one is unaccounted
        for.
        """
        self.ledger.settle([self._keys[group] for group in sorted(trained_groups)], "trained")
        self.ledger.check()
        assert not self.ledger.pending, f"prompts {self.ledger.pending} were never trained on"

    def state_dict(self) -> dict[str, Any]:
        """Return how far prompts are drawn and what became of them, as JSON; between two steps."""
        return {"cursor": self.cursor.state_dict(), "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.cursor.load_state_dict(state["cursor"])
        self.ledger.load_state_dict(state["ledger"])

    def _draw(self, num_prompts: int) -> list[GroupKey]:
        """Return at most so many prompts of an episode; places in `_keys` are their group ids."""
        episode = self.cursor.episode
        keys = [(episode, row) for row in self.cursor.draw(num_prompts)]
        self.ledger.draw(keys)
        self._keys += keys
        return keys

    def _start(self, stream: GroupStream, tag: str, num_kept: int) -> None:
        """Draw what the step lacks and start what may run at once.

        Without a filter a step is one draw, whatever becomes of it.
        """
        if stream.in_rounds and stream.num_running:  # a round is sampled as a whole
            return
        num_waiting = len(self._keys) - self._num_started
        num_lacking = self.batch_size - num_kept - stream.num_running - num_waiting
        if self.group_filter is None:
            num_lacking = 0 if self._keys else self.batch_size
        while num_lacking > 0 and not self.cursor.is_exhausted:
            num_lacking -= len(self._draw(num_lacking))
            if self.group_filter is None:
                break
        num_free = self.num_at_once - stream.num_running
        keys = self._keys[self._num_started :][: max(num_free, 0)]
        self._num_started += len(keys)
        for episode in dict.fromkeys(episode for episode, _ in keys):
            num_episodes = episode - self._keys[0][0]  # that ended in this step
            prompts = [((e, row), self.prompts[row]) for e, row in keys if e == episode]
            stream.submit(prompts, tag=f"{tag}.{num_episodes}" if num_episodes else tag)

    def _keeps(self, group: FinishedGroup, metrics: Metrics) -> bool:
        assert self.group_filter is not None
        is_kept = self.group_filter.keeps(group.rollouts)
        metrics.add("dynamic_filtering_pass_rate", float(is_kept))
        if not is_kept:
            self.ledger.settle([group.key], NO_SIGNAL)
        return is_kept

    def check_not_hopeless(self, num_empty: int) -> None:
        """Raise RewardError after too many batches in a row without a group that teaches."""
        assert self.group_filter is not None
        if num_empty >= self.group_filter.max_empty:
            low, high = self.group_filter.low, self.group_filter.high
            raise RewardError(
                f"--dynamic_filtering: {num_empty} batches in a row without a group whose scores "
                f"differ and whose mean is between {low} and {high}: pass rate 0 %. Look at the "
                "rewards, widen --dynamic_filtering_reward_range or leave --dynamic_filtering out."
            )
