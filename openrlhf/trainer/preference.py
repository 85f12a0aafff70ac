"""What preference trainers share: packed pairs and labelled answers, and the frozen reference.

The reference is a second model or the policy's own base: an adapter that is switched off. It can be
asked about all samples once, before the first step; a second model is then let go of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor

from openrlhf.algorithms.tokens import segment_sum
from openrlhf.datasets.reward_dataset import PreferencePair
from openrlhf.datasets.unpaired_preference_dataset import UnpairedExample
from openrlhf.distributed.collectives import all_gather_object
from openrlhf.distributed.train_engine import EvalEngine, TrainEngine
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import is_adapted
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.base_trainer import BaseTrainer, SampleSet, SampleT, SupervisedRun, load_actor
from openrlhf.utils.logging import notice
from openrlhf.utils.packing import Batch, PackedBatch


class ReferencedSamples(Generic[SampleT]):
    """Samples that carry the log-prob sums of their responses under a frozen model."""

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

    def __getitem__(self, index: int) -> SampleT:
        return replace(self.samples[index], ref_sums=self._sums[index])  # type: ignore[type-var]


@dataclass(frozen=True)
class PreferenceBatch(Batch):
    """B samples in one packed row of S sequences."""

    packed: PackedBatch
    labels: Tensor  # (B,) fp32 margin of each pair, or bool: the answer is desirable
    ref_sums: Tensor | None = None  # (S,) fp32, where they were computed before training

    def __len__(self) -> int:
        return len(self.labels)


def pack_pairs(pairs: Sequence[PreferencePair]) -> PreferenceBatch:
    """Pack pairs: sequence 2i of the row is the chosen side of pair i, 2i + 1 the rejected one."""
    token_ids = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    masks = [mask for pair in pairs for mask in (pair.chosen_mask, pair.rejected_mask)]
    margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float32)
    return PreferenceBatch(
        PackedBatch.from_sequences(token_ids, masks), margins, _reference_sums(pairs)
    )


def pack_answers(answers: Sequence[UnpairedExample]) -> PreferenceBatch:
    """Pack prompts with their responses, the responses as targets."""
    packed = PackedBatch.from_sequences(
        [answer.token_ids for answer in answers], [answer.loss_mask for answer in answers]
    )
    is_desirable = torch.tensor([answer.is_desirable for answer in answers])
    return PreferenceBatch(packed, is_desirable, _reference_sums(answers))


def _reference_sums(samples: Sequence[PreferencePair | UnpairedExample]) -> Tensor | None:
    """Return the sums that samples carry, (S,) fp32; None unless the reference was asked."""
    sums = [sample.ref_sums for sample in samples if sample.ref_sums is not None]
    assert len(sums) in (0, len(samples)), "all have reference log-probs, or none"
    return torch.tensor(sums).flatten() if sums else None


def by_side(values: Tensor) -> tuple[Tensor, Tensor]:
    """(2B,) values of all sequences -> (B,) of the chosen and (B,) of the rejected sides."""
    return values[0::2], values[1::2]


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


class Reference:
    """Frozen weights: a second model or, with `actor`, the trained one with its adapter off."""

    def __init__(self, engine: EvalEngine | TrainEngine, actor: Actor | None = None) -> None:
        self.engine = engine
        self.actor = actor

    @torch.no_grad()
    def __call__(self, batch: PackedBatch) -> Tensor:
        """Return the sums of log-probs over each sequence's targets, (S,) fp32."""
        with_base = nullcontext() if self.actor is None else self.actor.model.disable_adapter()
        with with_base, evaluating(self.engine):
            return segment_sum(self.engine(batch).logprobs, batch.num_targets)


@contextmanager
def evaluating(engine: EvalEngine | TrainEngine) -> Iterator[None]:
    """Put the model in evaluation mode within the block."""
    was_training = engine.module.training
    engine.module.eval()
    yield
    engine.module.train(was_training)


def make_reference(run: SupervisedRun[Any], path: str) -> Reference:
    """Return the model at `path`, frozen; not a second copy of the policy adapter's own base."""
    assert isinstance(run.model, Actor), type(run.model)
    if is_adapted(run.model.model) and path == run.inputs.model_path:
        return Reference(run.engine, run.model)
    actor = Actor(load_causal_lm(path, run.config))
    return Reference(run.strategy.prepare_eval(actor, offload=run.config.ref.offload))


class ReferencedTrainer(BaseTrainer[SampleT, PreferenceBatch]):
    """A loop whose loss compares with a reference; with `precompute` that is asked once, before
    the first step.
    """

    reference: Reference | None = None  # where the loss needs none, or was asked before

    @classmethod
    def load_model(cls, config: Any, model_path: str) -> Actor:
        return load_actor(config, model_path, has_dropout=False)

    def fit(self, *, after_step: Callable[[], None] | None = None) -> None:
        is_asked = self.run.config.ref.precompute_log_probs
        if is_asked and self.reference is not None and not self.is_finished:
            self.precompute_reference()
        super().fit(after_step=after_step)

    def precompute_reference(self) -> None:
        """Keep the reference's log-probs of both sets and let go of the model."""
        assert self.reference is not None, "there is no reference to ask"
        if self.strategy.is_main:
            notice(f"computing the reference log-probs of {len(self.samples)} samples")
        self.keep_sums()
        self.reference = None

    @abstractmethod
    def keep_sums(self) -> None:
        """Put the reference's log-prob sums beside the samples of both sets."""

    def sums_of_all(self, samples: SampleSet[SampleT]) -> list[list[float]]:
        """Return the reference's sums of the sequences of every sample, as `sums_of`."""
        lengths = samples.lengths.tolist()
        batches = self.eval_batches(len(lengths))
        return [sums for rows in batches for sums in self.sums_of(samples, rows, lengths)]

    def sums_of(
        self, samples: SampleSet[SampleT], rows: Sequence[int], lengths: Sequence[int]
    ) -> list[list[float]]:
        """Return the reference's sums of the sequences of each row of a batch; the same on every
        rank, and all must call.
        """
        assert self.reference is not None, "there is no reference to ask"
        own: dict[int, list[float]] = {}
        for part, batch in self.own_batches(samples, rows, lengths):
            sums = self.reference(batch.packed).float()
            if part:
                own.update(zip(part, sums.view(len(part), -1).tolist(), strict=True))
        found: dict[int, list[float]] = {}
        for parts in all_gather_object(own, group=self.strategy.dp_group):
            found.update(parts)
        return [found[row] for row in rows]

    def reference_sums(self, batch: PreferenceBatch) -> Tensor | None:
        """Return the reference's sums of a batch's sequences, (S,); None where the loss needs no
        reference.
        """
        if batch.ref_sums is not None or self.reference is None:
            return batch.ref_sums
        return self.reference(batch.packed)
