"""Prompts go in one by one, scored groups come out as they are finished, none is lost."""

import math
import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.engines.base import Completion, SamplingSettings
from openrlhf.errors import EngineError, RewardError
from openrlhf.rewards.base import RewardBatch, RewardResult
from openrlhf.rollout import engine_pool
from openrlhf.rollout.engine_pool import BatchedEngine
from openrlhf.rollout.rollout import FinishedGroup
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer, SourceScorer
from openrlhf.trainer.device_phases import DevicePhases
from openrlhf.trainer.ppo_utils.demands import RoleDemand
from openrlhf.trainer.ppo_utils.model_scorer import ModelScorer
from openrlhf.trainer.ray.placement import place, view_cluster
from openrlhf.trainer.ray.vllm_engine import create_vllm_engines
from openrlhf.trainer.workers.weight_sync import HandleTransport
from openrlhf.utils.rollout import Rollout
from tests.engines.helpers import load, shake, weights
from tests.helpers.rollouts import largest_gap
from tests.rollout.agent_fakes import prompts
from tests.rollout.stream_fakes import (
    DrivenStream,
    HeldEngine,
    HeldSource,
    PromptTokenizer,
    fetch,
    open_stream,
    prompt,
    rollouts_of,
    submit,
    until,
)

DROP = FailurePolicy(4, drops=True)


def failing_for(*rows: int) -> Callable[[RewardBatch], RewardResult]:
    def answer(batch: RewardBatch) -> RewardResult:
        if set(rows) & set(batch.labels):
            raise RewardError(f"cannot score {sorted(set(rows) & set(batch.labels))[0]}")
        return RewardResult([float(str(label)) for label in batch.labels])

    return answer


def test_a_group_comes_out_scored_while_others_still_generate():
    engine = HeldEngine()
    stream = open_stream([engine], HeldSource(answers=failing_for()))
    submit(stream, [4, 7])
    assert stream.num_running == 2 and stream.finished(0.0) == []
    engine.answer("t/8")
    [group] = fetch(stream, 1)
    assert (group.key, group.failure, stream.num_running) == ((0, 7), None, 1)
    assert [r.sample_id for r in group.rollouts] == ["t/8/0", "t/8/1"]
    assert [r.reward for r in group.rollouts] == [7.0, 7.0]
    first = group.rollouts[0]
    assert (first.prompt_text, first.response_text, first.label) == ("prompt 7", "8 9", 7)
    assert first.weight_versions.tolist() == [3, 3]
    assert stream.take_metrics()["num_generated_tokens"] == 4
    engine.answer("t/5", version_starts=((0, 2), (1, 3)))  # of every token
    [other] = fetch(stream, 1)
    assert other.rollouts[0].weight_versions.tolist() == [2, 3]
    assert other.rollouts[0].group_id != first.group_id
    assert stream.num_running == 0 and stream.finished(60.0) == []  # nothing runs: no wait
    stream.close()


def test_every_prompt_goes_to_the_engine_with_the_least_to_do():
    engines = [HeldEngine(), HeldEngine()]
    stream = open_stream(engines)
    submit(stream, range(5))
    assert [list(e.asked) for e in engines] == [["t/1", "t/3", "t/5"], ["t/2", "t/4"]]
    for name in ("t/1", "t/3"):
        engines[0].answer(name)
    fetch(stream, 2)
    submit(stream, [5, 6, 7])
    assert [list(e.asked) for e in engines] == [["t/5", "t/6", "t/7"], ["t/2", "t/4", "t/8"]]
    stream.close()


def test_a_busy_scorer_gets_full_batches_and_an_idle_one_no_pauses():
    engine, source = HeldEngine(), HeldSource(is_held=True)
    stream = open_stream([engine], source, batch_size=4)
    submit(stream, range(5))
    engine.answer("t/1")
    until(lambda: len(source.batches) == 1)
    for row in (1, 2, 3):  # rows 1 and 2 fill a batch; row 3 waits for another one
        engine.answer(f"t/{row + 1}")
    until(lambda: len(source.batches) == 2)
    assert source.batches == [["t/1/0", "t/1/1"], ["t/2/0", "t/2/1", "t/3/0", "t/3/1"]]
    engine.answer("t/5")  # the last one: nothing else can fill the batch
    until(lambda: len(source.batches) == 3)
    assert source.batches[2] == ["t/4/0", "t/4/1", "t/5/0", "t/5/1"]
    while source.held:
        source.release()
    assert sorted(group.key[1] for group in fetch(stream, 5)) == [0, 1, 2, 3, 4]
    stream.close()


