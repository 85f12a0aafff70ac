"""The samples of one step: prompts are drawn until the step has its groups, and the ledger knows
what became of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.sampler import PromptCursor
from openrlhf.errors import RewardError
from openrlhf.trainer.ppo_utils.group_filter import NO_SIGNAL, GroupFilter
from openrlhf.trainer.ppo_utils.group_stream import FinishedGroup, GroupKey, GroupStream
from openrlhf.trainer.ppo_utils.ledger import Ledger
from openrlhf.trainer.ppo_utils.samples_generator import SampleBatch
from openrlhf.trainer.ppo_utils.scoring import FailurePolicy, check_scores
from openrlhf.utils.metrics import Metrics, timed
from openrlhf.utils.progress import progress
from openrlhf.utils.rollout import Rollout

# (prompts, tag that makes their sample ids unique) -> their scored samples
Generate = Callable[[Sequence[PromptRecord], str], SampleBatch]
OpenStream = Callable[[], GroupStream]
POLL_S = 1.0  # of one look at a stream; a finished group ends it


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

    def collect(self, generate: Generate, open_stream: OpenStream, tag: str) -> SampleBatch:
        """The kept samples of a step, at most `batch_size` groups; their group ids are unique.

        Without a filter a step is one draw, else groups come over a stream. Raises RewardError when
        many batches in a row have no group with a signal, or too many groups of the step failed.
        """
        self._keys = []
        if self.group_filter is None:
            return self._one_draw(generate, tag)
        metrics = Metrics()
        stream = open_stream()
        try:
            bar = progress("generating groups", self.batch_size)
            with timed("generation", metrics), bar as advance:
                kept, failed = self._filtered(stream, tag, metrics, advance)
            metrics.merge(stream.take_metrics())
        finally:
            stream.close()
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
        """How far the prompts are drawn and what became of them, as JSON; between two steps."""
        return {"cursor": self.cursor.state_dict(), "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.cursor.load_state_dict(state["cursor"])
        self.ledger.load_state_dict(state["ledger"])

    def _one_draw(self, generate: Generate, tag: str) -> SampleBatch:
        keys = self._draw(self.batch_size)
        prompts = [self.prompts[row] for _, row in keys]
        rollouts: list[Rollout] = []
        metrics, failed = Metrics(), dict[int, str]()
        for start in range(0, len(prompts), self.num_at_once):
            samples = generate(prompts[start : start + self.num_at_once], tag)
            rollouts += [replace(r, group_id=r.group_id + start) for r in samples.rollouts]
            metrics.merge(samples.metrics)
            failed |= samples.failed
            self.policy.check_dropped(list(failed.values()))
        lost = [key for key, p in zip(keys, prompts, strict=True) if p.row_id in failed]
        self.ledger.settle(lost, "failed:reward")
        return SampleBatch(rollouts, metrics, failed)

    def _draw(self, num_prompts: int) -> list[GroupKey]:
        """The next prompts of an episode, at most; their places in `_keys` are their group ids."""
        episode = self.cursor.episode
        keys = [(episode, row) for row in self.cursor.draw(num_prompts)]
        self.ledger.draw(keys)
        self._keys += keys
        return keys

    def _filtered(
        self, stream: GroupStream, tag: str, metrics: Metrics, advance: Callable[[int], None]
    ) -> tuple[dict[int, list[Rollout]], dict[int, str]]:
        """Kept groups by group id, and why rows failed."""
        kept: dict[int, list[Rollout]] = {}
        failed: dict[int, str] = {}
        reasons: list[str] = []  # a row may fail in two episodes of one step
        num_rejected = 0  # in a row
        self._start(stream, self.batch_size, tag)
        while stream.num_running:
            for group in stream.finished(POLL_S):
                if group.failure is not None:
                    self.ledger.settle([group.key], "failed:reward")
                    failed[self.prompts[group.key[1]].row_id] = group.failure
                    reasons.append(group.failure)
                    self.policy.check_dropped(reasons)
                elif self._keeps(group, metrics):
                    kept[self._keys.index(group.key)] = group.rollouts
                    advance(1)
                    num_rejected = 0
                else:
                    num_rejected += 1
                    self.check_not_hopeless(num_rejected // self.batch_size)
            if not (stream.in_rounds and stream.num_running):  # a round is sampled as a whole
                self._start(stream, self.batch_size - len(kept) - stream.num_running, tag)
        return kept, failed

    def _start(self, stream: GroupStream, num_prompts: int, tag: str) -> None:
        """Start that many groups, if there are so many prompts and they may run at once; a row
        comes once in an episode.
        """
        num_prompts = min(num_prompts, self.num_at_once - stream.num_running)
        while num_prompts > 0 and not self.cursor.is_exhausted:
            keys = self._draw(num_prompts)
            num_prompts -= len(keys)
            for key in keys:
                num_episodes = key[0] - self._keys[0][0]  # that ended in this step
                name = f"{tag}.{num_episodes}" if num_episodes else tag
                stream.submit(key, self.prompts[key[1]], tag=name)

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
