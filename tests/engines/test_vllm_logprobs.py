"""Log-probs are taken before top-p in both kinds of vLLM samplers, and strange ones are noticed."""

from __future__ import annotations

import torch

from openrlhf.engines.vllm_logprobs import report_full_logprobs

LOGITS = torch.tensor([[0.0, 1.0, 2.0]])


class SecondSampler:
    def _sample_random(self, logits, top_p):
        logits[0, :2] = -torch.inf
        return logits.argmax(-1), logits


def test_the_second_runner_takes_log_probs_of_logits_that_nothing_was_cut_from() -> None:
    sampler = SecondSampler()
    assert report_full_logprobs(sampler)
    sampled, logits = sampler._sample_random(LOGITS.clone(), torch.tensor([0.3]))
    assert sampled.tolist() == [2]
    assert torch.equal(logits, LOGITS)


def test_an_unknown_sampler_is_left_alone() -> None:
    assert not report_full_logprobs(object())