def test_models_that_share_devices_with_training_score_before_it_or_after():
    events: list[str] = []

    def forward(experience):
        events.append("scored")
        return lambda: torch.ones(len(experience.num_actions))

    lock = threading.Lock()
    phases = DevicePhases([], engines_sleep=False, training_sleeps=False, device_lock=lock)
    engine = HeldEngine()
    stream = open_stream([engine], ModelScorer({"m": forward}, device_lock=lock, is_streaming=True))
    submit(stream, range(2))
    for phase in (phases.training, phases.sync):
        with phase():
            engine.answer(next(iter(engine.asked)))
            until(lambda: stream.scorer.num_unscored == 1)
            assert not stream.finished(0.1) and "scored" not in events
            events.append("trained")
        fetch(stream, 1)
        assert events == ["trained", "scored"]
        events.clear()
    stream.close()


def test_a_reward_that_cannot_be_had_ends_the_stream():
    engine = HeldEngine()
    stream = open_stream([engine], HeldSource(answers=failing_for(1)))
    submit(stream, [0, 1])
    engine.answer("t/2")
    with pytest.raises(RewardError, match="cannot score 1"):
        fetch(stream, 1)
    stream.close()
    assert engine.aborted == ["t/1"]


def test_scores_for_some_groups_only_are_refused():
    def answer(batch: RewardBatch) -> RewardResult:
        ones = [1.0] * len(batch)
        return RewardResult(ones, scores=ones if 0 in batch.labels else None)

    engine = HeldEngine()
    stream = open_stream([engine], HeldSource(answers=answer), batch_size=2)
    submit(stream, [0, 1])
    engine.answer("t/1")
    fetch(stream, 1)
    engine.answer("t/2")
    with pytest.raises(RewardError, match="sample t/2/0 has no score and others"):
        fetch(stream, 1)
    stream.close()


@pytest.mark.parametrize("how", ["answer", "submit"])
def test_an_engine_that_fails_ends_the_stream(how):
    engines = [HeldEngine(), HeldEngine()]
    stream = open_stream(engines)
    submit(stream, [0])
    if how == "answer":
        engines[0].fail("t/1", EngineError("out of memory"))
        with pytest.raises(EngineError, match="out of memory"):
            fetch(stream, 1)
    else:
        engines[1].error = EngineError("the engine is down")
        submit(stream, [1])
        with pytest.raises(EngineError, match="the engine is down"):
            fetch(stream, 1)
    stream.close()


def test_closing_abandons_what_runs_and_ends_the_threads():
    engines = [HeldEngine(), HeldEngine()]
    stream = open_stream(engines, HeldSource(is_held=True))
    submit(stream, range(4))
    engines[0].answer("t/1")  # is being scored
    stream.close()
    stream.close()
    assert engines[0].aborted == ["t/3"] and sorted(engines[1].aborted) == ["t/2", "t/4"]


def test_an_engine_that_hangs_ends_the_stream_at_its_deadline(monkeypatch):
    monkeypatch.setattr(engine_pool, "WAIT_S", 0.05)
    engine = HeldEngine()
    stream = open_stream([engine])
    submit(stream, [0])
    with pytest.raises(EngineError, match=r"engine 0 finished no request in 0\.05 s"):
        fetch(stream, 1)
    stream.close()
    assert engine.aborted == ["t/1"]


def test_a_long_queue_is_no_engine_that_hangs(monkeypatch):
    monkeypatch.setattr(engine_pool, "WAIT_S", 0.2)
    engine = HeldEngine()
    stream = open_stream([engine])
    submit(stream, range(6))
    for number in range(1, 7):  # longer than the limit in all
        time.sleep(0.1)
        engine.answer(f"t/{number}")
    assert len(fetch(stream, 6)) == 6
    stream.close()


