"""vLLM and a model's own `generate` sample alike, with the log-probs that the trainer computes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from openrlhf.engines import own_generate
from openrlhf.engines.own_generate import OwnGenerate, tokens_at
from tests.engines.helpers import PROMPT, greedy, largest_gap, load, request
from tests.tiny import make_model


@pytest.fixture(params=["vllm", "own"])
def sampler(request: pytest.FixtureRequest, model: Any) -> Any:
    if request.param == "vllm":
        return request.getfixturevalue("engine")
    return OwnGenerate(model, tokenizer=request.getfixturevalue("tiny_tokenizer"))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_are_those_of_the_trainer(sampler, model, temperature):
    prompts = [tuple(range(10, 10 + n)) for n in (1, 40, 7, 64)]
    requests = [request(p, temperature=temperature, max_new_tokens=16) for p in prompts]
    for prompt, [answer] in zip(prompts, sampler.generate(requests), strict=True):
        assert len(answer.token_ids) == len(answer.logprobs) == 16
        assert largest_gap(model, prompt, answer, temperature) < 1e-3
        # The gate would notice a temperature that one side forgot.
        assert largest_gap(model, prompt, answer, 1.6 - temperature) > 1e-2


def test_top_p_leaves_the_tail_out_but_not_the_logprobs(sampler, model):
    settings = {"temperature": 0.7, "max_new_tokens": 12, "num_samples": 4}
    nucleus, whole, greedy_one = sampler.generate(
        [
            request(top_p=0.3, **settings),
            request(**settings),  # in the same batch, without a limit
            request(top_p=0.3, temperature=0.0, max_new_tokens=12),
        ]
    )
    for answer in nucleus:
        assert largest_gap(model, PROMPT, answer, 0.7) < 1e-3
        logits = model(torch.tensor([[*PROMPT, *answer.token_ids]])).logits[0] / 0.7
        probs = logits.softmax(-1)[len(PROMPT) - 1 : -1]
        for row, token in zip(probs, answer.token_ids, strict=True):
            assert row[row > row[token]].sum() < 0.3 + 1e-4  # mass of the likelier tokens
    assert all(largest_gap(model, PROMPT, answer, 0.7) < 1e-3 for answer in whole)
    assert largest_gap(model, PROMPT, greedy_one[0], 1.0) < 1e-3


def test_top_k_and_min_p_leave_the_tail_out(sampler, model):
    settings = {"temperature": 2.0, "max_new_tokens": 12, "num_samples": 4}
    few, likely, one = sampler.generate(
        [
            request(top_k=3, **settings),
            request(min_p=0.8, **settings),
            request(top_k=1, **{**settings, "num_samples": 1}),
        ]
    )
    assert all(largest_gap(model, PROMPT, answer, 2.0) < 1e-3 for answer in few)
    ranks, shares = [], []
    for answers, found in ((few, ranks), (likely, shares)):
        for answer in answers:
            logits = model(torch.tensor([[*PROMPT, *answer.token_ids]])).logits[0].detach() / 2.0
            probs = logits.softmax(-1)[len(PROMPT) - 1 : -1]
            for row, token in zip(probs, answer.token_ids, strict=True):
                rank, share = (row > row[token]).sum(), row[token] / row.max()
                found.append(int(rank) if found is ranks else float(share))
    assert max(ranks) == 2
    assert 0.8 - 1e-4 < min(shares) < 0.99
    assert one[0].token_ids == greedy(model, 12)


def test_every_stop_id_stops_and_belongs_to_the_answer(sampler, model):
    tokens = greedy(model, 24)
    expected = tokens[: tokens.index(tokens[10]) + 1]
    for stops in [(tokens[10],), (1, tokens[10])]:
        sampling = request(temperature=0.0, max_new_tokens=24, stop_token_ids=stops)
        [[answer]] = sampler.generate([sampling])
        assert (answer.token_ids, answer.finish_reason) == (expected, "stop")
        assert len(answer.logprobs) == len(expected)


def test_a_stop_text_of_several_tokens_ends_the_answer_behind_it(sampler, model, tiny_tokenizer):
    tokens, decode = greedy(model, 60), tiny_tokenizer.decode
    text = next(t for k in range(8, 59) if (t := decode(tokens[k : k + 2])).isascii())
    end = next(n for n in range(61) if text in decode(tokens[:n]))
    assert len(text) == 2 and end < 60
    asked = [request(temperature=0.0, max_new_tokens=60, stop=stop) for stop in ((), ("no", text))]
    [[whole], [cut]] = sampler.generate(asked)
    assert (len(whole.token_ids), whole.finish_reason) == (60, "length")
    assert (cut.token_ids, cut.finish_reason) == (tokens[:end], "stop")
    assert len(cut.logprobs) == end


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
    alone = [request(p, temperature=0.0, max_new_tokens=12) for p in RAGGED[:5]]
    twice = [request(p, temperature=0.0, max_new_tokens=12, num_samples=2) for p in RAGGED[:5]]
    for requests in (alone, twice):
        found = OwnGenerate(model, max_num_rows=3).generate(requests)
        for prompt, answers in zip(RAGGED, found, strict=False):
            for answer in answers:
                assert answer.token_ids == greedy(model, 12, prompt)
                assert largest_gap(model, prompt, answer, 1.0) < 1e-4


def test_a_batch_that_the_device_has_no_memory_for_is_halved(model, monkeypatch, capsys):
    requests = [request(p, max_new_tokens=6, num_samples=2) for p in RAGGED[:4]]
    expected = [[a.token_ids for a in group] for group in OwnGenerate(model).generate(requests)]
    sizes, sample = [], own_generate.sample_rows

    def full(base, rows, *rest):
        sizes.append(len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return sample(base, rows, *rest)

    monkeypatch.setattr(own_generate, "sample_rows", full)
    engine = OwnGenerate(model)
    for _ in range(2):
        found = engine.generate(requests)
        assert [[a.token_ids for a in group] for group in found] == expected
    assert sizes == [8, 4, 2, 2, 4, 2, 2, *[2] * 4]
    assert "no memory to sample 8 rows at once: 4 are, from now on" in capsys.readouterr().out


def test_samples_of_a_prompt_read_it_once(model):
    read = []
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda _m, tokens, _out: read.append(tokens[0].numel()))
    requests = [request(PROMPT, num_samples=6, max_new_tokens=5) for _ in range(2)]
    OwnGenerate(model).generate(requests)
    hook.remove()
    assert read[0] == len(PROMPT) - 1 and set(read[1:]) == {12}


def test_a_seed_repeats_itself_in_any_company(model):
    seeded = request(seed=7, num_samples=2, max_new_tokens=12)
    [alone] = OwnGenerate(model).generate([seeded])
    others = [request(p, max_new_tokens=5) for p in RAGGED]
    in_company = OwnGenerate(model, max_num_rows=5).generate([*others, seeded])[-1]
    assert [a.token_ids for a in in_company] == [a.token_ids for a in alone]
    assert alone[0].token_ids != alone[1].token_ids


def test_numbers_follow_from_seed_and_name_of_a_request(model):
    def sampled(seed, *names):
        asked = [replace(request(max_new_tokens=12), request_id=name) for name in names]
        return [one.token_ids for [one] in OwnGenerate(model, seed=seed).generate(asked)]

    first = sampled(3, "step1/1", "step1/2")
    assert first == [sampled(3, "step1/1")[0], sampled(3, "step1/2")[0]] and first[0] != first[1]
    assert sampled(3, "step2/1")[0] != first[0] != sampled(4, "step1/1")[0]


def test_runs_with_other_seeds_draw_other_numbers_for_the_same_row(model):
    """Within the 32 bits that torch's generator, and so vLLM's, reads of a seed on a CPU."""
    runs = [request(max_new_tokens=12, seed=seed) for seed in (1, 2)]
    rows = [replace(run, sampling=run.sampling.for_part(3)) for run in runs]
    [first], [second] = OwnGenerate(model).generate(rows)
    assert first.token_ids != second.token_ids


def test_a_frozen_head_is_not_copied_for_every_row(model):
    model.requires_grad_(False)
    with torch.profiler.profile() as found:
        OwnGenerate(model).generate([request(num_samples=6, max_new_tokens=3)])
    model.requires_grad_(True)
    operators = {event.key for event in found.key_averages()}
    assert "aten::mm" in operators and "aten::bmm" not in operators


def test_a_token_is_drawn_as_by_the_whole_sum_and_never_one_without_weight():
    draw = torch.Generator().manual_seed(0)
    for size in (7, 256, 1000):
        weights = torch.rand(64, size, generator=draw)
        weights[:, 3:5] = 0
        share = torch.rand(64, dtype=torch.float64, generator=draw)
        share[:2] = torch.tensor([0.0, 1.0]).double().nextafter(torch.tensor(0.5).double())
        whole = weights.cumsum(-1, dtype=torch.float64)
        wanted = torch.searchsorted(whole, share[:, None] * whole[:, -1:], right=True)
        found = tokens_at(share, weights)
        assert torch.equal(found, wanted) and bool((weights.gather(1, found) > 0).all())
