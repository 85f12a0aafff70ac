"""Samples as a rank has them: columns laid end to end without padding.

Every column has one of three axes: token (T), action (N: sampled tokens only) or sample (B);
`select` keeps the three in step. Its cost is that of the samples it takes, whatever the batch
holds: slices of numpy arrays begin and end at offsets that are computed once a batch.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from itertools import accumulate
from typing import Self

import numpy as np
import torch
from torch import Tensor

from openrlhf.utils.images import ImageProcessor, Picture
from openrlhf.utils.packing import Batch, PackedBatch

Images = tuple[tuple[Picture, ...], ...]
TOKEN, ACTION, SAMPLE = ({"axis": axis} for axis in ("token", "action", "sample"))


@dataclass(frozen=True, kw_only=True)
class Samples(Batch):
    """B samples, T tokens, N sampled tokens: what the models of ranks read.

    Example: two samples of 2 + 3 and 2 + 1 tokens have `seq_lengths` [5, 3], `num_actions` [3, 1],
    eight `token_ids` and four `rollout_logprobs`.
    """

    seq_lengths: Tensor = field(metadata=SAMPLE)  # (B,) int64, sums to T
    num_actions: Tensor = field(metadata=SAMPLE)  # (B,) int64, sums to N
    # (B,) int64: the work in tokens; those of images count twice, for the tower computes them too
    costs: Tensor = field(metadata=SAMPLE)
    group_ids: Tensor = field(metadata=SAMPLE)  # (B,) int64
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
    images: Images = ()

    @classmethod
    @cache
    def axes(cls) -> dict[str, str]:
        """Return the axis of every column."""
        return {column.name: column.metadata["axis"] for column in fields(cls) if column.metadata}

    def __len__(self) -> int:
        return len(self.seq_lengths)

    @property
    def _columns(self) -> dict[str, Tensor]:
        """Return every column there is."""
        columns = {name: getattr(self, name) for name in self.axes()}
        return {name: column for name, column in columns.items() if column is not None}

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        """Return every column there is as numpy sees it, without a copy."""
        return {name: column.numpy() for name, column in self._columns.items()}

    @cached_property
    def _offsets(self) -> dict[str, list[int]]:
        """Return the offsets of samples along the ragged axes, B + 1 numbers each."""
        return {"token": offsets_of(self.seq_lengths), "action": offsets_of(self.num_actions)}

    def select(self, indices: Sequence[int]) -> Self:
        """Return the samples at `indices`, in that order; may be empty."""
        where, columns = np.asarray(indices, dtype=np.int64), {}
        for name, array in self._arrays.items():
            offsets = self._offsets.get(self.axes()[name])
            picked = array[where] if offsets is None else _pieces(array, offsets, indices)
            columns[name] = torch.from_numpy(picked)
        images = tuple(self.images[index] for index in indices) if self.images else ()
        return type(self)(**columns, images=images)

    def stand_in(self) -> Self:
        """Return a sample of two tokens with the same columns, where a rank has nothing to do."""
        sizes = {"token": 2, "action": 1, "sample": 1}
        columns = {name: c.new_zeros(sizes[self.axes()[name]]) for name, c in self._columns.items()}
        return type(self)(
            **columns
            | {
                "seq_lengths": torch.tensor([2]),
                "num_actions": torch.tensor([1]),
                "action_mask": torch.tensor([False, True]),
            }
        )

    def packed(self, processor: ImageProcessor | None = None) -> PackedBatch:
        """Return one packed row whose targets are the sampled tokens, with the pixels of images."""
        assert self.token_ids is not None and self.action_mask is not None
        lengths = tuple(self.seq_lengths.tolist())
        row = PackedBatch(self.token_ids.long(), lengths, self.action_mask)
        return row.with_pictures(self.images, processor)


Layout = Sequence[tuple[str, str, int]]  # of columns in one array: name, numpy dtype, bytes


def samples_in(layout: Layout, whole: np.ndarray, images: Images) -> Samples:
    """Return the samples whose columns are in one array, which is not copied. It may be read-only:
    nothing writes into a column.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        columns = {name: torch.from_numpy(part) for name, part in columns_in(layout, whole)}
    return Samples(**columns, images=images)


def columns_in(layout: Layout, whole: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the part of each column in flat bytes."""
    end = 0
    for name, dtype, num_bytes in layout:
        start, end = end, end + num_bytes
        yield name, whole[start:end].view(dtype)


def offsets_of(sizes: Tensor) -> list[int]:
    """Return the offsets of pieces of these sizes laid end to end, and the end of the last."""
    return list(accumulate(sizes.tolist(), initial=0))


def _pieces(array: np.ndarray, offsets: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """Return the pieces at `indices` of a flat array, end to end, in memory of their own. By numpy,
    whose slices are nothing that Python's collector looks at.
    """
    parts = [array[offsets[index] : offsets[index + 1]] for index in indices]
    return np.concatenate(parts) if parts else array[:0].copy()


def scatter_back(
    parts: Sequence[np.ndarray], indices: Sequence[Sequence[int]], sizes: Tensor
) -> Tensor:
    """Undo a partition: per-part flat columns back into sample order.

    `parts[k]` holds the entries of samples `indices[k]` end to end: `sizes` (B,) of them each, or
    one a sample.
    """
    if all(len(part) == len(members) for part, members in zip(parts, indices, strict=True)):
        sizes = torch.ones_like(sizes)
    lengths, pieces = sizes.tolist(), [np.empty(0)] * len(sizes)
    for part, members in zip(parts, indices, strict=True):
        end = 0
        for index in members:
            start, end = end, end + lengths[index]
            pieces[index] = part[start:end]
        assert end == len(part), "a part has an entry for each of its samples"
    return torch.from_numpy(np.concatenate(pieces))
