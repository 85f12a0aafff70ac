"""A model's own `generate`: what it samples, and the log-probs it reports."""

from __future__ import annotations

import pytest
import torch

from openrlhf.engines.own_generate import OwnGenerate
from tests.engines.helpers import (
    PROMPT,
    greedy,
    largest_gap,
    load,
    request,
)
from tests.tiny import make_model

RAGGED = [tuple(range(10, 10 + n)) for n in (1, 30, 7, 64, 2, 19, 5, 40)]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_are_those_of_the_trainer(model, temperature):
    requests = [request(p, temperature=temperature, max_new_tokens=16) for p in RAGGED]
    answers = OwnGenerate(model).generate(requests)
    for prompt, [answer] in zip(RAGGED, answers, strict=True):
        assert len(answer.token_ids) == 16
        assert largest_gap(model, prompt, answer, temperature) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("qwen2", {}),
        ("gpt_neox", {}),
        ("bloom", {}),
        ("gemma2", {"sliding_window": 16, "attn_implementation": "eager"}),
        ("mistral", {"sliding_window": 16}),
    ],
)
def test_ragged_prompts_decode_greedily_as_alone(tmp_path, architecture, overrides):
    model = load(make_model(tmp_path, architecture, **overrides))
    requests = [request(p, temperature=0.0, max_new_tokens=12) for p in RAGGED[:5]]
    answers = OwnGenerate(model, max_num_rows=3).generate(requests)
    for prompt, [answer] in zip(RAGGED, answers, strict=False):
        assert answer.token_ids == greedy(model, 12, prompt)
        assert largest_gap(model, prompt, answer, 1.0) < 1e-4


def test_every_stop_id_stops_and_belongs_to_the_answer(model):
    greedy_tokens = greedy(model, 24)
    stop = greedy_tokens[10]
    expected = greedy_tokens[: greedy_tokens.index(stop) + 1]
    for stops in [(stop,), (1, stop), (stop, 261)]:
        sampling = request(temperature=0.0, max_new_tokens=24, stop_token_ids=stops)
        [[answer]] = OwnGenerate(model).generate([sampling])
        assert (answer.token_ids, answer.finish_reason) == (expected, "stop")
        assert len(answer.logprobs) == len(expected)


def test_top_p_leaves_the_tail_out_but_not_the_logprobs(model):
    [answers] = OwnGenerate(model).generate(
        [request(num_samples=300, max_new_tokens=1, top_p=0.3, temperature=0.6)]
    )
    with torch.no_grad():
        probs = (model(torch.tensor([PROMPT])).logits[0, -1] / 0.6).softmax(-1)
    ranked = probs.sort(descending=True)
    num_kept = int((ranked.values.cumsum(0) < 0.3).sum()) + 1
    assert {answer.token_ids[0] for answer in answers} <= set(ranked.indices[:num_kept].tolist())
    assert all(largest_gap(model, PROMPT, answer, 0.6) < 1e-5 for answer in answers[:20])
    [answers] = OwnGenerate(model).generate(
        [request(num_samples=4, max_new_tokens=24, top_p=0.9, temperature=0.7)]
    )
    assert all(largest_gap(model, PROMPT, answer, 0.7) < 1e-5 for answer in answers)


def test_a_seed_repeats_itself_in_any_company(model):
    seeded = request(seed=7, num_samples=2, max_new_tokens=12)
    [alone] = OwnGenerate(model).generate([seeded])
    others = [request(p, max_new_tokens=5) for p in RAGGED]
    in_company = OwnGenerate(model, max_num_rows=5).generate([*others, seeded])[-1]
    assert [a.token_ids for a in in_company] == [a.token_ids for a in alone]
    assert alone[0].token_ids != alone[1].token_ids
