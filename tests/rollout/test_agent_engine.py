"""An episode records what was sampled, in segments; what an agent asks of a turn is checked."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace

import pytest

from openrlhf.engines.base import Completion, SamplingSettings
from openrlhf.rollout.agents.episode import (
    AgentSetup,
    Episode,
    EpisodeRequest,
    TextCodec,
    first_params,
    prompt_ids_of,
    sample_turn,
    turn_settings,
)
from openrlhf.utils.agent import AgentError, BadAnswerError
from openrlhf.utils.rollout import PromptRecord


def completion(ids, *, version=0, starts=(), reason="stop"):
    return Completion(tuple(ids), tuple(-i / 10 for i in ids), reason, version, tuple(starts))


def make_episode():
    sampling = SamplingSettings(stop_token_ids=(2,))
    setup = AgentSetup("agent.py", None, vocab_size=100, max_length=64)
    return Episode(EpisodeRequest("e", PromptRecord(0, "p", (7,)), sampling), setup, ask=None)


def segments_of(episode, *turns):
    """The segments of an episode after turns of (prompt, completion)."""
    for prompt, sampled in turns:
        episode.record(prompt, sampled)
    return episode.segments


def test_turns_that_go_on_from_each_other_are_one_segment():
    (segment,) = segments_of(
        make_episode(),
        ([7, 8], completion([9, 2])),
        ([7, 8, 9, 2, 5], completion([4], version=3)),
    )
    assert segment.token_ids == [7, 8, 9, 2, 5, 4]
    assert segment.action_mask == [False, False, True, True, False, True]
    assert segment.logprobs == [-0.9, -0.2, -0.4]
    assert segment.weight_versions == [0, 0, 3]
    assert segment.num_prompt_tokens == 2
    assert not segment.is_truncated


def test_the_same_words_to_another_image_begin_a_segment_of_their_own():
    episode = make_episode()
    episode.record([7, 8], completion([9, 2]), ["a"])
    episode.record([7, 8, 9, 2, 5], completion([4]), ["c"])
    episode.record([7, 8, 9, 2, 5], completion([3]), ["a", "b"])
    first, second = episode.segments
    assert (first.images, first.token_ids) == (("a", "b"), [7, 8, 9, 2, 5, 3])
    assert second.images == ("c",)


def test_a_rewritten_history_begins_a_segment_of_its_own():
    first, second = segments_of(
        make_episode(),
        ([7, 8], completion([9, 2])),
        ([7, 8, 2, 5], completion([4])),  # the 9 was taken out
    )
    assert (first.token_ids, first.action_mask) == ([7, 8, 9, 2], [False, False, True, True])
    assert (second.token_ids, second.action_mask) == ([7, 8, 2, 5, 4], [False] * 4 + [True])


def test_branches_are_segments_and_each_goes_on_from_its_own():
    segments = segments_of(
        make_episode(),
        ([7], completion([1])),
        ([7], completion([2])),
        ([7, 2, 5], completion([3])),
        ([7, 1, 6], completion([4])),
    )
    assert [s.token_ids for s in segments] == [[7, 1, 6, 4], [7, 2, 5, 3]]


def take(episode, prompt, tokenizer, *, asked=None):
    """Sample one turn; what the engine was asked goes to the list."""

    def ask(sample_id, request):
        if asked is not None:
            asked.append(request)
        turn = Future()
        turn.set_result(completion([9, 2]))
        return turn

    episode.ask = ask
    return asyncio.run(sample_turn(episode, prompt, None, TextCodec(tokenizer)))


@pytest.mark.parametrize(
    ("ids", "seen"),
    [
        ([], "no token"),
        (["a"], "'a'"),
        ([7, 8.0], "8.0"),
        ([7, -1], "-1"),
        ([7, 100], "100"),
    ],
)
def test_a_prompt_that_is_none_is_refused(ids, seen, tiny_tokenizer):
    with pytest.raises(BadAnswerError, match=rf"the prompt has {seen}\. .* of 0\.\.99"):
        take(make_episode(), ids, tiny_tokenizer)


def test_nothing_is_sampled_or_recorded_after_the_end(tiny_tokenizer):
    episode, asked = make_episode(), []
    take(episode, [7], tiny_tokenizer, asked=asked)
    episode.close()
    with pytest.raises(AgentError, match="episode e has ended"):
        episode.record([7], completion([1]))
    with pytest.raises(AgentError):
        take(episode, [7], tiny_tokenizer, asked=asked)
    assert [r.request_id for r in asked] == ["e/t1"]


RUN = SamplingSettings(num_samples=4, temperature=0.7, max_new_tokens=9, stop_token_ids=(2,))


def test_a_turn_may_fill_what_the_context_leaves():
    params = first_params(RUN, max_length=40)
    assert params.max_tokens == 40
    turn = turn_settings(params, RUN, room=33, vocab_size=100)
    assert (turn.num_samples, turn.temperature, turn.max_new_tokens) == (1, 0.7, 33)
    params.max_tokens = 5
    assert turn_settings(params, RUN, room=33, vocab_size=100).max_new_tokens == 5
    assert turn_settings(params, RUN, room=3, vocab_size=100).max_new_tokens == 3
    assert turn_settings(None, RUN, room=3, vocab_size=100).max_new_tokens == 3


def test_stops_of_a_turn_are_added_to_those_of_the_run():
    run = replace(RUN, stop=("</run>",))
    wanted = {"stop": ["</answer>", "two words"], "stop_token_ids": [7]}
    turn = turn_settings(wanted, run, room=9, vocab_size=100)
    assert turn.stop == ("</run>", "</answer>", "two words")
    assert turn.stop_token_ids == (2, 7)
    assert turn_settings({"stop": "so."}, RUN, room=9, vocab_size=100).stop == ("so.",)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 0.2}, r"temperature is 0.2, and the run samples with 0.7"),
        ({"top_p": 0.9}, r"top_p is 0.9, and the run samples with 1.0"),
        ({"top_k": 5}, r"top_k is 5, which engines of a run do not do"),
        ({"n": 2}, r"n is 2, which engines"),
        ({"max_tokens": 0}, r"max_tokens is 0"),
        ({"seed": 2**64}, r"seed is 18446744073709551616. Give a whole number of 0..2\*\*63 - 1"),
        ({"seed": -1}, r"seed is -1"),
        ({"seed": "7"}, r"seed is '7'"),
        ({"stop": ["a", 5]}, r"stop is \['a', 5\]. Give a text, or a list of texts"),
        ({"stop_token_ids": [100]}, r"stop_token_ids is \[100\]. Give a list of ids of 0..99"),
    ],
)
def test_sampling_that_is_not_the_runs_is_refused(params, message):
    with pytest.raises(BadAnswerError, match=message):
        turn_settings(params, RUN, room=9, vocab_size=100)


def test_vllms_own_parameters_are_understood():
    vllm = pytest.importorskip("vllm.sampling_params")
    params = vllm.SamplingParams(temperature=0.7, max_tokens=6, stop_token_ids=[5])
    turn = turn_settings(params, RUN, room=33, vocab_size=100)
    assert (turn.max_new_tokens, turn.stop_token_ids) == (6, (2, 5))


def test_prompts_may_have_any_of_vllms_forms():
    def encode(text):
        return [ord(letter) for letter in text]

    assert prompt_ids_of("ab", encode) == ([97, 98], "ab")
    assert prompt_ids_of([1, 2], encode) == ([1, 2], None)
    assert prompt_ids_of({"prompt_token_ids": [1, 2]}, encode) == ([1, 2], None)
    assert prompt_ids_of({"prompt": "ab"}, encode) == ([97, 98], "ab")
    with pytest.raises(BadAnswerError, match="given a float"):
        prompt_ids_of(1.5, encode)
