"""Preference pairs as one packed row: the better and the worse answer of a sample stand together.

Sequence 2i of the row is the chosen side of pair i, 2i + 1 the rejected one. Knows no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrlhf.datasets.reward_dataset import PreferencePair
from openrlhf.trainer.base_trainer import SampleSet
from openrlhf.utils.packing import PackedBatch


@dataclass(frozen=True)
class ReferencedPair(PreferencePair):
    """A pair, and what a frozen model said about it before training."""

    ref_chosen: float  # sum of log-probs over the chosen response
    ref_rejected: float


@dataclass(frozen=True)
class PairBatch:
    """B pairs in one packed row of 2B sequences."""

    packed: PackedBatch
    margins: Tensor  # (B,) fp32
    ref_sums: Tensor | None = None  # (2B,) fp32, where they were computed before training

    @classmethod
    def of(cls, pairs: Sequence[PreferencePair]) -> PairBatch:
        """Pack pairs, both sides of each in turn."""
        token_ids = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
        masks = [mask for pair in pairs for mask in (pair.chosen_mask, pair.rejected_mask)]
        referenced = [pair for pair in pairs if isinstance(pair, ReferencedPair)]
        assert len(referenced) in (0, len(pairs)), "all pairs have reference log-probs, or none"
        ref_sums = [x for pair in referenced for x in (pair.ref_chosen, pair.ref_rejected)]
        return cls(
            PackedBatch.from_sequences(token_ids, masks),
            torch.tensor([pair.margin for pair in pairs], dtype=torch.float32),
            torch.tensor(ref_sums, dtype=torch.float32) if referenced else None,
        )

    def __len__(self) -> int:
        return len(self.margins)

    def to(self, device: torch.device | str) -> PairBatch:
        """The same on another device."""
        return replace(
            self,
            packed=self.packed.to(device),
            margins=self.margins.to(device),
            ref_sums=None if self.ref_sums is None else self.ref_sums.to(device),
        )


class ReferencedPairs:
    """A set of pairs with the log-prob sums of a frozen model beside it."""

    def __init__(self, samples: SampleSet[PreferencePair], sums: Tensor) -> None:
        assert sums.shape == (len(samples), 2), "two sums for each pair"
        self._samples = samples
        self._sums = sums.tolist()

    @property
    def lengths(self) -> Tensor:
        """Tokens of every sample, (len,) int64."""
        return self._samples.lengths

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> ReferencedPair:
        chosen, rejected = self._sums[index]
        pair = vars(self._samples[index])
        return ReferencedPair(**pair, ref_chosen=chosen, ref_rejected=rejected)


def by_side(values: Tensor) -> tuple[Tensor, Tensor]:
    """(2B,) values of all sequences -> (B,) of the chosen and (B,) of the rejected sides."""
    return values[0::2], values[1::2]


def empty_pair(*, is_referenced: bool = False) -> PreferencePair:
    """Two answers of one token; stands in where a rank has no pairs."""
    ids, mask = torch.zeros(2, dtype=torch.int64), torch.tensor([False, True])
    if is_referenced:
        return ReferencedPair(ids, mask, ids, mask, 0.0, ref_chosen=0.0, ref_rejected=0.0)
    return PreferencePair(ids, mask, ids, mask, 0.0)
