"""Cross-entropy and distance to a teacher at each target token, without ever holding all logits.

Shapes: N target tokens end to end, H and K hidden sizes of student and teacher, V vocabulary, C
tokens of one chunk. Gradients are made in the forward, while the chunk's logits are there: the
weights of neither head are needed in the backward (under ZeRO-3 the teacher's are gone by then).
The price is one more tensor of the size of the student's head between forward and backward.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.algorithms.tokens import add_product_, as_types_of, compute_dtype, zeros_to_sum

CHUNK_TOKENS = 1024


def forward_kl(student_CV: Tensor, teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(q || p) = sum q (log q - log p), (C,), and its gradient p - q, (C, V).

    As of all divergences here: from log p of the student and log q of the teacher, each
    normalised, with the gradient in the student's logits. Hinton et al., arXiv 1503.02531.
    """
    q_CV = teacher_CV.exp()
    divergence_C = (teacher_CV - student_CV).mul_(q_CV).sum(-1)
    return divergence_C, student_CV.exp().sub_(q_CV)


def reverse_kl(student_CV: Tensor, teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(p || q) = sum p (log p - log q), and p (log p - log q - KL). MiniLLM, arXiv
    2306.08543.
    """
    p_CV = student_CV.exp()
    gap_CV = student_CV - teacher_CV
    divergence_C = (p_CV * gap_CV).sum(-1)
    return divergence_C, gap_CV.sub_(divergence_C.unsqueeze(-1)).mul_(p_CV)


def jensen_shannon(student_CV: Tensor, teacher_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, and p (log p - log m - KL(p ||
    m)) / 2.

    GKD with beta 1/2, arXiv 2306.13649.
    """
    mixture_CV = torch.logaddexp(student_CV, teacher_CV).sub_(math.log(2))
    teacher_part_C = (teacher_CV - mixture_CV).mul_(teacher_CV.exp()).sum(-1)
    student_part_C, grad_CV = reverse_kl(student_CV, mixture_CV)
    return (student_part_C + teacher_part_C) / 2, grad_CV.div_(2)


DIVERGENCES = {"forward": forward_kl, "reverse": reverse_kl, "jsd": jensen_shannon}


@dataclass(frozen=True)
class Head:
    """States in front of an LM head, the head, and what its family does to logits after it.

    z = cap(logit_scale * (hidden @ weight.T + bias)) with cap(x) = softcap * tanh(x / softcap).

    Example: 4 tokens, hidden size 64 and a vocabulary of 1000: `Head(hidden, weight, softcap=30.0)`
    with `hidden` (4, 64) and `weight` (1000, 64).
    """

    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0

    def logits(self, rows: slice) -> Tensor:
        """Return z of some of the tokens, (C, V), in fp32 but for the matrix product."""
        raw_CV = self.hidden_NH[rows] @ self.weight_VH.t()
        z_CV = raw_CV.to(compute_dtype(raw_CV))
        if self.bias_V is not None:
            z_CV = z_CV.add_(self.bias_V)
        if self.softcap is None:
            return z_CV if self.logit_scale == 1 else z_CV.mul_(self.logit_scale)
        return z_CV.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap)

    def slope(self, z_CV: Tensor) -> Tensor | float:
        """Return d z / d raw logits, (C, V), or one number where it is the same everywhere."""
        if self.softcap is None:
            return self.logit_scale
        return (z_CV / self.softcap).square_().neg_().add_(1).mul_(self.logit_scale)


def chunked_distillation(
    student: Head,
    teacher: Head,
    targets_N: Tensor,
    *,
    coef: float,
    kind: str,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss: (1 - coef) of the cross-entropy plus coef of a divergence, summed over the
    tokens; and, without gradient, log-probs of the targets and divergences, (N,) each. All fp32.

    Gradients reach the student's Head alone. They are computed here and multiplied in the backward
    by the gradient of the loss. Memory: at most eight blocks of `chunk_tokens` x V fp32 numbers. No
    tokens: 0, with zero gradients.
    """
    num_tokens, vocab_size = len(targets_N), len(student.weight_VH)
    assert len(student.hidden_NH) == len(teacher.hidden_NH) == num_tokens, "one target per state"
    assert len(teacher.weight_VH) == vocab_size, "student and teacher differ in vocabulary"
    inputs = student.hidden_NH, student.weight_VH, student.bias_V
    num_chunks = -(-num_tokens // chunk_tokens)
    grads = [
        zeros_to_sum(x, num_chunks=num_chunks if x is not student.hidden_NH else 1)
        if torch.is_grad_enabled() and x is not None and x.requires_grad
        else None
        for x in inputs
    ]
    with torch.no_grad():
        logprobs_N = student.hidden_NH.new_empty(num_tokens, dtype=compute_dtype(inputs[0]))
        divergence_N = torch.empty_like(logprobs_N)
        for start in range(0, num_tokens, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logprobs_N[rows], divergence_N[rows], grad_CV = _chunk(
                student, teacher, targets_N, rows, coef=coef, kind=kind
            )
            _add_gradients(grads, grad_CV, student, rows)
        loss = (coef * divergence_N - (1 - coef) * logprobs_N).sum()
    grads = list(as_types_of(inputs, grads))
    return _WithGradients.apply(loss, grads, *inputs), logprobs_N, divergence_N


class _WithGradients(torch.autograd.Function):
    """A number whose gradients in some inputs were computed with it."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, grads: list[Tensor | None], *inputs: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*grads)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else grad * grad_loss for grad in ctx.saved_tensors)
        return None, None, *grads


def _chunk(
    student: Head,
    teacher: Head,
    targets_N: Tensor,
    rows: slice,
    *,
    coef: float,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs (C,), divergence (C,) and the loss's gradient in the raw logits (C, V)."""
    targets_C1 = targets_N[rows].unsqueeze(-1)
    student_CV = student.logits(rows)
    slope = student.slope(student_CV)
    student_CV = _log_softmax_(student_CV)
    teacher_CV = _log_softmax_(teacher.logits(rows))
    divergence_C, grad_CV = DIVERGENCES[kind](student_CV, teacher_CV)
    logprobs_C1 = student_CV.gather(-1, targets_C1)
    # d(-log p[target]) / dz_j = p_j - [j is target]
    ce_weight_C1 = torch.full_like(logprobs_C1, 1 - coef)
    grad_CV.mul_(coef).add_(student_CV.exp_(), alpha=1 - coef)
    grad_CV.scatter_add_(-1, targets_C1, -ce_weight_C1)
    return logprobs_C1.squeeze(-1), divergence_C, grad_CV.mul_(slope)


def _log_softmax_(logits_CV: Tensor) -> Tensor:
    return logits_CV.sub_(logits_CV.logsumexp(-1, keepdim=True))


def _add_gradients(grads: list[Tensor | None], grad_CV: Tensor, student: Head, rows: slice) -> None:
    """Carry the gradient of raw logits to hidden states, weight and bias, where wanted."""
    grad_hidden_NH, grad_weight_VH, grad_bias_V = grads
    if grad_bias_V is not None:
        grad_bias_V.add_(grad_CV.sum(0))
    grad_CV = grad_CV.to(student.weight_VH.dtype)
    if grad_hidden_NH is not None:
        torch.mm(grad_CV, student.weight_VH, out=grad_hidden_NH[rows])
    if grad_weight_VH is not None:
        add_product_(grad_weight_VH, grad_CV, student.hidden_NH[rows])
