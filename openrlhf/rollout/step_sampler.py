"""The samples of one step: prompts are drawn until the step has its groups, and the ledger knows
what became of each.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.sampler import PromptCursor
from openrlhf.errors import RewardError
from openrlhf.rollout.async_controller import Ledger
from openrlhf.rollout.rollout import FinishedGroup, GroupKey, GroupStream, SampleBatch
from openrlhf.rollout.scoring import FailurePolicy, score_metrics
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.progress import progress
from openrlhf.utils.rollout import Rollout

NO_SIGNAL = "filtered:no signal"


@dataclass(frozen=True)
class GroupFilter:
    """Keeps a group that can teach something (dynamic sampling, DAPO, arXiv 2503.14476): its task
    scores are not all equal, and their mean lies strictly between `low` and `high`.

    Example: scores (1, 0, 1, 1) and (-1, 1, -1, -1) teach something, (1, 1, 1, 1) do not.
    """

    low: float = -math.inf
    high: float = math.inf
    max_empty: int = 10  # batches in a row without a kept group before the run ends

    def keeps(self, group: Sequence[Rollout]) -> bool:
        """Return True if the samples of a prompt are kept; the parts of an episode count once."""
        scores = list({r.episode_id or r.sample_id: r.task_score for r in group}.values())
        return len(set(scores)) > 1 and self.low < sum(scores) / len(scores) < self.high

    def check_not_hopeless(self, num_empty: int) -> None:
        """Raise RewardError after too many batches in a row without a group that teaches."""
        if num_empty >= self.max_empty:
            is_any = self.low == -math.inf
            mean = "" if is_any else f" and whose mean is between {self.low} and {self.high}"
            widen = "" if is_any else "leave --dynamic_filtering_reward_range out, "
            raise RewardError(
                f"--dynamic_filtering: {num_empty} batches in a row without a group whose scores "
                f"differ{mean}: pass rate 0 %. Look at the rewards, {widen}or leave "
                "--dynamic_filtering out."
            )


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
        self._num_rejected = 0  # groups without a signal in a row
        # Why groups failed, None for kept ones: those of a step, or the last `batch_size`.
        self._recent: deque[str | None] = deque(maxlen=batch_size)

    async def collect(self, stream: GroupStream, tag: str) -> SampleBatch:
        """Return the kept samples of a step, at most `batch_size` groups with unique group ids.

        Raises RewardError when many batches in a row have no group with a signal, or too many
        groups of the step failed.
        """
        self._keys, self._num_started = [], 0
        metrics = Metrics()
        kept: dict[int, list[Rollout]] = {}  # by group id
        failed: dict[int, str] = {}  # by row
        self._num_rejected, self._recent = 0, deque()
        async with stream:
            self._start(stream, tag, len(kept))
            with progress("generating", self.batch_size) as advance:
                while stream.num_running:
                    group = await stream.next()
                    outcome = self.outcome_of(group, metrics)
                    if outcome is None:
                        kept[self._keys.index(group.key)] = group.rollouts
                        advance(1)
                    else:
                        self.ledger.settle([group.key], outcome)
                    if group.failure is not None:
                        failed[self.prompts[group.key[1]].row_id] = group.failure
                    self._start(stream, tag, len(kept))
            metrics.merge(stream.timings()).merge(stream.take_metrics())
        rollouts = [
            replace(rollout, group_id=group_id)
            for group_id, group in sorted(kept.items())
            for rollout in group
        ]
        return SampleBatch(rollouts, metrics.merge(score_metrics(rollouts)), failed)

    def settle(self, trained_groups: set[int]) -> None:
        """Note the groups that reached the update; raises AssertionError when one is unaccounted
        for.
        """
        self.ledger.settle([self._keys[group] for group in sorted(trained_groups)], "trained")
        self.ledger.check()
        assert not self.ledger.pending, f"prompts {self.ledger.pending} were never trained on"

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the prompts and their ledger, as JSON; between two steps."""
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

    def outcome_of(self, group: FinishedGroup, metrics: Metrics) -> str | None:
        """Return the reason why a group is not trained on; None if it is.

        Raises RewardError when too many groups of a step have failed, or many batches in a row have
        none that teaches.
        """
        if group.failure is not None:
            self._recent.append(group.failure)
            self.policy.check_dropped([reason for reason in self._recent if reason is not None])
            return "failed:reward"
        if self.group_filter is not None:
            is_kept = self.group_filter.keeps(group.rollouts)
            metrics.add("dynamic_filtering_pass_rate", float(is_kept))
            self._num_rejected = 0 if is_kept else self._num_rejected + 1
            self.group_filter.check_not_hopeless(self._num_rejected // self.batch_size)
            if not is_kept:
                return NO_SIGNAL
        self._recent.append(None)
        return None
