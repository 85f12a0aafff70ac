"""A student and its teacher: two causal language models over the same packed rows.

The student's head computes cross-entropy and divergence in one pass over chunks of tokens, so the
logits of neither model ever exist as a whole. Who gathers the teacher's head is known outside.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from openrlhf.algorithms.distillation import (
    Distillation,
    DistillationTerms,
    Head,
    chunked_distillation,
)
from openrlhf.models.actor import Actor, ChunkedHead
from openrlhf.utils.packing import PackedBatch


class StudentTerms(NamedTuple):
    """Sums and numbers of the N target tokens of a batch; only loss and aux_loss have gradients."""

    loss: Tensor  # () sum over targets of (1 - coef) * -logp + coef * divergence
    logprobs: Tensor  # (N,) fp32
    divergence: Tensor  # (N,) fp32
    aux_loss: Tensor | None = None  # (B,) router loss of each sequence, of a mixture of experts


def distill(
    head: ChunkedHead,
    hidden_NH: Tensor,
    targets_N: Tensor,
    teacher: Head,
    coef: float,
    method: Distillation,
) -> tuple[Tensor, ...]:
    """Return the fields of `DistillationTerms`.

    Models of one family pad their vocabularies to different widths; logits that only one of
    them has stand for no token and are left out.
    """
    num_logits = min(len(head.weight), len(teacher.weight_VH))
    terms: DistillationTerms = chunked_distillation(
        first_logits(as_head(head, hidden_NH), num_logits),
        first_logits(teacher, num_logits),
        targets_N,
        ce_weights_N=hidden_NH.new_full(targets_N.shape, 1 - coef).float(),
        divergence_weights_N=hidden_NH.new_full(targets_N.shape, coef).float(),
        method=method,
    )
    return tuple(terms)


class Student(Actor):
    """The model that learns."""

    reads_whole_head = True

    def __init__(
        self, model: nn.Module, *, coef: float, method: Distillation, with_aux_loss: bool = False
    ) -> None:
        super().__init__(model, with_aux_loss=with_aux_loss)
        self.coef, self.method = coef, method

    def forward(self, batch: PackedBatch, teacher: Head) -> StudentTerms:
        """Return the loss on the targets of a batch, against what the teacher says there."""
        states = self.states_at(batch, batch.predict_index)
        targets_n = states.select(batch.targets)
        loss, *of_tokens = self.head(
            distill, states.hidden_nH, targets_n, teacher, self.coef, self.method
        )
        return StudentTerms(
            states.total(loss), *map(states.spread, of_tokens), aux_loss=states.aux_loss
        )


class Teacher(Actor):
    """The model that is learnt from; the student reads all of its head."""

    reads_whole_head = True

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return hidden states where a target is predicted, (N, K); of a shared row those the
        student reads on this rank.
        """
        return self.states_at(batch, batch.predict_index).hidden_nH

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """Return what must be whole while the student reads the teacher's head."""
        return list(self.head.parameters())


def as_head(head: ChunkedHead, hidden_NH: Tensor) -> Head:
    """Return states with the head in front of which they stand."""
    return Head(hidden_NH, head.weight, head.bias, head.softcap, head.scale)


def first_logits(head: Head, num_logits: int) -> Head:
    """Return the head without the logits from `num_logits` on."""
    if len(head.weight_VH) == num_logits:
        return head
    bias_V = None if head.bias_V is None else head.bias_V[:num_logits]
    return replace(head, weight_VH=head.weight_VH[:num_logits], bias_V=bias_V)
