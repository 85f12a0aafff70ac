"""The frozen policy that a preference loss measures against: a second model, or the own base.

An adapter trained on a base needs no second copy of it: switched off, the policy is its reference.
It can be asked about all samples once, before the first step; a second model is then let go of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from openrlhf.algorithms.tokens import segment_sum
from openrlhf.distributed.collectives import all_gather_object
from openrlhf.distributed.train_engine import EvalEngine, TrainEngine
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import adapters_disabled, is_adapted
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.base_trainer import BaseTrainer, Batch, SampleSet, SampleT
from openrlhf.trainer.supervised_run import SupervisedRun, load_options
from openrlhf.utils.logging import notice
from openrlhf.utils.packing import PackedBatch


class Reference(Protocol):
    """Says how likely responses are under frozen weights."""

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Sums of log-probs over each sequence's targets, (S,) fp32, without gradients."""


class FrozenReference:
    """A second model."""

    def __init__(self, engine: EvalEngine) -> None:
        self.engine = engine

    def __call__(self, batch: PackedBatch) -> Tensor:
        """See Reference."""
        return segment_sum(self.engine(batch).logprobs, batch.num_targets)


class OwnBase:
    """The policy itself with its adapter switched off."""

    def __init__(self, engine: TrainEngine, actor: Actor) -> None:
        self.engine = engine
        self.actor = actor

    @torch.no_grad()
    def __call__(self, batch: PackedBatch) -> Tensor:
        """See Reference."""
        with adapters_disabled(self.actor.model), evaluating(self.engine):
            return segment_sum(self.engine(batch).logprobs, batch.num_targets)


@contextmanager
def evaluating(engine: TrainEngine) -> Iterator[None]:
    """A block in evaluation mode."""
    was_training = engine.module.training
    engine.eval()
    yield
    if was_training:
        engine.train()


def make_reference(run: SupervisedRun[Any], path: str, *, offload: bool = False) -> Reference:
    """The model at `path`, frozen; no second copy of it when it lies under the policy's adapter."""
    assert isinstance(run.model, Actor), type(run.model)
    if is_adapted(run.model.model) and path == run.inputs.model_path:
        return OwnBase(run.engine, run.model)
    actor = Actor(load_causal_lm(path, **load_options(run.config)))
    return FrozenReference(run.strategy.prepare_eval(actor, offload=offload))


class PackedBatches(Batch, Protocol):
    """A batch with a packed row in it."""

    @property
    def packed(self) -> PackedBatch:
        """What a model is asked about."""


PackedT = TypeVar("PackedT", bound=PackedBatches)


class ReferencedTrainer(BaseTrainer[SampleT, PackedT]):
    """A loop whose loss looks at a reference; `precompute` asks it once, before the first step."""

    reference: Reference | None
    precompute: bool

    def fit(self, *, after_step: Callable[[], None] | None = None) -> None:
        """Ask the reference about everything first, where that is wanted; then train."""
        if self.precompute and self.reference is not None and not self.is_finished:
            self.precompute_reference()
        super().fit(after_step=after_step)

    def precompute_reference(self) -> None:
        """Keep the reference's log-probs of both sets and let go of the model."""
        assert self.reference is not None, "there is no reference to ask"
        if self.strategy.is_main:
            notice(f"computing the reference log-probs of {len(self.samples)} samples")
        self.keep_answers(self.reference)
        self.reference = None

    @abstractmethod
    def keep_answers(self, ask: Reference) -> None:
        """Put what `ask` says about the samples of both sets beside them."""

    @torch.no_grad()
    def ask_all(
        self,
        samples: SampleSet[SampleT],
        ask: Reference,
        batches: Iterable[Sequence[int]] | None = None,
    ) -> Tensor:
        """What the reference says about the S sequences of every sample -> (len, S) fp32.

        The same on every rank; all must call. `batches` are those in which samples are asked about;
        unset: batches of a step's size, in file order.
        """
        lengths = samples.lengths.tolist()
        own: dict[int, list[float]] = {}
        for rows in self.eval_batches(len(lengths)) if batches is None else batches:
            share = self.share_of(rows, lengths)
            for index in range(share.num_micro_batches):
                part = share.micro_batches[index] if index < len(share.micro_batches) else []
                batch = self.collate([samples[row] for row in part] or [self.empty_sample()])
                answers = ask(batch.packed.to(self.engine.device)).float()
                if part:
                    own.update(zip(part, answers.view(len(part), -1).tolist(), strict=True))
        found: dict[int, list[float]] = {}
        for answered in all_gather_object(own, group=self.strategy.dp_group):
            found.update(answered)
        return torch.tensor([found[row] for row in range(len(lengths))], dtype=torch.float32)
