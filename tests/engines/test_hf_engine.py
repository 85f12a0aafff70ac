"""The transformers engine: what it samples, the log-probs it reports, and the weights it takes."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from openrlhf.engines.base import GenerationRequest, SamplingSettings
from openrlhf.engines.hf_engine import HFEngine
from openrlhf.errors import EngineError, WeightSyncError
from openrlhf.utils.tensors import fingerprint
from tests.engines.helpers import (
    PROMPT,
    buckets,
    engine_greedy,
    greedy,
    largest_gap,
    load,
    request,
    send,
    shake,
    weights,
)
from tests.tiny import make_model

RAGGED = [tuple(range(10, 10 + n)) for n in (1, 30, 7, 64, 2, 19, 5, 40)]


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return load(tiny_model_dir)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_are_those_of_the_trainer(model, temperature):
    requests = [request(p, temperature=temperature, max_new_tokens=16) for p in RAGGED]
    answers = HFEngine(model).generate(requests)
    for prompt, [answer] in zip(RAGGED, answers, strict=True):
        assert len(answer.token_ids) == 16
        assert largest_gap(model, prompt, answer, temperature) < 1e-4


def test_answers_are_brought_as_soon_as_all_samples_of_a_prompt_are_done(model):
    lengths = (3, 12, 1, 7)
    requests = [
        request(RAGGED[k], temperature=1.0, max_new_tokens=n, num_samples=2)
        for k, n in enumerate(lengths)
    ]
    came = []
    answers = HFEngine(model).generate(requests, lambda k, answer: came.append((k, list(answer))))
    assert [k for k, _ in came] == [2, 0, 3, 1]  # the short ones first
    assert all(answer == answers[k] for k, answer in came)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {}),
        ("gpt_neox", {}),
        ("gemma", {}),
        ("mixtral", {}),
        ("gemma2", {"sliding_window": 16, "attn_implementation": "eager"}),
        ("mistral", {"sliding_window": 16}),
    ],
)
def test_ragged_prompts_decode_greedily_as_alone(tmp_path, architecture, overrides):
    model = load(make_model(tmp_path, architecture, **overrides))
    requests = [request(p, temperature=0.0, max_new_tokens=12) for p in RAGGED[:5]]
    answers = HFEngine(model, max_num_rows=3).generate(requests)
    for prompt, [answer] in zip(RAGGED, answers, strict=False):
        assert answer.token_ids == greedy(model, 12, prompt)
        assert largest_gap(model, prompt, answer, 1.0) < 1e-4


def test_slots_are_refilled_and_answers_keep_their_order(model):
    settings = [SamplingSettings(num_samples=1 + k % 3, max_new_tokens=1 + 5 * k) for k in range(8)]
    requests = [GenerationRequest(str(k), RAGGED[k], s) for k, s in enumerate(settings)]
    answers = HFEngine(model, max_num_rows=4).generate(requests)
    for prompt, sampling, group in zip(RAGGED, settings, answers, strict=True):
        assert len(group) == sampling.num_samples
        for answer in group:
            assert len(answer.token_ids) == sampling.max_new_tokens
            assert answer.finish_reason == "length"
            assert largest_gap(model, prompt, answer, 1.0) < 1e-4


def test_a_slot_that_becomes_free_is_refilled_at_once(model):
    forwards = []
    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    lengths = (4, 4, 4, 16, 4)  # the longest prompt, which is begun with, has the longest answer
    asked = [request(RAGGED[k], max_new_tokens=n) for k, n in enumerate(lengths)]
    try:
        answers = HFEngine(model, max_num_rows=2).generate(asked)
    finally:
        hook.remove()
    assert tuple(len(answer.token_ids) for [answer] in answers) == lengths
    # While one slot samples 16 tokens the other samples 4 + 4 + 4 + 4. A prompt's forward gives the
    # first token and each of the others takes one more: 15 in all, beside the two prompts at the
    # start, which go together, and three refills. Whole batches would take 3 + 15 + 3 + 3 forwards,
    # one by one 5 + 15 + 12.
    assert len(forwards) == 15 + 1 + 3


def test_every_stop_id_stops_and_belongs_to_the_answer(model):
    greedy_tokens = greedy(model, 24)
    stop = greedy_tokens[10]
    expected = greedy_tokens[: greedy_tokens.index(stop) + 1]
    for stops in [(stop,), (1, stop), (stop, 261)]:
        sampling = request(temperature=0.0, max_new_tokens=24, stop_token_ids=stops)
        [[answer]] = HFEngine(model).generate([sampling])
        assert (answer.token_ids, answer.finish_reason) == (expected, "stop")
        assert len(answer.logprobs) == len(expected)


def test_samples_of_a_prompt_differ_and_follow_the_distribution(model):
    torch.manual_seed(0)
    [answers] = HFEngine(model).generate([request(num_samples=2000, max_new_tokens=1)])
    with torch.no_grad():
        probs = model(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
    counts = Counter(answer.token_ids[0] for answer in answers)
    expected = 2000 * probs
    chi_square = sum(
        (counts[token] - float(expected[token])) ** 2 / float(expected[token])
        for token in range(len(probs))
    )
    assert chi_square < len(probs) + 5 * (2 * len(probs)) ** 0.5


def test_ranks_that_are_seeded_alike_draw_different_numbers(model):
    asked = [request(num_samples=4, max_new_tokens=16, temperature=1.0)]

    def sampled(stream: int, seed: int = 3, num_calls: int = 1) -> list[tuple[int, ...]]:
        torch.manual_seed(seed)
        engine = HFEngine(model, stream=stream)
        for _ in range(num_calls):
            [answers] = engine.generate(asked)
        return [answer.token_ids for answer in answers]

    assert len({tuple(sampled(stream)) for stream in range(4)}) == 4
    # Torch's state, which a checkpoint holds, is all that the numbers of a stream come from.
    assert sampled(1) == sampled(1) != sampled(1, seed=4)
    assert sampled(1) != sampled(1, num_calls=2)


def test_top_p_leaves_the_tail_out_but_not_the_logprobs(model):
    [answers] = HFEngine(model).generate(
        [request(num_samples=300, max_new_tokens=1, top_p=0.3, temperature=0.6)]
    )
    with torch.no_grad():
        probs = (model(torch.tensor([PROMPT])).logits[0, -1] / 0.6).softmax(-1)
    ranked = probs.sort(descending=True)
    num_kept = int((ranked.values.cumsum(0) < 0.3).sum()) + 1
    assert {answer.token_ids[0] for answer in answers} <= set(ranked.indices[:num_kept].tolist())
    assert all(largest_gap(model, PROMPT, answer, 0.6) < 1e-5 for answer in answers[:20])
    [answers] = HFEngine(model).generate(
        [request(num_samples=4, max_new_tokens=24, top_p=0.9, temperature=0.7)]
    )
    assert all(largest_gap(model, PROMPT, answer, 0.7) < 1e-5 for answer in answers)


def test_a_seed_repeats_itself_in_any_company(model):
    seeded = request(seed=7, num_samples=2, max_new_tokens=12)
    [alone] = HFEngine(model).generate([seeded])
    others = [request(p, max_new_tokens=5) for p in RAGGED]
    in_company = HFEngine(model, max_num_rows=5).generate([*others, seeded])[-1]
    assert [a.token_ids for a in in_company] == [a.token_ids for a in alone]
    assert alone[0].token_ids != alone[1].token_ids


def test_the_model_comes_back_as_it_was(model):
    model.train()
    attention = model.config._attn_implementation
    HFEngine(model).generate([request(max_new_tokens=2)])
    assert model.training
    assert model.config._attn_implementation == attention
    assert torch.is_grad_enabled()
    model.eval()


def test_threads_take_turns(model):
    engine = HFEngine(model)
    answers = {}

    def run(k: int) -> None:
        answers[k] = engine.generate([request(RAGGED[k], temperature=0.0, max_new_tokens=8)])

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        assert answers[k][0][0].token_ids == greedy(model, 8, RAGGED[k])


def test_a_request_that_cannot_be_answered_is_refused(model):
    with pytest.raises(EngineError, match="request r has no prompt"):
        HFEngine(model).generate([request(())])


@pytest.mark.parametrize("fixture", ["tiny_model_dir", "tiny_tied_model_dir"])
def test_three_updates_arrive(fixture, request):
    path = request.getfixturevalue(fixture)
    trained, engine = load(path), HFEngine.from_path(path)
    for version in (1, 2, 3):
        shake(trained, version)
        receipt = send(engine, weights(trained), version)
        assert receipt.fingerprints == {n: fingerprint(t) for n, t in weights(trained)}
        assert receipt.weight_version == version
        assert receipt.is_cache_reset
        assert engine_greedy(engine) == greedy(trained)


def test_an_update_that_is_not_whole_is_refused(tiny_model_dir):
    engine = HFEngine.from_path(tiny_model_dir)
    named = weights(load(tiny_model_dir))
    with pytest.raises(WeightSyncError, match=r"missing model\.norm\.weight"):
        send(engine, [pair for pair in named if pair[0] != "model.norm.weight"], 1)
    with pytest.raises(EngineError, match="in the middle of a weight update"):
        engine.generate([request()])
    with pytest.raises(WeightSyncError, match=r"unknown tensor model\.nothing"):
        send(engine, [*named, ("model.nothing", torch.ones(1))], 1)
    with pytest.raises(WeightSyncError, match="came twice"):
        send(engine, [*named, named[0]], 1)
    send(engine, named, 2)
    assert engine.generate([request(max_new_tokens=1)])[0][0].weight_version == 2


def test_weights_never_change_under_a_call(tiny_model_dir):
    engine, other = HFEngine.from_path(tiny_model_dir), load(tiny_model_dir)
    shake(other, 1)
    updating: list[threading.Thread] = []

    def note(index, answer):
        """Called while other rows are sampled."""
        if not updating:
            with pytest.raises(WeightSyncError, match=r"1 requests are running.* keep_running"):
                engine.begin_weight_update()
            options = {"keep_running": True}
            arguments = (engine, weights(other), 1)
            updating.append(threading.Thread(target=send, args=arguments, kwargs=options))
            updating[0].start()

    asked = [request(temperature=0.0, max_new_tokens=n) for n in (2, 24)]
    [[short], [long]] = engine.generate(asked, note)
    updating[0].join(20)
    assert set(short.token_versions) == set(long.token_versions) == {0}
    assert long.token_ids == greedy(load(tiny_model_dir))
    assert engine_greedy(engine) == greedy(other)


def test_a_dropped_bucket_is_detected(tiny_model_dir):
    engine = HFEngine.from_path(tiny_model_dir)
    engine.begin_weight_update()
    for index, bucket in enumerate(buckets(weights(load(tiny_model_dir)), 50_000)):
        if index != 1:
            engine.receive_bucket(bucket)
    with pytest.raises(WeightSyncError, match="incomplete update"):
        engine.finish_weight_update(1)


@pytest.mark.gpu
def test_on_a_gpu_logprobs_and_fingerprints_are_the_same(tiny_model_dir):
    engine = HFEngine.from_path(tiny_model_dir, dtype=torch.float32, device="cuda")
    model = load(tiny_model_dir)
    shake(model, 1)
    receipt = send(engine, weights(model), 1)
    held = {name: fingerprint(p) for name, p in engine.model.named_parameters()}
    assert held == receipt.fingerprints == {n: fingerprint(t) for n, t in weights(model)}
    for prompt, [answer] in zip(
        RAGGED, engine.generate([request(p, max_new_tokens=16) for p in RAGGED]), strict=True
    ):
        assert largest_gap(model, prompt, answer, 1.0) < 1e-3