def test_models_that_may_not_run_beside_generation_wait_for_its_end():
    sizes: list[int] = []

    def forward(experience):
        sizes.append(len(experience.num_actions))
        return lambda: torch.arange(float(sizes[-1]))

    engine = HeldEngine()
    stream = open_stream([engine], ModelScorer({"m": forward}))
    submit(stream, range(3))
    engine.answer("t/1")
    engine.answer("t/2")
    until(lambda: stream.scorer.num_unscored == 2)
    assert not stream.finished(0.1) and not sizes
    engine.answer("t/3")
    assert len(fetch(stream, 3)) == 3 and sizes == [6]
    stream.close()


def test_prompts_that_come_together_are_one_batch_of_an_engine_without_streaming():
    calls: list[list[str]] = []

    class Whole:
        def generate(self, requests):
            calls.append([request.request_id for request in requests])
            one = Completion((3,), (-0.5,), "stop", 0)
            return [[one] * request.sampling.num_samples for request in requests]

    stream = open_stream([Whole()])
    stream.submit([((0, row), prompt(row)) for row in range(20)], tag="t")
    fetch(stream, 20)
    assert calls == [[f"t/{row + 1}" for row in range(20)]]
    stream.close()


@settings(deadline=None, max_examples=25)
@given(data=st.data(), num_engines=st.integers(1, 3), num_groups=st.integers(1, 12))
def test_no_group_is_lost_whatever_finishes_first(data, num_engines, num_groups):
    bad = data.draw(st.sets(st.integers(0, num_groups - 1)), label="fail")
    engines = [HeldEngine() for _ in range(num_engines)]
    source = HeldSource(answers=failing_for(*bad))
    policy = FailurePolicy(4, drops=True, max_dropped=1.0)
    stream = open_stream(engines, source, policy=policy, batch_size=data.draw(st.integers(1, 6)))
    waiting = list(range(num_groups))
    came: list[FinishedGroup] = []
    try:
        while waiting or any(e.asked for e in engines):
            running = [(e, name) for e in engines for name in e.asked]
            if waiting and (not running or data.draw(st.booleans(), label="submit")):
                submit(stream, [waiting.pop(0)])
            else:
                engine, name = data.draw(st.sampled_from(running), label="finish")
                engine.answer(name)
            if data.draw(st.booleans(), label="fetch"):
                came += stream.finished(0.0)
        came += fetch(stream, stream.num_running)
        assert sorted(group.key[1] for group in came) == list(range(num_groups))
        assert {group.key[1] for group in came if group.failure is not None} == bad
        assert stream.num_running == 0
        assert sum(e.num_taken for e in engines) == num_groups
    finally:
        stream.close()


VOCAB_SIZE = 10
GOOD = Completion((3, 4), (-0.5, -0.7), "stop", weight_version=0)


def samples_of(*completions: Completion) -> list[Rollout]:
    """The samples that are made of the answer to one prompt."""
    rollouts = rollouts_of(
        [BatchedEngine(lambda requests: [[*completions] for _ in requests])],
        GroupScorer(SourceScorer(HeldSource(), 4), FailurePolicy(4)),
        PromptTokenizer(),
        VOCAB_SIZE,
    )
    sampling = SamplingSettings(num_samples=2)
    try:
        return rollouts.generate_samples([prompt(0)], sampling, tag="t").rollouts
    finally:
        rollouts.loop.close()


def test_tokens_and_log_probs_are_kept() -> None:
    edge = Completion((0, 9), (0.0, -80.0), "length", weight_version=0)
    first, second = samples_of(GOOD, edge)
    assert (first.sample_id, second.sample_id) == ("t/1/0", "t/1/1")
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert first.logprobs.tolist() == pytest.approx([-0.5, -0.7])
    assert second.token_ids.tolist() == [1, 2, 0, 9]
    assert second.logprobs.tolist() == [0, -80]


def test_each_token_has_the_version_of_its_weights() -> None:
    mixed = Completion((3, 4, 5), (-0.5,) * 3, "stop", 7, version_starts=((0, 6), (2, 7)))
    first, second = samples_of(GOOD, mixed)
    assert first.weight_versions.tolist() == [GOOD.weight_version] * 2
    assert second.weight_versions.tolist() == list(mixed.token_versions) == [6, 6, 7]
    assert second.weight_versions.dtype == torch.int32


