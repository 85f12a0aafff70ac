"""Weights change while vLLM samples: every token is of the version it says, and its log-prob is
what the trainer computes with those weights.
"""

import time
from concurrent.futures import Future

import pytest
import torch

from openrlhf.engines.base import Completion
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.utils.tensors import fingerprint
from tests.engines.helpers import (
    PROMPT,
    buckets,
    engine_greedy,
    greedy,
    load,
    reference_logprobs,
    request,
    restored,
    send,
    shake,
    weights,
)


@pytest.fixture
def models(tiny_model_dir):
    """The policy at versions 0, 1 and 2."""
    policies = [load(tiny_model_dir) for _ in range(3)]
    for version, policy in enumerate(policies):
        if version:
            shake(policy, version)
    return policies


def sampled(engine: VLLMEngine, num_tokens: int, **sampling) -> Future[list[Completion]]:
    """A request that is running and has so many tokens, one a step."""
    num_steps = engine.num_steps + num_tokens
    (future,) = engine.submit([request(**sampling)])
    end_s = time.monotonic() + 20
    while engine.num_steps < num_steps and time.monotonic() < end_s:
        time.sleep(0.001)
    return future


def check(answer: Completion, models, versions: list[int], temperature: float = 1.0) -> None:
    """Each token has the log-prob of the policy it says it is of; these are in this order."""
    found = answer.token_versions
    assert len(found) == len(answer.token_ids)
    assert list(dict.fromkeys(found)) == versions == sorted(versions)
    assert answer.weight_version == versions[-1]
    reported = torch.tensor(answer.logprobs)
    for version in versions:
        mine = torch.tensor([v == version for v in found])
        expected = reference_logprobs(models[version], PROMPT, answer, temperature)
        assert (expected - reported)[mine].abs().max() < 1e-3
        for other in set(range(len(models))) - {version}:
            wrong = reference_logprobs(models[other], PROMPT, answer, temperature)
            assert (wrong - reported)[mine].abs().max() > 1e-2  # it would be seen


def test_samples_of_two_updates_are_what_each_policy_would_have_sampled(engine, models):
    settings = {"temperature": 0.7, "max_new_tokens": 300}
    with restored(engine, models[0], 0):
        several = engine.submit([request(num_samples=3, **settings), request(seed=5, **settings)])
        for version in (1, 2):
            watched = sampled(engine, 20, **settings)
            received = send(engine, weights(models[version]), version, keep_running=True)
            assert received == {n: fingerprint(t) for n, t in weights(models[version])}
        answers = [answer for future in several for answer in future.result(60)]
        assert len(answers) == 4 and len({answer.token_ids for answer in answers}) == 4
        for answer in answers:
            check(answer, models, [0, 1, 2], temperature=0.7)
        check(watched.result(60)[0], models, [1, 2], temperature=0.7)
        assert engine_greedy(engine) == greedy(models[2])  # the engine holds the new weights


def test_requests_that_come_during_an_update_wait_for_the_new_weights(engine, models):
    with restored(engine, models[0], 0):
        running = sampled(engine, 5, max_new_tokens=60)
        engine.begin_weight_update(True)
        [late] = engine.submit([request(max_new_tokens=20)])
        for bucket in buckets(weights(models[1]), 2**20):
            engine.receive_bucket(bucket)
        engine.finish_weight_update(1)
        check(late.result(30)[0], models[:2], [1])
        check(running.result(30)[0], models[:2], [0, 1])
