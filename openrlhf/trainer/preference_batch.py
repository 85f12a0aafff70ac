"""Preference pairs and labelled answers as one packed row, and the log-probs of a reference that
were computed before training. Knows no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from openrlhf.datasets.reward_dataset import PreferencePair
from openrlhf.datasets.unpaired_preference_dataset import UnpairedExample
from openrlhf.trainer.base_trainer import SampleSet
from openrlhf.utils.packing import Batch, PackedBatch

SampleT = TypeVar("SampleT")


@dataclass(frozen=True)
class Referenced(Generic[SampleT]):
    """A sample, and the log-prob sums of its responses under a frozen model."""

    sample: SampleT
    ref_sums: Sequence[float]


class ReferencedSamples(Generic[SampleT]):
    """A set of samples with the log-prob sums of a frozen model for each."""

    def __init__(
        self,
        samples: SampleSet[SampleT],
        sums: Sequence[Sequence[float]],
        pair_sums: Mapping[tuple[int, ...], Sequence[Sequence[float]]] | None = None,
    ) -> None:
        assert len(sums) == len(samples), "sums for each sample"
        self.samples = samples
        self.lengths = samples.lengths
        self.pair_sums = pair_sums or {}  # by the rows of a batch: of its mismatched pairs
        self._sums = sums

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Referenced[SampleT]:
        return Referenced(self.samples[index], self._sums[index])


@dataclass(frozen=True)
class PreferenceBatch(Batch):
    """B samples in one packed row of S sequences."""

    packed: PackedBatch
    labels: Tensor  # (B,) fp32 margin of each pair, or bool: the answer is desirable
    ref_sums: Tensor | None = None  # (S,) fp32, where they were computed before training

    def __len__(self) -> int:
        return len(self.labels)


def pack_pairs(samples: Sequence[PreferencePair | Referenced[PreferencePair]]) -> PreferenceBatch:
    """Pack pairs: sequence 2i of the row is the chosen side of pair i, 2i + 1 the rejected one."""
    pairs, ref_sums = _without_sums(samples)
    token_ids = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    masks = [mask for pair in pairs for mask in (pair.chosen_mask, pair.rejected_mask)]
    margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float32)
    return PreferenceBatch(PackedBatch.from_sequences(token_ids, masks), margins, ref_sums)


def pack_answers(
    samples: Sequence[UnpairedExample | Referenced[UnpairedExample]],
) -> PreferenceBatch:
    """Pack prompts with their responses, the responses as targets."""
    answers, ref_sums = _without_sums(samples)
    packed = PackedBatch.from_sequences(
        [answer.token_ids for answer in answers], [answer.loss_mask for answer in answers]
    )
    is_desirable = torch.tensor([answer.is_desirable for answer in answers])
    return PreferenceBatch(packed, is_desirable, ref_sums)


def _without_sums(
    samples: Sequence[SampleT | Referenced[SampleT]],
) -> tuple[list[SampleT], Tensor | None]:
    referenced = [sample for sample in samples if isinstance(sample, Referenced)]
    assert len(referenced) in (0, len(samples)), "all have reference log-probs, or none"
    if not referenced:
        return list(samples), None  # type: ignore[arg-type]
    sums = [x for item in referenced for x in item.ref_sums]
    return [item.sample for item in referenced], torch.tensor(sums, dtype=torch.float32)


def by_side(values: Tensor) -> tuple[Tensor, Tensor]:
    """(2B,) values of all sequences -> (B,) of the chosen and (B,) of the rejected sides."""
    return values[0::2], values[1::2]


def empty_pair() -> PreferencePair:
    """Return two answers of one token; stands in where a rank has no pairs."""
    ids, mask = torch.zeros(2, dtype=torch.int64), torch.tensor([False, True])
    return PreferencePair(ids, mask, ids, mask, 0.0)


def empty_answer() -> UnpairedExample:
    """Return a prompt and a response of one token each; stands in where a rank has no answers."""
    ids, mask = torch.zeros(2, dtype=torch.int64), torch.tensor([False, True])
    return UnpairedExample(ids, mask, is_desirable=True)


def mismatched_pairs(
    rows: Sequence[int], samples: SampleSet[UnpairedExample], *, max_len: int
) -> list[UnpairedExample]:
    """Return each prompt of a batch with the response of the next row, the last with that of the
    first, cut as the rows of the data are; none for a row alone.
    """
    if len(rows) < 2:
        return []
    answers = [samples[row] for row in rows]
    pairs = []
    for prompt, other in zip(answers, [*answers[1:], answers[0]], strict=True):
        own_mask = prompt.loss_mask[: prompt.prompt_length]  # no target in it
        token_ids = torch.cat([prompt.prompt_ids, other.response_ids])[:max_len]
        mask = torch.cat([own_mask, other.loss_mask[other.prompt_length :]])[:max_len]
        pairs.append(UnpairedExample(token_ids, mask, other.is_desirable))
    return pairs
