"""A model's own `generate`: what it samples, and the log-probs it reports."""

import pytest

from openrlhf.engines.own_generate import OwnGenerate
from tests.engines.helpers import (
    greedy,
    largest_gap,
    load,
    request,
)
from tests.tiny import make_model

RAGGED = [tuple(range(10, 10 + n)) for n in (1, 30, 7, 64, 2, 19, 5, 40)]


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


def test_a_seed_repeats_itself_in_any_company(model):
    seeded = request(seed=7, num_samples=2, max_new_tokens=12)
    [alone] = OwnGenerate(model).generate([seeded])
    others = [request(p, max_new_tokens=5) for p in RAGGED]
    in_company = OwnGenerate(model, max_num_rows=5).generate([*others, seeded])[-1]
    assert [a.token_ids for a in in_company] == [a.token_ids for a in alone]
    assert alone[0].token_ids != alone[1].token_ids
