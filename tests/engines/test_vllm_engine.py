"""vLLM in this process samples what the trainer computes, before and after weight updates."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
import transformers as hf

from openrlhf.distributed.weights import as_stored
from openrlhf.engines.base import Beginning, Completion
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.engines.weight_receiver import report_full_logprobs
from openrlhf.errors import EngineError, LostEngineError, MachineError, WeightSyncError
from openrlhf.trainer.ray.vllm_engine import LLMRayActor
from openrlhf.trainer.workers.weight_sync import BroadcastTransport
from openrlhf.utils.tensors import fingerprint
from tests.distributed.spawn import run_ranks
from tests.engines.helpers import (
    PROMPT,
    buckets,
    engine_greedy,
    greedy,
    largest_gap,
    load,
    reference_logprobs,
    request,
    restored,
    send,
    shake,
    start,
    weights,
)
from tests.gpu.engines import endpoint
from tests.tiny import make_tokenizer

LONG_PROMPT = tuple(6 + k % 250 for k in range(200))  # more than one block of the cache


def test_samples_of_a_prompt_differ_and_seeds_repeat(engine):
    [answers] = engine.generate([request(num_samples=4, seed=3, max_new_tokens=12)])
    assert len({answer.token_ids for answer in answers}) == 4
    [again] = engine.generate([request(num_samples=4, seed=3, max_new_tokens=12)])
    assert [a.token_ids for a in again] == [a.token_ids for a in answers]


def test_a_prompt_that_does_not_fit_is_refused_and_the_others_served(engine):
    with pytest.raises(EngineError, match="prompt r has 600 tokens"):
        engine.generate([request((7,) * 600)])
    assert len(engine.generate([request(max_new_tokens=3)])[0][0].token_ids) == 3


def test_an_aborted_request_is_sampled_no_more_and_the_others_are(engine, model):
    asked = [
        request(temperature=0.0, max_new_tokens=n, num_samples=k)
        for n, k in ((400, 1), (400, 3), (24, 1))
    ]
    lost, lost_too, kept = engine.submit(asked)
    engine.abort([lost, lost_too])
    assert kept.result(30)[0].token_ids == greedy(model, 24)
    assert lost.cancelled() and lost_too.cancelled()
    assert not engine.llm.has_unfinished_requests() and not engine.is_busy


def test_unfinished_responses_are_reported_in_parts_with_the_versions_of_their_tokens(
    engine, model
) -> None:
    num_known: dict[tuple[str, int], int] = {}
    reported: dict[tuple[str, int], list[Beginning]] = {}
    ends = tuple(range(6, 14))  # of 260 ids: most of the samples end before the last one does
    asked = [
        request(num_samples=6, max_new_tokens=200, seed=1, stop_token_ids=ends),
        request(max_new_tokens=150),
    ]
    asked = [replace(each, tag=str(k)) for k, each in enumerate(asked)]
    step, calls = engine._step, []

    def step_and_report() -> None:
        step()
        if len(calls) % 7 == 6:
            for part in engine.new_beginnings(num_known):
                reported.setdefault((part.tag, part.sample), []).append(part)
        calls.append(None)

    with restored(engine, model, 0):
        engine._step = step_and_report
        try:
            pending = engine.submit(asked)
            while len(calls) < 20:
                time.sleep(0.01)
            send(engine, weights(model), 1, keep_running=True)
            found = [future.result(60) for future in pending]
        finally:
            engine._step = step
    assert {tag for tag, _ in reported} == {"0", "1"}
    begun = {name: Beginning.joined(parts) for name, parts in reported.items()}
    assert {each.finish_reason for each in begun.values()} == {"", "stop"}
    assert begun["1", 0].version_starts and len(reported["1", 0]) > 3
    for (tag, sample), first in begun.items():
        whole, count = found[int(tag)][sample], len(first.token_ids)
        assert first.finish_reason in ("", whole.finish_reason)
        assert not first.finish_reason or count == len(whole.token_ids)
        assert first.token_ids == whole.token_ids[:count]
        assert first.logprobs == whole.logprobs[:count]
        assert first.token_versions == whole.token_versions[:count]
    assert [*engine.new_beginnings(num_known)] == [] and num_known == {}


def three_updates(engine: VLLMEngine, trained) -> None:
    assert engine_greedy(engine) == greedy(trained)
    for version, bucket_bytes in [(1, 2**26), (2, 2**15), (3, 2**17)]:
        shake(trained, version)
        received = send(engine, weights(trained), version, bucket_bytes=bucket_bytes)
        assert received == {n: fingerprint(t) for n, t in weights(trained)}
        assert engine_greedy(engine) == greedy(trained)
        [[answer]] = engine.generate([request(max_new_tokens=8)])
        assert answer.weight_version == version
        assert largest_gap(trained, PROMPT, answer, 1.0) < 1e-3


def test_three_updates_arrive(engine, model):
    with restored(engine, model, 0):
        three_updates(engine, load(model.config._name_or_path))


def test_after_a_sleep_nothing_is_sampled_until_weights_and_memory_are_back(
    engine, model, monkeypatch
):
    """vLLM's executor notes level and parts; on a CPU its worker frees nothing."""
    told = []
    executor = engine.llm.engine_core.engine_core.model_executor
    call_workers = executor.collective_rpc

    def noted(method, *args, **options):
        if method in ("sleep", "wake_up"):
            told.append((method, options["kwargs"]))
        return call_workers(method, *args, **options)

    monkeypatch.setattr(executor, "collective_rpc", noted)
    engine.sleep()
    [pending] = engine.submit([request(temperature=0.0, max_new_tokens=24)])
    engine.wake_up("weights")
    send(engine, weights(model), 0)
    with pytest.raises(TimeoutError):
        pending.result(timeout=0.3)
    engine.wake_up("kv_cache")
    [answer] = pending.result(timeout=60)
    assert answer.token_ids == greedy(model)
    assert told == [
        ("sleep", {"level": 2}),
        ("wake_up", {"tags": ["weights"]}),
        ("wake_up", {"tags": ["kv_cache"]}),
    ]


