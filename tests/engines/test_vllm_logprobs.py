"""Log-probs are taken before top-p in both kinds of vLLM samplers, and strange ones are noticed."""

from __future__ import annotations

import torch

from openrlhf.engines.vllm_logprobs import report_full_logprobs

LOGITS = torch.tensor([[0.0, 1.0, 2.0]])


class TopPStep:
    """Cuts all but the likeliest token in place, as vLLM may."""

    logprobs_mode = "processed_logprobs"

    def __call__(self, logits, generators, top_k, top_p):
        assert self.logprobs_mode == "raw_logprobs"
        logits[0, :2] = -torch.inf
        return logits.argmax(-1), None


class FirstSampler:
    def __init__(self) -> None:
        self.topk_topp_sampler = TopPStep()


class SecondSampler:
    def _sample_random(self, logits, top_p):
        logits[0, :2] = -torch.inf
        return logits.argmax(-1), logits


def test_the_first_runner_answers_log_probs_of_all_tokens() -> None:
    sampler = FirstSampler()
    assert report_full_logprobs(sampler)
    sampled, logprobs = sampler.topk_topp_sampler(LOGITS.clone(), {}, None, torch.tensor([0.3]))
    assert sampled.tolist() == [2]
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(-1))


def test_the_second_runner_takes_log_probs_of_logits_that_nothing_was_cut_from() -> None:
    sampler = SecondSampler()
    assert report_full_logprobs(sampler)
    sampled, logits = sampler._sample_random(LOGITS.clone(), torch.tensor([0.3]))
    assert sampled.tolist() == [2]
    assert torch.equal(logits, LOGITS)


def test_an_unknown_sampler_is_left_alone() -> None:
    assert not report_full_logprobs(object())
