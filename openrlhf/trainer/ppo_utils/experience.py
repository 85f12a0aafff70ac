"""Experience: all samples of an RL step, as the controller has them.

Columns that come with the samples, such as their tokens, stay in pieces here, for nothing reads
them; a share has those of its samples.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.balancing import balanced_partitions
from openrlhf.algorithms.tokens import all_finite
from openrlhf.trainer.ppo_utils.samples import (
    SAMPLE,
    Images,
    Layout,
    Samples,
    columns_in,
    samples_in,
)
from openrlhf.utils.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class Experience(Samples):
    """B samples of an RL step, with what the models of ranks do not read.

    Example: `Experience.from_rollouts(rollouts)`, then `replace(experience, advantages=...)`
    """

    # (B,) int64: the parts of an agent's episode share it, any other sample is an episode
    episode_ids: Tensor = field(metadata=SAMPLE)
    rewards: Tensor = field(metadata=SAMPLE)  # (B,) float32, finite
    is_truncated: Tensor = field(metadata=SAMPLE)  # (B,) bool
    # Columns that are not laid end to end yet: B pieces each
    pieces: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout]) -> "Experience":
        """Return scored rollouts, each with a finite reward, as a batch in pieces."""
        names = [r.episode_id or index for index, r in enumerate(rollouts)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        lengths_B = _tensor([r.token_ids.numel() for r in rollouts])
        rewards_B = _tensor([r.reward for r in rollouts], np.float32)
        assert all_finite(rewards_B), "an unscored or non-finite sample reached training"
        return cls(
            seq_lengths=lengths_B,
            num_actions=_tensor([r.logprobs.numel() for r in rollouts]),
            costs=lengths_B + _tensor([r.num_image_tokens for r in rollouts]),
            group_ids=_tensor([r.group_id for r in rollouts]),
            episode_ids=_tensor([numbers[name] for name in names]),
            rewards=rewards_B,
            is_truncated=_tensor([r.is_truncated for r in rollouts], np.bool_),
            sample_indices=torch.arange(len(rollouts)),
            images=tuple(r.images for r in rollouts) if any(r.images for r in rollouts) else (),
            pieces={
                "token_ids": [r.token_ids for r in rollouts],
                "action_mask": [r.action_mask for r in rollouts],
                "rollout_logprobs": [r.logprobs for r in rollouts],
                "weight_versions": [r.weight_versions for r in rollouts],
            },
        )

    def with_columns(self, columns: Collection[str]) -> "Experience":
        """Return the samples with these columns and those that every share has, without others."""
        kept = {"token_ids", "action_mask", *columns}
        left_out = [column.name for column in fields(self) if column.default is None]
        pieces = {name: column for name, column in self.pieces.items() if name in kept}
        return replace(self, pieces=pieces, **dict.fromkeys({*left_out} - kept))

    def laid_out(self) -> "Experience":
        """Return the same samples with no column in pieces."""
        return self.select(range(len(self))) if self.pieces else self

    def select(self, indices: Sequence[int]) -> "Experience":
        """Return the samples at `indices`, in that order, laid end to end; may be empty."""
        columns = {}
        for name, pieces in self.pieces.items():
            columns[name] = torch.cat([pieces[index] for index in indices] or [pieces[0][:0]])
        return replace(super().select(indices), **columns)

    def cut(self, parts: Iterable[Sequence[int]]) -> Iterator["SampleShare"]:
        """Yield the samples of each part."""
        return map(partial(SampleShare, self), parts)

    @cached_property
    def _share_columns(self) -> list["ShareColumn"]:
        """Return the columns of shares. Wide numbers come first, so that all of them are aligned in
        one array.
        """
        columns = []
        for name, axis in Samples.axes().items():
            if (array := self._arrays.get(name)) is not None:
                columns.append(ShareColumn(name, axis, array.dtype, array))
            elif pieces := self.pieces.get(name):
                columns.append(ShareColumn(name, axis, pieces[0].numpy().dtype, pieces))
        return sorted(columns, key=lambda column: -column.dtype.itemsize)

    def forward_shares(self, num_shares: int) -> tuple[list[list[int]], list["SampleShare"]]:
        """Cut the samples into shares balanced by tokens, without columns that models computed;
        return the indices of each share, and the shares. They are kept, for all models with as many
        shares.
        """
        if num_shares not in self._forward_shares:
            parts = balanced_partitions(self.costs.tolist(), num_shares)
            plain = self.with_columns(())
            self._forward_shares[num_shares] = parts, list(plain.cut(parts))
        return self._forward_shares[num_shares]

    @cached_property
    def _forward_shares(self) -> dict[int, tuple[list[list[int]], list["SampleShare"]]]:
        """Return the shares that `forward_shares` has cut, by their number."""
        return {}

    @cached_property
    def episode_of(self) -> tuple[Tensor, Tensor]:
        """Return the number of each sample's episode, (B,), counted from 0 in the order of the
        first samples, and the first sample of each episode, (E,). An episode is one sample, or the
        parts of an agent's episode.
        """
        ids = self._arrays["episode_ids"]
        _, first, owner = np.unique(ids, return_index=True, return_inverse=True)
        order = first.argsort()
        return torch.from_numpy(order.argsort()[owner]), torch.from_numpy(first[order])

    def per_episode(self, values_B: Tensor) -> Tensor:
        """Return the sum over the samples of each episode, (E,)."""
        owner_B, first_E = self.episode_of
        return values_B.new_zeros(len(first_E)).index_add_(0, owner_B, values_B)

    @property
    def num_episodes(self) -> int:
        """Return E."""
        return len(self.episode_of[1])

    @cached_property
    def _by_episode(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the samples, episode after episode, (B,), and of each where it begins there and
        how many it has, (E,).
        """
        owner_B = self.episode_of[0].numpy()
        sizes_E = np.bincount(owner_B, minlength=self.num_episodes)
        return owner_B.argsort(stable=True), sizes_E.cumsum() - sizes_E, sizes_E

    def samples_of(self, episodes: Sequence[int]) -> np.ndarray:
        """Return the samples of these episodes, one episode after the other."""
        samples_B, starts_E, sizes_E = self._by_episode
        sizes = sizes_E[episodes]
        within = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
        return samples_B[np.repeat(starts_E[episodes], sizes) + within]

    @property
    def response_lengths(self) -> Tensor:
        """Return the sampled tokens of the whole episode of every sample, (B,) int64."""
        return self.per_episode(self.num_actions)[self.episode_of[0]]

    @property
    def context_lengths(self) -> Tensor:
        """Return the tokens of the longest sequence of the whole episode of every sample, (B,)."""
        owner_B, first_E = self.episode_of
        zeros_E = self.seq_lengths.new_zeros(len(first_E))
        return zeros_E.scatter_reduce(0, owner_B, self.seq_lengths, "amax")[owner_B]

    def sample_means(self, column_N: Tensor) -> Tensor:
        """Return the mean over the sampled tokens of each sample, (B,); 0 for one without any. By
        numpy, which takes a third of the time of torch's own.
        """
        sizes_B = self._arrays["num_actions"]
        starts = (sizes_B.cumsum() - sizes_B)[sizes_B > 0]
        sums_B = np.zeros(len(sizes_B), np.float32)
        sums_B[sizes_B > 0] = np.add.reduceat(column_N.numpy(), starts)
        return torch.from_numpy(sums_B) / self.num_actions.clamp(min=1)

    def learned_columns(self) -> list[dict[str, object]]:
        """Return for each sample what the files of rollouts say of its training: the mean of its
        advantages, and (A,) arrays, None where nothing was computed.
        """
        ends = self._offsets["action"]
        rows: list[dict[str, object]] = [{} for _ in range(len(self))]
        for name in ("old_logprobs", "new_logprobs", "advantages"):
            column, array = getattr(self, name), self._arrays.get(name)
            is_known = [False] * len(rows)
            if column is not None:
                is_known = (self.sample_means(column.isnan().float()) == 0).tolist()
            for k, row in enumerate(rows):
                row[name] = array[ends[k] : ends[k + 1]] if is_known[k] else None
        for row, mean in zip(rows, self.sample_means(self.advantages).tolist(), strict=True):
            row["advantage"] = mean
        return rows