def test_a_cached_prefix_does_not_outlive_its_weights(engine, model):
    asked = request(LONG_PROMPT, temperature=0.0, max_new_tokens=16)
    trained = load(model.config._name_or_path)
    with restored(engine, model, 0):
        [[before]] = engine.generate([asked])
        assert before.token_ids == greedy(trained, 16, LONG_PROMPT)
        shake(trained, 1)
        send(engine, weights(trained), 1)
        [[after]] = engine.generate([asked])
        assert after.token_ids == greedy(trained, 16, LONG_PROMPT)
        assert after.token_ids != before.token_ids
        assert largest_gap(trained, LONG_PROMPT, after, 1.0) < 1e-3


@pytest.mark.parametrize("case", ["missing", "unknown", "twice"])
def test_an_update_that_is_not_whole_is_named_and_ends_the_engine(tiny_model_dir, case):
    engine, named = start(tiny_model_dir), weights(load(tiny_model_dir))
    some_layer = "model.layers.1.self_attn.k_proj.weight"
    tensors, said = {
        "missing": ([p for p in named if p[0] != some_layer], f"1 missing, e.g. {some_layer}"),
        "unknown": ([*named, ("model.layers.0.self_attn.nothing.bias", torch.ones(3))], "nothing"),
        "twice": ([*named, named[0]], "came twice"),
    }[case]
    send(engine, named, 1)
    engine.begin_weight_update(keep_running=True)
    [waiting] = engine.submit([request(max_new_tokens=1)])
    with pytest.raises(WeightSyncError, match=said):
        for bucket in buckets(tensors, 2**20):
            engine.receive_bucket(bucket)
        engine.finish_weight_update(2)
    for ask in (lambda: waiting.result(5), lambda: engine.generate([request(max_new_tokens=1)])):
        with pytest.raises(EngineError, match=f"vLLM engine is down: .*{said}"):
            ask()
    engine.shutdown()


