"""Experience: a ragged batch of scored samples, columns laid end to end without padding.

Every column has one of three axes: token (T), action (N: sampled tokens only) or sample (B);
`select` keeps the three in step. Its cost is that of the samples it takes, whatever the batch
holds: slices of numpy arrays begin and end at offsets that are computed once a batch. `cut` makes
the shares of many ranks: a column is laid out once for some hundred samples and then split.
Columns that come with the samples, such as their tokens, stay in pieces in the controller, which
reads none of them; a share has them laid end to end.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.balancing import balanced_partitions
from openrlhf.algorithms.tokens import segment_mean, segment_sum
from openrlhf.utils.images import ImageProcessor, Picture
from openrlhf.utils.packing import Batch, PackedBatch
from openrlhf.utils.rollout import Rollout

BLOCK = 256  # samples
TOKEN, ACTION, SAMPLE = ({"axis": axis} for axis in ("token", "action", "sample"))


@dataclass(frozen=True)
class Experience(Batch):
    """B samples, T tokens, N sampled tokens.

    Example: two samples of 2 + 3 and 2 + 1 tokens have `seq_lengths` [5, 3], `num_actions` [3, 1],
    eight `token_ids` and four `rollout_logprobs`.
    """

    seq_lengths: Tensor = field(metadata=SAMPLE)  # (B,) int64, sums to T
    num_actions: Tensor = field(metadata=SAMPLE)  # (B,) int64, sums to N
    # (B,) int64: the work in tokens; those of images count twice, for the tower computes them too
    costs: Tensor = field(metadata=SAMPLE)
    group_ids: Tensor = field(metadata=SAMPLE)  # (B,) int64
    # (B,) int64: the parts of an agent's episode share it, any other sample is an episode
    episode_ids: Tensor = field(metadata=SAMPLE)
    rewards: Tensor = field(metadata=SAMPLE)  # (B,) float32, finite
    is_truncated: Tensor = field(metadata=SAMPLE)  # (B,) bool
    sample_indices: Tensor = field(metadata=SAMPLE)  # (B,) int64: in the rollout batch
    # A share has the others that its rank reads. None: not computed, not sent, or in pieces.
    token_ids: Tensor | None = field(default=None, metadata=TOKEN)  # (T,) int32
    action_mask: Tensor | None = field(default=None, metadata=TOKEN)  # (T,) bool
    rollout_logprobs: Tensor | None = field(default=None, metadata=ACTION)  # (N,) float32
    weight_versions: Tensor | None = field(default=None, metadata=ACTION)  # (N,) int32
    old_logprobs: Tensor | None = field(default=None, metadata=ACTION)  # (N,)
    ref_logprobs: Tensor | None = field(default=None, metadata=ACTION)  # (N,)
    values: Tensor | None = field(default=None, metadata=ACTION)  # (N,)
    advantages: Tensor | None = field(default=None, metadata=ACTION)  # (N,)
    returns: Tensor | None = field(default=None, metadata=ACTION)  # (N,)
    # (N,) in the policy's loss, when it first saw a sample; NaN: it did not need to
    new_logprobs: Tensor | None = field(default=None, metadata=ACTION)
    # B, or empty where no sample has any: encoded, and shared by the samples of a prompt
    images: tuple[tuple[Picture, ...], ...] = ()
    # Columns that are not laid end to end yet: B pieces each
    pieces: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    @classmethod
    def from_rollouts(
        cls, rollouts: Sequence[Rollout], processor: ImageProcessor | None = None
    ) -> "Experience":
        """Return scored rollouts, each with a finite reward, as a batch in pieces. `processor` is
        that of a policy that sees images.
        """
        costs_B = lengths_B = torch.tensor([r.token_ids.numel() for r in rollouts])
        if processor is not None:
            is_image = (r.token_ids == processor.image_token_id for r in rollouts)
            costs_B = lengths_B + torch.tensor([int(each.sum()) for each in is_image])
        rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float32)
        names = [r.episode_id or f"sample {index}" for index, r in enumerate(rollouts)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        assert torch.isfinite(rewards).all(), "an unscored or non-finite sample reached training"
        return cls(
            seq_lengths=lengths_B,
            num_actions=torch.tensor([r.logprobs.numel() for r in rollouts]),
            costs=costs_B,
            group_ids=torch.tensor([r.group_id for r in rollouts]),
            episode_ids=torch.tensor([numbers[name] for name in names]),
            rewards=rewards,
            is_truncated=torch.tensor([r.is_truncated for r in rollouts]),
            sample_indices=torch.arange(len(rollouts)),
            images=tuple(r.images for r in rollouts) if any(r.images for r in rollouts) else (),
            pieces={
                "token_ids": [r.token_ids for r in rollouts],
                "action_mask": [r.action_mask for r in rollouts],
                "rollout_logprobs": [r.logprobs for r in rollouts],
                "weight_versions": [r.weight_versions for r in rollouts],
            },
        )

    def __len__(self) -> int:
        return len(self.seq_lengths)

    @property
    def _columns(self) -> dict[str, Tensor]:
        """Return every column there is."""
        columns = {name: getattr(self, name) for name in AXES}
        return {name: column for name, column in columns.items() if column is not None}

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        """Return every column there is as numpy sees it, without a copy."""
        return {name: column.numpy() for name, column in self._columns.items()}

    @cached_property
    def _offsets(self) -> dict[str, list[int]]:
        """Return the offsets of samples along the ragged axes, B + 1 numbers each."""
        return {"token": offsets_of(self.seq_lengths), "action": offsets_of(self.num_actions)}

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
        """Return the samples at `indices`, in that order; may be empty."""
        where, columns = np.asarray(indices, dtype=np.int64), {}
        for name, array in self._arrays.items():
            offsets = self._offsets.get(AXES[name])
            picked = array[where] if offsets is None else _pieces(array, offsets, indices)
            columns[name] = torch.from_numpy(picked)
        for name, pieces in self.pieces.items():
            taken = [pieces[index] for index in indices] or [pieces[0][:0]]
            column = torch.cat(taken)
            columns[name] = column.int() if name == "token_ids" else column
        images = tuple(self.images[index] for index in indices) if self.images else ()
        return Experience(**columns, images=images)

    def cut(self, parts: Sequence[Sequence[int]]) -> Iterator["Experience"]:
        """Yield the samples of each part: `BLOCK` samples are laid out at a time, or one part."""
        block: list[Sequence[int]] = []
        for part in parts:
            if block and sum(map(len, block)) + len(part) > BLOCK:
                yield from self._cut_block(block)
                block = []
            block.append(part)
        yield from self._cut_block(block)

    def _cut_block(self, parts: Sequence[Sequence[int]]) -> Iterator["Experience"]:
        """Yield the samples of each part as views of columns that are laid out once."""
        whole = self.select([index for part in parts for index in part])
        counts = [len(part) for part in parts]
        bounds = list(pairwise(accumulate(counts, initial=0)))
        sizes = {"sample": counts}
        for axis, offsets in whole._offsets.items():
            sizes[axis] = [offsets[end] - offsets[start] for start, end in bounds]
        columns = {name: c.split(sizes[AXES[name]]) for name, c in whole._columns.items()}
        for (start, end), *views in zip(bounds, *columns.values(), strict=True):
            share = dict(zip(columns, views, strict=True))
            yield Experience(**share, images=whole.images[start:end])

    def forward_shares(self, num_shares: int) -> tuple[list[list[int]], list["Experience"]]:
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
    def _forward_shares(self) -> dict[int, tuple[list[list[int]], list["Experience"]]]:
        """Return the shares that `forward_shares` has cut, by their number."""
        return {}

    def __reduce__(self) -> tuple[Callable[..., "Experience"], tuple[Any, ...]]:
        """Pickle as numpy arrays, whose memory Ray takes and gives without a copy."""
        whole = self.laid_out()
        return _from_arrays, (whole._arrays, whole.images)

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
    def episodes(self) -> list[list[int]]:
        """Return the samples of every episode."""
        owner_B, first_E = self.episode_of
        if len(first_E) == len(owner_B):
            return np.arange(len(owner_B))[:, None].tolist()
        members: list[list[int]] = [[] for _ in range(len(first_E))]
        for index, episode in enumerate(owner_B.tolist()):
            members[episode].append(index)
        return members

    @property
    def response_lengths(self) -> Tensor:
        """Return the sampled tokens of the whole episode of every sample, (B,) int64."""
        return self.per_episode(self.num_actions)[self.episode_of[0]]

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
                is_known = (segment_sum(column.isnan().float(), self.num_actions) == 0).tolist()
            for k, row in enumerate(rows):
                row[name] = array[ends[k] : ends[k + 1]] if is_known[k] else None
        for row, mean in zip(
            rows, segment_mean(self.advantages, self.num_actions).tolist(), strict=True
        ):
            row["advantage"] = mean
        return rows

    def stand_in(self) -> "Experience":
        """Return a sample of two tokens with the same columns, where a rank has nothing to do."""
        sizes = {"token": 2, "action": 1, "sample": 1}
        columns = {name: c.new_zeros(sizes[AXES[name]]) for name, c in self._columns.items()}
        return Experience(
            **columns
            | {
                "seq_lengths": torch.tensor([2]),
                "num_actions": torch.tensor([1]),
                "action_mask": torch.tensor([False, True]),
            }
        )

    def packed(self, processor: ImageProcessor | None = None) -> PackedBatch:
        """Return one packed row whose targets are the sampled tokens, with the pixels of images."""
        whole = self.laid_out()
        assert whole.token_ids is not None and whole.action_mask is not None
        lengths = tuple(self.seq_lengths.tolist())
        row = PackedBatch(whole.token_ids.long(), lengths, whole.action_mask)
        return row.with_pictures(self.images, processor)


AXES = {column.name: column.metadata["axis"] for column in fields(Experience) if column.metadata}


def offsets_of(sizes: Tensor) -> list[int]:
    """Return the offsets of pieces of these sizes laid end to end, and the end of the last."""
    return list(accumulate(sizes.tolist(), initial=0))


def _pieces(array: np.ndarray, offsets: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """Return the pieces at `indices` of a flat array, end to end, in memory of their own. By numpy,
    whose slices are nothing that Python's collector looks at.
    """
    parts = [array[offsets[index] : offsets[index + 1]] for index in indices]
    return np.concatenate(parts) if parts else array[:0].copy()


def _from_arrays(
    arrays: Mapping[str, np.ndarray], images: tuple[tuple[Picture, ...], ...]
) -> Experience:
    """Return experience over arrays that may be read-only: nothing writes into a column."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        columns = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return Experience(**columns, images=images)


def scatter_back(
    parts: Sequence[Tensor], indices: Sequence[Sequence[int]], sizes: Tensor
) -> Tensor:
    """Undo a partition: per-part flat columns back into sample order.

    `parts[k]` holds the entries of samples `indices[k]` end to end: `sizes` (B,) of them each, or
    one a sample.
    """
    if all(len(part) == len(members) for part, members in zip(parts, indices, strict=True)):
        sizes = torch.ones_like(sizes)
    lengths, pieces = sizes.tolist(), [np.empty(0)] * len(sizes)
    for part, members in zip(parts, indices, strict=True):
        array, end = part.numpy(), 0
        for index in members:
            start, end = end, end + lengths[index]
            pieces[index] = array[start:end]
        assert end == len(array), "a part has an entry for each of its samples"
    return torch.from_numpy(np.concatenate(pieces))
