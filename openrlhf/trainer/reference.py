"""The frozen policy that a preference loss measures against: a second model, or the own base.

An adapter trained on a base needs no second copy of it: switched off, the policy is its reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from openrlhf.algorithms.tokens import segment_sum
from openrlhf.distributed.train_engine import EvalEngine, TrainEngine
from openrlhf.models.actor import Actor
from openrlhf.models.adapters import adapters_disabled, is_adapted
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.supervised_run import SupervisedRun, load_options
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
