"""Shared by the preference trainers: packed pairs and labelled responses, the numbers of a pair,
and the frozen reference.

The reference is a second model or the policy's own base: an adapter that is switched off. It can be
asked about all samples once, before the first step; a second model is then let go of, unless the
recipe needs it for more.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from openrlhf.algorithms.preference_loss import PairLogps
from openrlhf.algorithms.tokens import segment_sum
from openrlhf.datasets.reward_dataset import PreferencePair
from openrlhf.datasets.unpaired_preference_dataset import UnpairedExample
from openrlhf.distributed.collectives import all_gather_object
from openrlhf.distributed.train_engine import EvalEngine, TrainEngine
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import is_adapted
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.base_trainer import (
    BaseTrainer,
    Lengths,
    Samples,
    SampleSet,
    SampleT,
    add_means,
    load_actor,
)
from openrlhf.utils.console import notice
from openrlhf.utils.images import ImageProcessor
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import Batch, PackedBatch


class ReferencedSamples(Generic[SampleT]):
    """Samples that carry the log-prob sums of their responses under a frozen model."""

    def __init__(self, samples: SampleSet[SampleT], sums: Sequence[Sequence[float]]) -> None:
        self.samples = samples
        self.lengths, self.costs = samples.lengths, samples.costs
        self._sums = sums

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> SampleT:
        return replace(self.samples[index], ref_sums=self._sums[index])  # type: ignore[type-var]


@dataclass(frozen=True)
class PreferenceBatch(Batch):
    """B samples in one packed row of S sequences.

    Example: two pairs without margins: four sequences in `packed`, `labels` tensor([0.0, 0.0]).
    """

    packed: PackedBatch
    labels: Tensor  # (B,) fp32 margin of each pair, or bool: the answer is desirable
    ref_sums: Tensor | None = None  # (S,) fp32, where they were computed before training

    @classmethod
    def of(
        cls,
        samples: Sequence[PreferencePair] | Sequence[UnpairedExample],
        packed: PackedBatch,
        labels: Tensor,
    ) -> "PreferenceBatch":
        """Add the reference's sums that the samples carry, if it was asked before."""
        sums = [sample.ref_sums for sample in samples if sample.ref_sums is not None]
        assert len(sums) in (0, len(samples)), "all have reference log-probs, or none"
        return cls(packed, labels, torch.tensor(sums).flatten() if sums else None)

    def __len__(self) -> int:
        return len(self.labels)


def pack_pairs(
    pairs: Sequence[PreferencePair], processor: ImageProcessor | None = None
) -> PreferenceBatch:
    """Pack pairs: sequence 2i of the row is the chosen side of pair i, 2i + 1 the rejected one."""
    token_ids = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    masks = [mask for pair in pairs for mask in (pair.chosen_mask, pair.rejected_mask)]
    margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float32)
    packed = PackedBatch.from_sequences(token_ids, masks)
    packed = packed.with_pictures([pair.images for pair in pairs for _ in range(2)], processor)
    return PreferenceBatch.of(pairs, packed, margins)


def by_side(values: Tensor) -> Tensor:
    """Return (2B,) values as (2, B): a row of the chosen and one of the rejected side."""
    return values.view(-1, 2).t()


def pair_logps(batch: PreferenceBatch, logprobs_N: Tensor, ref_sums: Tensor | None) -> PairLogps:
    """Return the sums of log-probs and the lengths of both sides, from the log-probs of all targets
    and the sums of a reference, (2B,), if there is one.
    """
    lengths = batch.packed.num_targets
    sums = segment_sum(logprobs_N, lengths)
    return PairLogps(
        by_side(sums), by_side(lengths), None if ref_sums is None else by_side(ref_sums)
    )


def pair_metrics(losses_B: Tensor, better_B: Tensor, worse_B: Tensor) -> Metrics:
    """Return the means over pairs of the losses and of the rewards of both sides, and the share of
    pairs in the right order.
    """
    metrics = Metrics()
    means = {
        "loss": losses_B,
        "chosen_reward": better_B,
        "reject_reward": worse_B,
        "acc": better_B > worse_B,
    }
    add_means(metrics, means)
    return metrics


