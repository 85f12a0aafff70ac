"""However a step is cut into micro-batches, the gradient is that of the whole step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.balancing import fixed_batches, token_budget_batches
from openrlhf.algorithms.kl import kl_per_token
from openrlhf.algorithms.language_loss import sft_loss
from openrlhf.algorithms.policy_loss import (
    AGGREGATIONS,
    POLICY_LOSSES,
    ClipRange,
    aggregate,
    value_loss,
)
from openrlhf.algorithms.tokens import chunked_logprobs

HIDDEN, VOCAB, MAX_NEW = 6, 17, 12


def make_step(counts):
    """Random hidden states, targets and signals of every sample, and one LM head."""
    generator = torch.Generator().manual_seed(len(counts))
    num_tokens = sum(counts)
    step = {
        "hidden": torch.randn(num_tokens, HIDDEN, generator=generator),
        "targets": torch.randint(VOCAB, (num_tokens,), generator=generator),
        "old": torch.randn(num_tokens, generator=generator) * 0.3 - 2.8,
        "advantages": torch.randn(num_tokens, generator=generator),
    }
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3
    return {name: x.split(counts) for name, x in step.items()}, head.requires_grad_()


def ppo_step(kind, mode):
    def loss(step, head, counts, whole):
        logprobs, entropy = chunked_logprobs(
            step["hidden"], head, step["targets"], with_entropy=True, temperature=0.8
        )
        terms = POLICY_LOSSES[kind].terms(
            logprobs,
            step["old"],
            advantages_N=step["advantages"],
            num_actions_B=counts,
            clip=ClipRange(dual=2.0),
        )
        kl = kl_per_token(logprobs, step["old"] - 0.1, estimator="k2")
        per_token = terms.loss_N + 0.1 * kl - 0.01 * entropy
        return aggregate(per_token, counts, mode=mode, **whole)

    return loss


def critic_step(step, head, counts, whole):
    values = step["hidden"] @ head[0]
    terms = value_loss(values, step["old"], returns_N=step["advantages"], clip=0.5)
    return aggregate(terms.loss_N, counts, mode="token_mean", **whole)


def supervised_step(step, head, counts, whole):
    logprobs, _ = chunked_logprobs(step["hidden"], head, step["targets"])
    return sft_loss(logprobs, num_tokens_global=whole["num_tokens_global"])


STEPS = {
    f"{kind}-{mode}": ppo_step(kind, mode) for kind in POLICY_LOSSES for mode in AGGREGATIONS
} | {"critic": critic_step, "sft": supervised_step}


def gradient(loss, counts, batches):
    """Gradient and loss of the head after all micro-batches of the step."""
    step, head = make_step(counts)
    whole = {
        "num_tokens_global": sum(counts),
        "num_seqs_global": sum(1 for count in counts if count),
        "max_new_tokens": MAX_NEW,
    }
    total = 0.0
    for batch in batches:
        part = {name: torch.cat([x[index] for index in batch]) for name, x in step.items()}
        value = loss(part, head, torch.tensor([counts[index] for index in batch]), whole)
        value.backward()
        total += value.item()
    return head.grad, total


@pytest.mark.parametrize("name", STEPS)
def test_64_ragged_samples_give_one_gradient_however_they_are_batched(name):
    lengths = torch.randint(0, MAX_NEW, (64,), generator=torch.Generator().manual_seed(1))
    counts = lengths.tolist()
    expected, total = gradient(STEPS[name], counts, fixed_batches(64, 64))
    assert expected.norm() > 1e-3
    for batches in (
        fixed_batches(64, 8),
        fixed_batches(64, 1),
        token_budget_batches(counts, 40),
        [*fixed_batches(40, 8), list(range(40, 64))],
    ):
        found, found_total = gradient(STEPS[name], counts, batches)
        assert (found - expected).norm() / expected.norm() < 1e-6
        assert found_total == pytest.approx(total, rel=1e-5, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, MAX_NEW), min_size=1, max_size=10), st.data())
def test_any_cut_gives_the_same_gradient(counts, data):
    counts = [*counts, 3]
    owner = data.draw(st.lists(st.integers(0, 3), min_size=len(counts), max_size=len(counts)))
    batches = [[i for i, part in enumerate(owner) if part == k] for k in sorted(set(owner))]
    for name in ("ppo-token_mean", "gspo-seq_mean", "ppo-seq_sum_norm"):
        expected, _ = gradient(STEPS[name], counts, [list(range(len(counts)))])
        found, _ = gradient(STEPS[name], counts, batches)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
