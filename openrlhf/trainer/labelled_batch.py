"""Labelled answers as one packed row, and the mismatched pairs that give KTO its reference point.

A mismatched pair is a prompt with the response to the next row of its batch. Knows no loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrlhf.datasets.unpaired_preference_dataset import UnpairedExample
from openrlhf.trainer.base_trainer import SampleSet
from openrlhf.utils.packing import PackedBatch


@dataclass(frozen=True)
class ReferencedAnswer(UnpairedExample):
    """An answer, and what a frozen model said about it before training."""

    ref_sum: float  # of log-probs over the response


@dataclass(frozen=True)
class LabelledBatch:
    """B packed answers, and which of them are wanted."""

    packed: PackedBatch
    is_desirable: Tensor  # (B,) bool
    ref_sums: Tensor | None = None  # (B,) fp32, where they were computed before training

    @classmethod
    def of(cls, samples: Sequence[UnpairedExample]) -> LabelledBatch:
        """Pack prompts with their responses, the responses as targets."""
        referenced = [sample for sample in samples if isinstance(sample, ReferencedAnswer)]
        assert len(referenced) in (0, len(samples)), "all have reference log-probs, or none"
        ref_sums = [sample.ref_sum for sample in referenced]
        return cls(
            PackedBatch.from_sequences(
                [sample.token_ids for sample in samples], [sample.loss_mask for sample in samples]
            ),
            torch.tensor([sample.is_desirable for sample in samples]),
            torch.tensor(ref_sums, dtype=torch.float32) if referenced else None,
        )

    def to(self, device: torch.device | str) -> LabelledBatch:
        """The same batch on another device."""
        return replace(
            self,
            packed=self.packed.to(device),
            is_desirable=self.is_desirable.to(device),
            ref_sums=None if self.ref_sums is None else self.ref_sums.to(device),
        )


def empty_answer(*, is_referenced: bool = False) -> UnpairedExample:
    """A prompt and a response of one token each; stands in where a rank has no answers."""
    ids, mask = torch.zeros(2, dtype=torch.int64), torch.tensor([False, True])
    if is_referenced:
        return ReferencedAnswer(ids, mask, is_desirable=True, ref_sum=0.0)
    return UnpairedExample(ids, mask, is_desirable=True)


def mismatches(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Each row of a batch with the next one, the last with the first; none for a row alone."""
    if len(rows) < 2:
        return []
    return list(zip(rows, [*rows[1:], rows[0]], strict=True))


def mismatched_pair(
    samples: SampleSet[UnpairedExample], prompt_row: int, response_row: int, *, max_len: int
) -> UnpairedExample:
    """The prompt of one row with the response of another, cut as the rows of the data are."""
    prompt, other = samples[prompt_row], samples[response_row]
    own_mask = prompt.loss_mask[: prompt.prompt_length]  # no target in it
    token_ids = torch.cat([prompt.prompt_ids, other.response_ids])[:max_len]
    mask = torch.cat([own_mask, other.loss_mask[other.prompt_length :]])[:max_len]
    return UnpairedExample(token_ids, mask, other.is_desirable)


def mismatched_pairs(
    rows: Sequence[int], samples: SampleSet[UnpairedExample], *, max_len: int
) -> list[UnpairedExample]:
    """The pairs of a batch, with the reference's log-probs where the samples have them."""
    pairs = [mismatched_pair(samples, *place, max_len=max_len) for place in mismatches(rows)]
    if not isinstance(samples, ReferencedAnswers):
        return pairs
    sums = samples.pair_sums[tuple(rows)]
    return [
        ReferencedAnswer(**vars(pair), ref_sum=ref_sum)
        for pair, ref_sum in zip(pairs, sums, strict=True)
    ]


class MismatchedPairs:
    """The mismatched pairs of several batches as one set of samples."""

    def __init__(
        self,
        samples: SampleSet[UnpairedExample],
        batches: Iterable[Sequence[int]],
        *,
        max_len: int,
    ) -> None:
        self._samples = samples
        self._max_len = max_len
        self._places: list[tuple[int, int]] = []
        self.spans: dict[tuple[int, ...], range] = {}  # rows of a batch -> where its pairs are
        for rows in batches:
            if tuple(rows) in self.spans:
                continue  # a batch of another epoch, with the same pairs
            places = mismatches(rows)
            self.spans[tuple(rows)] = range(len(self._places), len(self._places) + len(places))
            self._places += places
        prompts = [samples[row].prompt_length for row in range(len(samples))]
        totals = samples.lengths.tolist()
        lengths = [
            min(prompts[first] + totals[second] - prompts[second], max_len)
            for first, second in self._places
        ]
        self.lengths = torch.tensor(lengths, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> UnpairedExample:
        return mismatched_pair(self._samples, *self._places[index], max_len=self._max_len)


class ReferencedAnswers:
    """Answers with the log-prob sums of a frozen model for them and for their mismatched pairs."""

    def __init__(
        self,
        samples: SampleSet[UnpairedExample],
        sums: Tensor,
        pair_sums: Mapping[tuple[int, ...], Sequence[float]],  # rows of a batch -> of its pairs
    ) -> None:
        assert sums.shape == (len(samples), 1), "one sum for each answer"
        self._samples = samples
        self._sums = sums[:, 0].tolist()
        self.pair_sums = pair_sums

    @property
    def lengths(self) -> Tensor:
        """Tokens of every sample, (len,) int64."""
        return self._samples.lengths

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> ReferencedAnswer:
        return ReferencedAnswer(**vars(self._samples[index]), ref_sum=self._sums[index])
