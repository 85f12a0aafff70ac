"""KL estimators and the adaptive coefficient."""

import math

import pytest
import torch

from openrlhf.algorithms.kl import (
    adaptive_kl_coef,
    kl_per_token,
    with_reverse_kl_gradient,
)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # d = log 2 and d = -log 2
    [
        ("k1", [math.log(2), -math.log(2)]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2]),
        ("k3", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]),
    ],
)
def test_estimators_by_hand(estimator, expected):
    logprobs = torch.tensor([0.5, 0.25]).log()
    ref_logprobs = torch.tensor([0.25, 0.5]).log()
    found = kl_per_token(logprobs, ref_logprobs, estimator=estimator)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("distance", [-1000.0, -50.0, 50.0, 1000.0])
def test_far_tokens_are_clamped_to_ten_and_have_a_finite_gradient(estimator, distance):
    logprobs = torch.tensor([distance], requires_grad=True)
    kl = kl_per_token(logprobs, torch.zeros(1), estimator=estimator)
    kl.sum().backward()
    assert kl.item() == (-10.0 if estimator == "k1" and distance < 0 else 10.0)
    assert logprobs.grad.item() == 0.0


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_every_estimator_can_have_the_gradient_of_the_reverse_kl(name):
    """Over every token, weighted by the policy that sampled it, the gradient is exact."""
    logits = torch.tensor([0.3, -0.2, 0.5, 0.1], requires_grad=True)
    logprobs = logits.log_softmax(-1)
    old = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    ref = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    [exact] = torch.autograd.grad(
        (logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True
    )
    kl = kl_per_token(logprobs, ref, estimator=name)
    unbiased = with_reverse_kl_gradient(kl, logprobs, old, ref)
    assert unbiased.tolist() == kl.tolist()
    [found] = torch.autograd.grad((old.exp() * unbiased).sum(), logits)
    assert found.tolist() == pytest.approx(exact.tolist(), abs=1e-6)


def test_the_weight_of_the_kl_gradient_is_at_most_ten():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    kl = torch.zeros(1)
    with_reverse_kl_gradient(kl, logprobs, torch.tensor([-9.0]), torch.tensor([-3.0])).backward()
    assert logprobs.grad.item() == pytest.approx(10 * 2.0)  # 10 at most, times logp - logref


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.6, 0.1 * (1 + 0.1 * 0.0128)),  # ten percent over the target
        (6.0, 0.1),
        (600.0, 0.1 * (1 + 0.2 * 0.0128)),  # the error is clipped
        (0.0, 0.1 * (1 - 0.2 * 0.0128)),
    ],
)
def test_coefficient_follows_the_clipped_error(kl, expected):
    found = adaptive_kl_coef(0.1, kl, target=6.0, horizon=10000, num_samples=128)
    assert found == pytest.approx(expected, rel=1e-12)