def test_an_update_that_was_broken_off_leaves_nothing_behind(tiny_model_dir):
    engine, trained = start(tiny_model_dir), load(tiny_model_dir)
    shake(trained, 1)
    for num_buckets in (0, 1, 4, 1000):
        engine.begin_weight_update(True)
        for bucket in islice(buckets(weights(trained), 2**15), num_buckets):
            engine.receive_bucket(bucket)
        [waiting] = engine.submit([request(temperature=0.0, max_new_tokens=16)])
        assert not engine.is_busy  # nothing is sampled by half of the weights
        shake(trained, 2)
        send(engine, weights(trained), 2)
        [after] = waiting.result(60)
        assert after.token_ids == greedy(trained, 16)
    engine.shutdown()


@pytest.mark.parametrize("where", ["step", "wake_up"])
def test_an_engine_whose_device_fails_is_lost_and_says_so(tiny_model_dir, where):
    engine = start(tiny_model_dir)

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with ...")

    setattr(engine.llm, where, fail)
    ask = {"step": lambda: engine.generate([request()]), "wake_up": lambda: engine.wake_up("w")}
    for call in (ask[where], ask["step"], lambda: engine.is_up):
        with pytest.raises(LostEngineError, match=r"down: CUDA error: an illegal memory access$"):
            call()
    engine.shutdown()


@pytest.mark.parametrize(
    ("error", "raised", "said", "is_ended"),
    [
        (NotImplementedError("no sleep mode"), NotImplementedError, "^no sleep mode$", False),
        (torch.OutOfMemoryError("CUDA out of memory."), MachineError, "memory. Type a sm", True),
        (RuntimeError("Worker failed: out of memory"), MachineError, "memory Type a sm", True),
        (RuntimeError("CUDA error: launch failure"), LostEngineError, "launch failure", True),
        (AssertionError("no worker is left"), LostEngineError, "no worker is left", True),
        (ValueError("no such tag"), ValueError, "^no such tag$", False),
    ],
)
def test_what_another_engine_would_meet_too_does_not_make_one_lost(error, raised, said, is_ended):
    def wake_up(tags: list[str]) -> None:
        raise error

    engine = VLLMEngine.__new__(VLLMEngine)
    engine._waiting, engine._end, engine._is_stepping = {}, None, True
    engine._thread, engine.llm = ThreadPoolExecutor(1), SimpleNamespace(wake_up=wake_up)
    with pytest.raises(raised, match=said):
        engine.wake_up("weights")
    assert (engine._end is not None) == is_ended
    if is_ended:
        assert isinstance(engine._down(), LostEngineError) == (raised is LostEngineError)


def test_an_engine_on_ray_is_lost_with_a_worker_of_its_own():
    def wake_up(tags: list[str]) -> None:
        raise ray.exceptions.ActorDiedError()

    engine = LLMRayActor.__new__(LLMRayActor)
    engine._waiting, engine._end, engine._is_stepping = {}, None, True
    engine._thread, engine.llm = ThreadPoolExecutor(1), SimpleNamespace(wake_up=wake_up)
    with pytest.raises(LostEngineError):
        engine.wake_up("weights")


def test_a_transfer_that_is_broken_off_does_not_end_the_engine(engine, model):
    """One in a worker of several would, for vLLM takes the reply of the first alone."""
    worker = engine.llm.model_executor.driver_worker.worker
    reader = worker.weight_transfer_engine.reader

    def break_off(bucket: object) -> None:
        raise EngineError("the broadcast of weights was broken off")

    engine.begin_weight_update(True)
    reader.read = break_off
    with pytest.raises(EngineError, match="was broken off") as caught:
        engine.receive_bucket(next(buckets(weights(model), 2**20)))
    assert not isinstance(caught.value, LostEngineError)
    del reader.read
    send(engine, weights(model), 0)
    assert engine_greedy(engine) == greedy(model)