IMPOSSIBLE = [
    ((3, 4), (-0.5, None), "token 4 with log-prob None at 1; ids are 0..9"),
    ((3, 4), (math.nan, -0.5), "token 3 with log-prob nan at 0; ids are 0..9"),
    ((3, 4), (-0.5, -math.inf), "token 4 with log-prob -inf at 1; ids are 0..9"),
    ((3, 4), (-0.5, 0.5), "token 4 with log-prob 0.5 at 1; ids are 0..9"),
    ((3, 4), (-0.5,), "2 tokens and 1 log-probs"),
    ((3, 10), (-0.5, -0.5), "token 10 with log-prob -0.5 at 1; ids are 0..9"),
    ((-1, 4), (-0.5, -0.5), "token -1 with log-prob -0.5 at 0; ids are 0..9"),
    ((), (), "0 tokens and 0 log-probs"),
]


@pytest.mark.parametrize(("token_ids", "logprobs", "said"), IMPOSSIBLE)
def test_an_impossible_answer_is_an_error(token_ids: tuple, logprobs: tuple, said: str) -> None:
    bad = Completion(token_ids, logprobs, "stop", weight_version=0)
    with pytest.raises(EngineError) as caught:
        samples_of(GOOD, bad)
    assert str(caught.value) == f"sample t/1/1: {said}"


def test_an_answer_with_too_few_samples_is_an_error() -> None:
    with pytest.raises(EngineError, match="request t/1: 1 completions, asked for 2"):
        samples_of(GOOD)


@pytest.fixture
def engines(ray_cluster, tiny_model_dir, tmp_path):
    import ray
    from ray.util.placement_group import remove_placement_group

    slots, [places] = place([RoleDemand("vllm", 2, "vllm")], view_cluster())
    settings = {"model": str(tiny_model_dir), "dtype": "float32", "max_model_len": 512, "seed": 0}
    engines = create_vllm_engines(
        settings | {"max_num_seqs": 32}, slots["vllm"], run_dir=str(tmp_path)
    )
    for engine in engines:
        engine.ready()
    yield engines
    for engine in engines:
        ray.kill(engine.handle)
    remove_placement_group(places)


@pytest.mark.slow
def test_engines_of_other_processes_stream_and_take_weights_under_way(
    engines, tiny_model_dir, tiny_tokenizer, tmp_path
):
    import ray

    scorer = GroupScorer(SourceScorer(HeldSource(), 4), FailurePolicy(4))
    rollouts = rollouts_of(engines, scorer, tiny_tokenizer, vocab_size=len(tiny_tokenizer))
    stream = DrivenStream(rollouts, SamplingSettings(num_samples=2, max_new_tokens=300))
    records = prompts(tiny_tokenizer, [f"prompt {k}" for k in range(6)])
    groups: list[FinishedGroup] = []

    def come() -> int:
        groups.extend(stream.finished(0.1))
        return len(groups)

    for record in records[:4]:
        stream.submit([((0, record.row_id), record)], tag="t")
    until(come)
    assert len({int(v) for g in groups for r in g.rollouts for v in r.weight_versions}) == 1
    assert largest_gap(tiny_model_dir, groups[0].rollouts, 1.0) < 1e-3
    trained = load(tiny_model_dir)
    shake(trained, 1)
    transport = HandleTransport(torch.device("cpu"), engines)
    for version in range(1, 21):  # until one is sampled meanwhile
        stream.submit([((version, 4), records[4])], tag="t")
        transport.send(weights(trained), version, keep_running=True)
        until(lambda count=4 + version: come() == count)
        found = [r.weight_versions.tolist() for r in groups[-1].rollouts]
        assert all(versions == sorted(versions) for versions in found)
        if any({version - 1, version} == set(versions) for versions in found):
            break
    else:
        pytest.fail("no sample was under way while weights came")
    stream.submit([((0, 5), records[5])], tag="t")
    until(lambda: come() == 5 + version)
    samples = groups[-1].rollouts
    assert [r.weight_versions.tolist() for r in samples] == [[version] * 300] * 2
    save(trained, tiny_tokenizer, tmp_path / "new")
    assert largest_gap(tmp_path / "new", samples, 1.0) < 1e-3
    assert stream.take_metrics()["num_generated_tokens"] == len(groups) * 2 * 300

    stream.submit([((1, 0), records[0])], tag="u")  # goes to the first engine: both are idle
    ray.kill(engines[0].handle)
    with pytest.raises(EngineError, match=r"vllm-0 .*died"):
        fetch(stream, 1)
    stream.close()


def save(model, tokenizer, path) -> None:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
