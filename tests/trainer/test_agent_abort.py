"""What nobody waits for is not sampled to its end, and what is sampled can be seen as it grows."""

from __future__ import annotations

import time

import pytest

from openrlhf.trainer.ppo_utils.openai_stream import settled_text
from tests.trainer.agent_fakes import (
    GrowingEngine,
    act,
    act_one,
    make_runner,
    request,
    says,
    write_agent,
)
from tests.trainer.test_agent_openai import agent_of

WORDS = "one two three four five six seven"
DELAY_S = 0.02

EXECUTOR = """
import asyncio
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, llm_engine):
        turn = llm_engine.generate(prompt, sampling_params)
        {body}

async def wait(turn):
    return await turn
"""


def run(tmp_path, tokenizer, code, words=WORDS, **limits):
    """The result of one episode, and the engine when nothing is sampled any more."""
    engine = GrowingEngine(says(tokenizer, words), delay_s=DELAY_S)
    file = write_agent(tmp_path, "")
    file.write_text(code)
    result = act_one(file, engine, tokenizer, **limits)
    time.sleep(3 * DELAY_S)
    return result, engine


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("await turn", "episode_timeout"),
        ("await asyncio.wait_for(wait(turn), 0.1)", "exception"),
        (
            "beside = asyncio.ensure_future(wait(turn)); await asyncio.sleep(0.1); 1 / 0",
            "exception",
        ),
    ],
    ids=["the episode runs out of time", "the agent waits no longer", "the agent fails beside it"],
)
def test_turns_end_with_their_episode(body, failure, tmp_path, tiny_tokenizer):
    code = EXECUTOR.format(body=body)
    result, engine = run(tmp_path, tiny_tokenizer, code, words=WORDS * 9, episode_timeout_s=0.5)
    assert result.failure.kind == failure, result.failure
    sampled = engine.num_sampled
    time.sleep(5 * DELAY_S)
    assert engine.num_sampled == sampled < len(WORDS * 9) / 2  # it has stopped
    assert engine.num_aborted == 1


BLOCKING = """
import asyncio, time
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, llm_engine):
        if prompt == "stuck":
            await asyncio.sleep(0.1)
            time.sleep(1.5)
        await llm_engine.generate(prompt, sampling_params)
        return {"reward": 1.0}
"""


def test_turns_of_a_loop_that_is_left_behind_are_aborted(tmp_path, tiny_tokenizer):
    words = WORDS * 3  # not all sampled when the loop is left
    engine = GrowingEngine(says(tiny_tokenizer, words), delay_s=DELAY_S)
    runner = make_runner(
        write_agent(tmp_path, BLOCKING), engine, tiny_tokenizer, step_timeout_s=0.2
    )
    try:
        found = act(runner, [request(tiny_tokenizer, text, text) for text in ("slow", "stuck")])
    finally:
        runner.close()
    assert found["slow"].reward == 1.0 and found["stuck"].failure.kind == "blocked"
    assert (len(engine.requests), engine.num_aborted) == (2, 1)  # the first was begun again
    num_tokens = len(tiny_tokenizer.encode(words)) + 1
    assert num_tokens < engine.num_sampled < 2 * num_tokens


def test_a_client_that_leaves_is_not_sampled_for(tmp_path, tiny_tokenizer):
    body = """
try:
    await chat.create(model=session.model, messages=talk, timeout=0.3)
except openai.APITimeoutError:
    pass
await asyncio.sleep(0.2)
answer = await chat.create(model=session.model, messages=talk, max_tokens=2)
return {"reward": 1.0}
"""
    result, engine = run(tmp_path, tiny_tokenizer, agent_of(body), words=WORDS * 9)
    assert result.failure is None, result.failure
    assert (result.num_turns, engine.num_aborted) == (1, 1)  # the lost turn is not trained on


STREAMING = """
import time
chunks, seen = [], []
stream = await chat.create(model=session.model, messages=talk, stream=True, logprobs=True{more})
async for chunk in stream:
    chunks.append(chunk.choices[0])
    seen.append(time.monotonic())
said = [c.delta.content for c in chunks if c.delta.content]
tokens = [t for c in chunks if c.logprobs for t in c.logprobs.content]
assert chunks[0].delta.role == "assistant" and chunks[0].delta.content == ""
assert len({{chunk.delta.role for chunk in chunks[1:]}} - {{None}}) == 0
logs = {{
    "num_chunks": len(said), "seconds": seen[-1] - seen[0], "num_tokens": len(tokens),
    "num_calls": len([call for c in chunks for call in c.delta.tool_calls or []]),
}}
is_right = "".join(said) == {expected!r} and chunks[-1].finish_reason == {reason!r}
return {{"reward": float(is_right), "extra_logs": logs, "scores": sum(t.logprob for t in tokens)}}
"""
ADD = ', tools=[{"type": "function", "function": {"name": "add"}}]'
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("words", "more", "expected", "reason"),
    [
        (WORDS, "", WORDS, "stop"),
        ("é" * 12 + "<tool_call>", "", "é" * 12 + "<tool_call>", "stop"),
        ("Let me add these. " + CALL, ADD, "Let me add these.", "tool_calls"),
        ("No <tool_calls for me, thanks", ADD, "No <tool_calls for me, thanks", "stop"),
    ],
    ids=["text", "halves of characters", "a call", "no call"],
)
def test_an_answer_is_streamed_while_it_is_sampled(
    words, more, expected, reason, tmp_path, tiny_tokenizer
):
    code = agent_of(STREAMING.format(more=more, expected=expected, reason=reason))
    result, _ = run(tmp_path, tiny_tokenizer, code, words=words)
    assert result.failure is None, result.failure
    assert result.reward == 1.0
    num_tokens = len(tiny_tokenizer.encode(words)) + 1
    logs = result.extra_logs
    assert logs["num_tokens"] == num_tokens
    assert logs["num_calls"] == (reason == "tool_calls")
    assert logs["num_chunks"] >= 3 and logs["seconds"] > 5 * DELAY_S
    (segment,) = result.segments
    assert result.score == pytest.approx(sum(segment.logprobs))


def test_a_streamed_turn_that_cannot_be_asked_has_a_status(tmp_path, tiny_tokenizer):
    body = """
try:
    await chat.create(model=session.model, messages=talk, stream=True, temperature=0.2)
except openai.BadRequestError as error:
    assert "the run samples with 1.0" in error.body["message"]
    stream = await chat.create(model=session.model, messages=talk, stream=True)
    return {"reward": float(len([chunk async for chunk in stream]))}
"""
    result, _ = run(tmp_path, tiny_tokenizer, agent_of(body), words="hello you")
    assert result.failure is None and result.reward > 3


@pytest.mark.parametrize(
    ("text", "settled"),
    [
        ("abc", "abc"),
        ("abc \ufffd", "abc"),
        ("abc <tool", "abc"),
        ("abc <to do", "abc <to do"),
        ("abc <tool_call>{", "abc"),
        (" abc", ""),  # a call would take the blank away
        ("", ""),
    ],
)
def test_only_what_cannot_change_is_said(text, settled):
    assert settled_text(text, reads_tool_calls=True) == settled
    assert settled_text(text, reads_tool_calls=False) == text.rstrip("\ufffd")