@pytest.mark.slow
def test_a_sync_that_is_broken_off_does_not_end_an_engine_of_two_workers(tiny_model_dir):
    class BrokenOff(BroadcastTransport):
        """Another engine dies while a bucket is sent."""

        def start_sending(self, data: torch.Tensor) -> dict[int, Future[Any]]:
            self.break_off("its peer failed")
            return {}

    engine, trained = start(tiny_model_dir, tensor_parallel_size=2), load(tiny_model_dir)
    shake(trained, 1)
    more: dict[str, Any] = {"workers_per_engine": 2, "endpoint": endpoint}
    broken = BrokenOff(torch.device("cpu"), [engine], **more)
    broken.send(weights(trained), 1)
    assert [failure.is_lost for failure in broken.failed.values()] == [False]
    whole = BroadcastTransport(torch.device("cpu"), [engine], **more)
    whole.send(weights(trained), 1)
    assert not whole.failed and engine_greedy(engine) == greedy(trained)
    engine.shutdown()


def test_an_engine_starts_where_a_trainer_of_this_process_has_closed_its_groups(tiny_model_dir):
    start(tiny_model_dir).shutdown()
    dist.destroy_process_group()
    engine = start(tiny_model_dir)
    [[answer]] = engine.generate([request(max_new_tokens=2)])
    engine.shutdown()
    assert len(answer.token_ids) == 2


LOGITS = torch.tensor([[0.0, 1.0, 2.0]])


class SecondSampler:
    def _sample_random(self, logits, top_p):
        logits[0, :2] = -torch.inf
        return logits.argmax(-1), logits


def test_the_second_runner_takes_log_probs_of_logits_that_nothing_was_cut_from() -> None:
    sampler = SecondSampler()
    report_full_logprobs(sampler)
    sampled, logits = sampler._sample_random(LOGITS.clone(), torch.tensor([0.3]))
    assert sampled.tolist() == [2]
    assert torch.equal(logits, LOGITS)


def test_a_sampler_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="vLLM samples by object"):
        report_full_logprobs(object())


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


SIZES = {"vocab_size": 262, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 256}


SHORT = {"vocab_size": 262, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


FAMILIES = {
    "mixtral": lambda: hf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**LLAMA, **EXPERTS, head_dim=32),
    "bloom": lambda: hf.BloomConfig(**SHORT, hidden_size=128),
    "falcon": lambda: hf.FalconConfig(**SIZES, bos_token_id=1, eos_token_id=1),
}


IN_MAIN = {"mixtral"}


def make(family: str, path: Path) -> Any:
    make_tokenizer(path)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    shake(model, 7)
    model.save_pretrained(path)
    return load(path)


def gap(engine: VLLMEngine, model: Any) -> float:
    """How far log-probs lie from the trainer's, at most."""
    prompts = [PROMPT[:n] for n in (3, 10, 40)]
    asked = [request(prompt, num_samples=2, max_new_tokens=20) for prompt in prompts]
    answers = zip(prompts, engine.generate(asked), strict=True)
    return max(largest_gap(model, p, a, 1.0) for p, samples in answers for a in samples)


@pytest.mark.parametrize(
    "family", [f if f in IN_MAIN else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_two_updates_arrive(family: str, tmp_path: Path) -> None:
    """In a process of its own: vLLM has groups for experts in its first engine of one, or never."""
    run_ranks(partial(check_updates, family), 1, tmp_path)


def check_updates(family: str, folder: Path) -> None:
    model = make(family, folder)
    engine = start(folder)
    assert gap(engine, model) < 1e-3
    for version in (1, 2):
        shake(model, version)
        before = gap(engine, model)
        send(engine, list(as_stored(model, weights(model))), version, bucket_bytes=2**17)
        assert gap(engine, model) < 1e-3 < before / 10
    engine.shutdown()
