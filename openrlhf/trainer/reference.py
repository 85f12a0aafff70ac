"""The frozen policy that a preference loss measures against: a second model, or the own base.

An adapter trained on a base needs no second copy of it: switched off, the policy is its reference.
It can be asked about all samples once, before the first step; a second model is then let go of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from openrlhf.algorithms.tokens import segment_sum
from openrlhf.distributed.collectives import all_gather_object
from openrlhf.distributed.train_engine import EvalEngine, TrainEngine
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import adapters_disabled, is_adapted
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.base_trainer import (
    BaseTrainer,
    SampleSet,
    SampleT,
    SupervisedRun,
    load_actor,
    load_options,
)
from openrlhf.trainer.preference_batch import PreferenceBatch
from openrlhf.utils.logging import notice
from openrlhf.utils.packing import PackedBatch


class Reference:
    """Frozen weights: a second model or, with `actor`, the trained one with its adapter off."""

    def __init__(self, engine: EvalEngine | TrainEngine, actor: Actor | None = None) -> None:
        self.engine = engine
        self.actor = actor

    @torch.no_grad()
    def __call__(self, batch: PackedBatch) -> Tensor:
        """Return the sums of log-probs over each sequence's targets, (S,) fp32."""
        with_base = nullcontext() if self.actor is None else adapters_disabled(self.actor.model)
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
    actor = Actor(load_causal_lm(path, **load_options(run.config)))
    return Reference(run.strategy.prepare_eval(actor, offload=run.config.ref.offload))


class ReferencedTrainer(BaseTrainer[SampleT, PreferenceBatch]):
    """A loop whose loss compares with a reference; with `precompute` that is asked once, before
    the first step.
    """

    reference: Reference | None
    precompute: bool
    is_precomputed = False

    @classmethod
    def load_model(cls, config: Any, model_path: str) -> Actor:
        return load_actor(config, model_path, has_dropout=False)

    def fit(self, *, after_step: Callable[[], None] | None = None) -> None:
        if self.precompute and self.reference is not None and not self.is_finished:
            self.precompute_reference()
        super().fit(after_step=after_step)

    def precompute_reference(self) -> None:
        """Keep the reference's log-probs of both sets and let go of the model."""
        assert self.reference is not None, "there is no reference to ask"
        if self.strategy.is_main:
            notice(f"computing the reference log-probs of {len(self.samples)} samples")
        self.keep_sums()
        self.reference, self.is_precomputed = None, True

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