def half_pairs(losses_B: Tensor) -> Tensor:
    """Return the weight of each sequence in the router loss, (2B,): half a pair."""
    return losses_B.new_full((2 * len(losses_B),), 0.5)


@contextmanager
def evaluating(engine: EvalEngine | TrainEngine) -> Iterator[None]:
    """Put the model in evaluation mode within the block."""
    was_training = engine.module.training
    engine.module.eval()
    yield
    engine.module.train(was_training)


class ReferencedTrainer(BaseTrainer[SampleT, PreferenceBatch]):
    """A loop whose loss compares with a reference; with `precompute` that is asked once, before
    the first step.
    """

    keeps_reference: ClassVar[bool] = False  # after it was asked about all samples
    # None where the loss needs none, or it was asked before.
    reference: EvalEngine | TrainEngine | None = None

    @classmethod
    def other_models(cls, config: Any) -> dict[str, bool]:
        own = None if config.ds.lora.rank else config.model.model_name_or_path  # an adapter's base
        path = config.ref.model_name_or_path or own
        return {path: config.ref.offload} if path else {}

    @classmethod
    def load_model(cls, config: Any, model_path: str) -> Actor:
        return load_actor(config, model_path, has_dropout=False)

    def load_reference(self, path: str) -> EvalEngine | TrainEngine:
        """Load the model at `path`, frozen; the policy's own base is not loaded twice."""
        if is_adapted(self.model.model) and path == self.inputs.model_path:
            return self.engine
        actor = Actor(load_causal_lm(path, self.config))
        return self.strategy.prepare_eval(actor, offload=self.config.ref.offload)

    def fit(self, *, after_step: Callable[[], None] | None = None) -> None:
        is_asked = self.config.ref.precompute_log_probs
        if is_asked and self.reference is not None and not self.is_finished:
            self.precompute_reference()
        super().fit(after_step=after_step)

    def precompute_reference(self) -> None:
        """Keep the reference's log-probs of both sets and let go of the model."""
        if self.strategy.is_main:
            notice(f"computing the reference log-probs of {len(self.samples)} samples")
        self.samples = self._referenced(self.inputs.samples)
        if self.inputs.eval_samples is not None:
            self.eval_samples = self._referenced(self.inputs.eval_samples)
        if not self.keeps_reference:
            self.reference = None

    def _referenced(self, samples: SampleSet[SampleT]) -> ReferencedSamples[SampleT]:
        lengths = samples.lengths.tolist()
        parts = (self.sums_of(samples, rows, lengths) for rows in self.eval_batches(len(lengths)))
        return ReferencedSamples(samples, [sums for part in parts for sums in part])

    def sums_of(
        self, samples: Samples[SampleT], rows: Sequence[int], lengths: Lengths
    ) -> list[list[float]]:
        """Return the reference's sums of the sequences of each row of a batch; the same on every
        rank, and all must call.
        """
        own: dict[int, list[float]] = {}
        for part, batch in self.own_batches(samples, rows, lengths):
            sums = self.reference_sums(batch.to(self.engine.device))
            if part:
                own.update(zip(part, sums.float().view(len(part), -1).tolist(), strict=True))
        found: dict[int, list[float]] = {}
        for parts in all_gather_object(own, group=self.strategy.dp_group):
            found.update(parts)
        return [found[row] for row in rows]

    def summarise(self, values: dict[str, float]) -> dict[str, float]:
        """Return the mean reward of wanted responses above that of unwanted ones."""
        if not {"chosen_reward", "reject_reward"} <= values.keys():
            return {}
        return {"reward_margin": values["chosen_reward"] - values["reject_reward"]}

    @torch.no_grad()
    def reference_sums(self, batch: PreferenceBatch) -> Tensor | None:
        """Return the reference's sums of log-probs over the targets of each sequence, (S,) fp32;
        None where the loss needs no reference.
        """
        if batch.ref_sums is not None or self.reference is None:
            return batch.ref_sums
        is_own = self.reference is self.engine  # the policy with its adapter off
        with_base = self.model.model.disable_adapter() if is_own else nullcontext()
        with with_base, evaluating(self.reference):
            logprobs = self.reference(batch.packed).logprobs
        return segment_sum(logprobs, batch.packed.num_targets)
