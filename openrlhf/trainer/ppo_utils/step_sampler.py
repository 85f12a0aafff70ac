"""The samples of one step: prompts are drawn until the step has its groups, and the ledger knows
what became of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from openrlhf.datasets.prompts_dataset import PromptDataset, PromptRecord
from openrlhf.datasets.sampler import PromptCursor
from openrlhf.errors import RewardError
from openrlhf.trainer.ppo_utils.group_filter import NO_SIGNAL, GroupFilter
from openrlhf.trainer.ppo_utils.ledger import Ledger
from openrlhf.trainer.ppo_utils.samples_generator import SampleBatch
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout

# (prompts, tag that makes their sample ids unique) -> their scored samples
Generate = Callable[[Sequence[PromptRecord], str], SampleBatch]


class StepSampler:
    """Draws prompts for one step after the other; a group without a signal is replaced.

    Exactly the groups that lack are drawn anew, so that none is left over and every sample is made
    by the policy of its step. The last step takes what is left of the prompts.
    """

    def __init__(
        self,
        prompts: PromptDataset,
        cursor: PromptCursor,
        *,
        batch_size: int,
        group_filter: GroupFilter | None = None,
    ) -> None:
        self.prompts = prompts
        self.cursor = cursor
        self.batch_size = batch_size
        self.group_filter = group_filter
        self.ledger = Ledger()
        self._keys: list[tuple[int, int]] = []  # (episode, row) of the groups of this step

    def collect(self, generate: Generate, tag: str) -> SampleBatch:
        """The kept samples of a step, at most `batch_size` groups; their group ids are unique.

        Raises RewardError when many batches in a row have no group with a signal.
        """
        self._keys = []
        rollouts: list[Rollout] = []
        metrics, failed = Metrics(), dict[int, str]()
        num_kept = num_rounds = num_empty = 0
        while num_kept < self.batch_size and not self.cursor.is_exhausted:
            name = f"{tag}.{num_rounds}" if num_rounds else tag
            samples = self._round(generate, self.batch_size - num_kept, name)
            kept = self._kept(samples.rollouts, metrics)
            rollouts += kept
            metrics.merge(samples.metrics)
            failed |= samples.failed
            num_new = len({r.group_id for r in kept})
            num_kept, num_rounds = num_kept + num_new, num_rounds + 1
            if self.group_filter is None:
                break
            num_empty = 0 if num_new else num_empty + 1
            self._check_not_hopeless(num_empty)
        return SampleBatch(rollouts, metrics, failed)

    def settle(self, trained_groups: set[int]) -> None:
        """Note the groups that reached the update; raises AssertionError when one is unaccounted
        for.
        """
        self.ledger.settle([self._keys[group] for group in sorted(trained_groups)], "trained")
        self.ledger.check()
        assert not self.ledger.pending, f"prompts {self.ledger.pending} were never trained on"

    def _round(self, generate: Generate, num_prompts: int, tag: str) -> SampleBatch:
        """Samples of new prompts, with the group ids of this step; failed ones are settled."""
        episode, base = self.cursor.episode, len(self._keys)
        rows = self.cursor.draw(num_prompts)
        keys = [(episode, row) for row in rows]
        self.ledger.draw(keys)
        self._keys += keys
        prompts = [self.prompts[row] for row in rows]
        samples = generate(prompts, tag)
        failed = [key for key, p in zip(keys, prompts, strict=True) if p.row_id in samples.failed]
        self.ledger.settle(failed, "failed:reward")
        return replace(
            samples,
            rollouts=[replace(r, group_id=r.group_id + base) for r in samples.rollouts],
        )

    def _kept(self, rollouts: Sequence[Rollout], metrics: Metrics) -> list[Rollout]:
        if self.group_filter is None:
            return list(rollouts)
        groups: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout)
        kept: list[Rollout] = []
        for group_id, group in groups.items():
            is_kept = self.group_filter.keeps(group)
            metrics.add("dynamic_filtering_pass_rate", float(is_kept))
            if is_kept:
                kept += group
            else:
                self.ledger.settle([self._keys[group_id]], NO_SIGNAL)
        return kept

    def _check_not_hopeless(self, num_empty: int) -> None:
        assert self.group_filter is not None
        if num_empty >= self.group_filter.max_empty:
            low, high = self.group_filter.low, self.group_filter.high
            raise RewardError(
                f"--dynamic_filtering: {num_empty} batches in a row without a group whose scores "
                f"differ and whose mean is between {low} and {high}: pass rate 0 %. Look at the "
                "rewards, widen --dynamic_filtering_reward_range or leave --dynamic_filtering out."
            )
