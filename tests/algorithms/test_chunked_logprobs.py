"""Log-probs and entropy of an LM head in chunks, against all logits at once."""

import pytest
import torch
from torch import Tensor

from openrlhf.algorithms.tokens import chunked_logprobs
from tests.helpers.tensors import Watch

VOCAB, HIDDEN, TOKENS = 13, 5, 11


def dense(hidden, weight, targets, *, bias=None, temperature=1.0, softcap=None, logit_scale=1.0):
    """The same by torch.distributions, from all logits."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(
        torch.promote_types(hidden.dtype, torch.float32)
    )
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(targets), distribution.entropy()


def make_inputs(dtype=torch.float64, num_tokens=TOKENS, vocab=VOCAB, hidden=HIDDEN):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(num_tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(vocab, generator=generator).to(dtype).requires_grad_()
    return states, weight, bias, torch.randint(vocab, (num_tokens,), generator=generator)


OPTIONS = [{}, {"temperature": 0.6, "softcap": 1.5, "logit_scale": 1.3}]


def test_log_prob_and_entropy_by_hand():
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [3.0]]).log1p()
    logprobs, entropy, is_top = chunked_logprobs(
        hidden, weight, torch.tensor([1]), with_entropy=True
    )
    # logits 0 and log 4: probabilities 1/5 and 4/5
    assert logprobs.item() == pytest.approx(-0.2231435513)
    assert entropy.item() == pytest.approx(0.5004024235)
    assert is_top.item()


@pytest.mark.parametrize("chunk_tokens", [1, 4, None])
@pytest.mark.parametrize("options", OPTIONS)
def test_values_equal_the_dense_ones(options, chunk_tokens):
    hidden, weight, bias, targets = make_inputs()
    logprobs, entropy, is_top = chunked_logprobs(
        hidden,
        weight,
        targets,
        bias_V=bias,
        with_entropy=True,
        chunk_tokens=chunk_tokens,
        **options,
    )
    expected = dense(hidden, weight, targets, bias=bias, **options)
    torch.testing.assert_close((logprobs, entropy), expected, rtol=1e-12, atol=1e-12)
    assert is_top.tolist() == ((hidden @ weight.t() + bias).argmax(-1) == targets).tolist()


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_pass_gradcheck(options, with_entropy):
    hidden, weight, bias, targets = make_inputs()

    def outputs(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        found = chunked_logprobs(
            hidden,
            weight,
            targets,
            bias_V=bias,
            with_entropy=with_entropy,
            chunk_tokens=4,
            **options,
        )
        return found[: 1 + with_entropy]

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


def test_no_tokens_give_no_log_probs_and_zero_gradients():
    hidden, weight, bias, targets = make_inputs(torch.float32, num_tokens=0)
    logprobs, entropy, _ = chunked_logprobs(hidden, weight, targets, bias_V=bias, with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert not weight.grad.any() and not bias.grad.any() and hidden.grad.shape == (0, HIDDEN)


def test_huge_logits_neither_overflow_nor_lose_their_gradient():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    logprobs, entropy, _ = chunked_logprobs(hidden, weight, torch.tensor([0, 0]), with_entropy=True)
    assert logprobs.tolist() == [0.0, -2e4] and entropy.tolist() == [0.0, 0.0]
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.tolist() == [[0.0], [2.0]]


def test_logits_live_for_one_chunk_at_a_time():
    hidden, weight, bias, targets = make_inputs(num_tokens=60, vocab=100)
    with Watch() as watch:
        found = chunked_logprobs(
            hidden, weight, targets, bias_V=bias, with_entropy=True, chunk_tokens=6
        )
        (found[0].sum() + found[1].sum()).backward()
    assert watch.largest == 6 * 100


def test_the_weights_gradient_in_bf16_is_as_exact_in_many_chunks_as_in_one():
    states, weight, _, targets = make_inputs(torch.bfloat16, num_tokens=4096, vocab=50, hidden=32)
    exact = torch.nn.Parameter(weight.detach().double())
    dense(states.detach().double(), exact, targets)[0].sum().backward()
    chunked_logprobs(states, weight, targets, chunk_tokens=32)[0].sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    assert (weight.grad.double() - exact.grad).norm() / exact.grad.norm() < 3e-3
