"""Groups of agents' episodes over a stream: as they end, with failures by policy."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace

import pytest

from openrlhf.engines.base import Completion
from openrlhf.errors import EngineError
from openrlhf.trainer.ppo_utils.agent_generator import AgentSamplesGenerator
from openrlhf.trainer.ppo_utils.scoring import FailurePolicy
from openrlhf.utils.agent import AgentError
from tests.rollout.agent_fakes import (
    GrowingEngine,
    StreamingEngine,
    agents_over,
    prompts,
    says,
    settings,
)
from tests.trainer.stream_fakes import fetch, stream_threads, until


@contextmanager
def streaming(tmp_path, tokenizer, engines, *, policy=None, **sampling):
    """A stream over agents beside these engines."""
    with agents_over(engines, tmp_path, tokenizer, policy=policy) as source:
        stream = source.open_stream(settings(tokenizer, **sampling))
        try:
            yield stream
        finally:
            stream.close()


def submit(stream, tokenizer, texts, tag="t"):
    for prompt in prompts(tokenizer, texts):
        stream.submit((0, prompt.row_id), prompt, tag=tag)


def test_groups_of_all_hosts_come_with_all_their_segments(tmp_path, tiny_tokenizer):
    engines = [StreamingEngine(says(tiny_tokenizer, "yo"), delay_s=0.01) for _ in range(2)]
    with streaming(tmp_path, tiny_tokenizer, engines, num_samples=2) as stream:
        submit(stream, tiny_tokenizer, ["two", *[f"p{i}" for i in range(9)]])
        groups = {group.key[1]: group.rollouts for group in fetch(stream, 10)}
        assert [r.sample_id for r in groups[0]] == ["t/0/0", "t/0/0#1", "t/0/1", "t/0/1#1"]
        assert [r.reward for r in groups[0]] == [1.5] * 4
        assert [r.sample_id for r in groups[3]] == ["t/3/0", "t/3/1"]
        assert groups[3][0].response_text == "yo<|end|>??yo<|end|>"
        assert len({group[0].group_id for group in groups.values()}) == 10
        assert all(len({r.group_id for r in group}) == 1 for group in groups.values())
        assert all(engine.requests for engine in engines)
        values = stream.take_metrics().values()
        assert (values["agent/num_turns"], values["extra/num"]) == (2, 3)
        assert values["num_generated_tokens"] == 20 * 6
    until(lambda: not stream_threads())


def test_turns_carry_the_versions_of_their_tokens(tmp_path, tiny_tokenizer):
    class Updated(StreamingEngine):
        """Weights change under its second turn."""

        def complete(self, request) -> Completion:
            whole = super().complete(request)
            if len(self.requests) == 1:
                return replace(whole, weight_version=4)
            return replace(whole, weight_version=5, version_starts=((0, 4), (1, 5)))

    engine = Updated(says(tiny_tokenizer, "yo"))
    with streaming(tmp_path, tiny_tokenizer, [engine]) as stream:
        submit(stream, tiny_tokenizer, ["a"])
        [group] = fetch(stream, 1)
        assert group.rollouts[0].weight_versions.tolist() == [4, 4, 4, 4, 5, 5]


def test_a_group_with_a_failed_episode_is_handed_out_as_failed(tmp_path, tiny_tokenizer):
    engine = StreamingEngine(says(tiny_tokenizer, "yo"))
    policy = FailurePolicy(4, drops=True, max_dropped=0.5)
    with streaming(tmp_path, tiny_tokenizer, [engine], policy=policy, num_samples=2) as stream:
        submit(stream, tiny_tokenizer, ["ok", "bad"])
        groups = {group.key[1]: group for group in fetch(stream, 2)}
        assert "ValueError: bad" in groups[1].failure and groups[1].rollouts == []
        assert groups[0].failure is None
        values = stream.take_metrics().values()
        assert (values["agent/num_failed_exception"], values["num_dropped_groups"]) == (2, 1)


@pytest.mark.parametrize(("texts", "is_drained"), [(["ok", "bad"], True), (["ok"], False)])
def test_a_stream_that_dropped_an_episode_ends_when_nothing_is_sampled_for_it(
    tmp_path, tiny_tokenizer, monkeypatch, texts, is_drained
):
    drained = []
    monkeypatch.setattr(AgentSamplesGenerator, "drain", lambda self: drained.append(self))
    engine = StreamingEngine(says(tiny_tokenizer, "yo"))
    policy = FailurePolicy(4, drops=True, max_dropped=0.5)
    with streaming(tmp_path, tiny_tokenizer, [engine], policy=policy) as stream:
        submit(stream, tiny_tokenizer, texts)
        fetch(stream, len(texts))
        assert not drained
    assert bool(drained) == is_drained


def test_a_try_that_was_repeated_may_be_sampled_for_still(tmp_path, tiny_tokenizer, monkeypatch):
    drained = []
    monkeypatch.setattr(AgentSamplesGenerator, "drain", lambda self: drained.append(self))
    engine = StreamingEngine(says(tiny_tokenizer, "yo"))
    policy = FailurePolicy(4, num_retries=1)
    with streaming(tmp_path, tiny_tokenizer, [engine], policy=policy) as stream:
        submit(stream, tiny_tokenizer, ["ok"])
        fetch(stream, 1)
    assert not drained
    with streaming(tmp_path, tiny_tokenizer, [engine], policy=policy) as stream:
        submit(stream, tiny_tokenizer, ["shy"])
        fetch(stream, 1)
    assert drained


def test_a_failed_episode_ends_the_stream_after_its_retries(tmp_path, tiny_tokenizer):
    engine = StreamingEngine(says(tiny_tokenizer, "yo"))
    policy = FailurePolicy(4, num_retries=1)
    with streaming(tmp_path, tiny_tokenizer, [engine], policy=policy) as stream:
        submit(stream, tiny_tokenizer, ["shy"])
        assert fetch(stream, 1)[0].failure is None
        values = stream.take_metrics().values()
        assert (values["agent/num_failed_exception"], values["num_reward_retries"]) == (1, 1)
        submit(stream, tiny_tokenizer, ["bad"], tag="u")
        with pytest.raises(AgentError, match=re.escape("row 1: exception: ") + ".*bad at try 2"):
            fetch(stream, 1)


def test_every_failed_try_is_counted_once(tmp_path, tiny_tokenizer):
    engine = StreamingEngine(says(tiny_tokenizer, "yo"))
    policy = FailurePolicy(4, drops=True, num_retries=2)
    with streaming(tmp_path, tiny_tokenizer, [engine], policy=policy) as stream:
        submit(stream, tiny_tokenizer, ["bad"])
        assert fetch(stream, 1)[0].failure is not None
        values = stream.take_metrics().values()
        assert (values["agent/num_failed_exception"], values["num_reward_retries"]) == (3, 2)


def test_an_engine_that_fails_ends_the_stream(tmp_path, tiny_tokenizer):
    def say(request):
        raise EngineError("the engine is down")

    policy = FailurePolicy(4, drops=True, max_dropped=1)
    with streaming(tmp_path, tiny_tokenizer, [StreamingEngine(say)], policy=policy) as stream:
        submit(stream, tiny_tokenizer, ["ok"])
        with pytest.raises(EngineError, match="t/0/0: the engine is down"):
            fetch(stream, 1)


def test_closing_cuts_off_what_runs(tmp_path, tiny_tokenizer):
    engine = GrowingEngine(says(tiny_tokenizer, "y" * 2000), delay_s=0.01)
    with streaming(tmp_path, tiny_tokenizer, [engine], num_samples=2) as stream:
        submit(stream, tiny_tokenizer, ["a", "b", "c"])  # four run, two wait for room
        until(lambda: len(engine.requests) == 4)
        stream.close()
        until(lambda: engine.num_aborted == 4)
    assert len(engine.requests) == 4
    until(lambda: not stream_threads())