class ShareColumn(NamedTuple):
    """A column that shares are cut out of: whole, or a tensor for each sample."""

    name: str
    axis: str
    dtype: np.dtype
    source: np.ndarray | Sequence[Tensor]

    def cut(self, indices: Sequence[int], offsets: Sequence[int] | None, out: np.ndarray) -> None:
        """Lay the entries of samples end to end. Each has one, or some between its `offsets`."""
        if not isinstance(self.source, np.ndarray):
            torch.cat([self.source[k] for k in indices], out=torch.from_numpy(out))
        elif offsets is None:
            out[:] = self.source[indices]
        else:
            np.concatenate([self.source[offsets[k] : offsets[k + 1]] for k in indices], out=out)


@dataclass(frozen=True)
class SampleShare:
    """Samples on their way to a rank. They are cut out when they are pickled or opened: a share
    that waits takes no memory.

    Example: with `indices` [4, 2], `opened(share).group_ids` are of the fifth and third sample.
    """

    experience: Experience
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __reduce__(self) -> tuple[Callable[..., Samples], tuple[Layout, np.ndarray, Images]]:
        """Pickle as one array, since each array costs Ray microseconds; Ray takes and gives the
        memory without a copy. What comes out is the samples.
        """
        whole, indices = self.experience, self.indices
        sizes = {"sample": len(indices)}
        for axis, ends in whole._offsets.items():
            sizes[axis] = sum([ends[k + 1] - ends[k] for k in indices])
        columns = whole._share_columns
        layout = [(c.name, c.dtype.str, sizes[c.axis] * c.dtype.itemsize) for c in columns]
        array = np.empty(sum(num_bytes for *_, num_bytes in layout), np.uint8)
        if indices:
            for column, (_, out) in zip(columns, columns_in(layout, array), strict=True):
                column.cut(indices, whole._offsets.get(column.axis), out)
        images = tuple(whole.images[k] for k in indices) if whole.images else ()
        return samples_in, (layout, array, images)


def opened(share: SampleShare | Samples) -> Samples:
    """Return the samples of a share, on whichever side of a pickle it is."""
    if isinstance(share, Samples):
        return share
    made, arguments = share.__reduce__()
    return made(*arguments)


def _tensor(values: Sequence[object], dtype: type[np.generic] = np.int64) -> Tensor:
    """Return numbers of Python as a tensor. By numpy, which takes a quarter of the time."""
    return torch.from_numpy(np.array(values, dtype))
