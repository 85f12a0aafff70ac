"""Distillation in chunks, against all logits at once."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from openrlhf.algorithms.distillation import (
    DIVERGENCES,
    Head,
    chunked_distillation,
)
from tests.helpers.tensors import Watch

VOCAB, HIDDEN, TEACHER_HIDDEN, TOKENS = 13, 5, 7, 11
TRANSFORMS = [{}, {"softcap": 1.5, "logit_scale": 1.3}]


def make_head(hidden, *, seed, num_tokens=TOKENS, vocab=VOCAB, dtype=torch.float64, **transform):
    generator = torch.Generator().manual_seed(seed)
    shapes = (num_tokens, hidden), (vocab, hidden), (vocab,)
    parts = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return Head(*(part.requires_grad_() for part in parts), **transform)


def make_tokens(num_tokens=TOKENS):
    generator = torch.Generator().manual_seed(9)
    return torch.randint(VOCAB, (num_tokens,), generator=generator)


def dense_logits(head):
    logits = F.linear(head.hidden_NH, head.weight_VH, head.bias_V) * head.logit_scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def dense(student, teacher, targets, *, coef, kind):
    """The same with torch.distributions, from all logits."""
    p, q = (
        torch.distributions.Categorical(logits=dense_logits(head)) for head in (student, teacher)
    )
    kl = torch.distributions.kl_divergence
    mean = torch.distributions.Categorical(probs=(p.probs + q.probs) / 2)
    divergence = {
        "forward": lambda: kl(q, p),
        "reverse": lambda: kl(p, q),
        "jsd": lambda: (kl(p, mean) + kl(q, mean)) / 2,
    }[kind]()
    logprobs = p.log_prob(targets)
    loss = (coef * divergence - (1 - coef) * logprobs).sum()
    return loss, logprobs, divergence


def inputs_of(head):
    return [x for x in (head.hidden_NH, head.weight_VH, head.bias_V) if x is not None]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("forward", 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)),
        ("reverse", 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)),
        (
            "jsd",
            0.25 * math.log(0.5 / 0.625)
            + 0.25 * math.log(0.5 / 0.375)
            + 0.375 * math.log(0.75 / 0.625)
            + 0.125 * math.log(0.25 / 0.375),
        ),
    ],
)
def test_one_token_by_hand(kind, expected):
    # student 1/2 1/2, teacher 3/4 1/4
    student = Head(torch.ones(1, 1), torch.zeros(2, 1))
    teacher = Head(torch.ones(1, 1), torch.tensor([[math.log(3)], [0.0]]))
    loss, logprobs, divergence = chunked_distillation(
        student, teacher, torch.tensor([1]), coef=0.4, kind=kind
    )
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert divergence.item() == pytest.approx(expected)
    assert loss.item() == pytest.approx(0.6 * math.log(2) + 0.4 * expected)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1024])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_values_and_gradients_equal_the_dense_ones(kind, transform, chunk_tokens):
    student = make_head(HIDDEN, seed=0, **transform)
    teacher = make_head(TEACHER_HIDDEN, seed=1, softcap=2.0, logit_scale=0.7)
    targets = make_tokens()
    found = chunked_distillation(
        student, teacher, targets, coef=0.4, kind=kind, chunk_tokens=chunk_tokens
    )
    expected = dense(student, teacher, targets, coef=0.4, kind=kind)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    # The loss is scaled, as by the tokens of the step, before its gradient is taken.
    results = [
        torch.autograd.grad(0.37 * loss, inputs_of(student)) for loss in (found[0], expected[0])
    ]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_logits_live_for_one_chunk_at_a_time(kind):
    sizes = {"num_tokens": 60, "vocab": 100}
    student, teacher = make_head(3, seed=0, **sizes), make_head(2, seed=1, **sizes)
    targets = make_tokens(60)
    with Watch() as watch:
        loss, *_ = chunked_distillation(
            student, teacher, targets, coef=0.4, kind=kind, chunk_tokens=6
        )
        loss.backward()
    assert watch.largest == 6 * 100


def test_the_heads_gradient_in_bf16_is_as_exact_in_many_chunks_as_in_one():
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    states, weight = draw(4096, 32).bfloat16(), draw(50, 32).bfloat16().requires_grad_()
    teacher, targets = Head(states, draw(50, 32).bfloat16()), torch.zeros(4096, dtype=torch.long)
    losses = {}
    for chunk_tokens in (4096, 32):
        weight.grad = None
        student = Head(states, weight)
        options = {"coef": 0.5, "kind": "forward", "chunk_tokens": chunk_tokens}
        chunked_distillation(student, teacher, targets, **options)[0].backward()
        losses[chunk_tokens] = weight.grad.double()
    assert (losses[32] - losses[4096]).norm() / losses[4096].norm() < 4e-3
