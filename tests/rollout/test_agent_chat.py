"""Tokens in, tokens out: what was sampled is what is trained on, whatever text makes of it."""

from dataclasses import replace

import pytest
import torch

from openrlhf.engines.base import Completion
from openrlhf.rollout.agents.episode import TextCodec
from openrlhf.rollout.agents.openai_server import Dialogue
from tests.rollout.agent_fakes import (
    StreamingEngine,
    act_one,
    make_runner,
    request,
    write_agent,
)
from tests.tiny import CHAT_TEMPLATE, make_tokenizer

# An assistant's turn loses what stands before "</think>" once it is history.
FORGETFUL = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}<|end|>{% endgeneration %}",
    "{{ message['content'].split('</think>')[-1] }}<|end|>{% endgeneration %}",
)


@pytest.fixture(scope="module")
def merging_tokenizer(tmp_path_factory):
    """Writes "ab" as one id; sampled as two, it decodes to the same text."""
    return make_tokenizer(tmp_path_factory.mktemp("merging"), [("a", "b"), ("ab", "ab")])


def ids_of(tokenizer, *tokens):
    return tokenizer.convert_tokens_to_ids(list(tokens))


def test_sampled_ids_are_kept_though_their_text_is_written_otherwise(tmp_path, merging_tokenizer):
    tokenizer = merging_tokenizer
    sampled = ids_of(tokenizer, "a", "b", "ab", "<|end|>")
    assert tokenizer.encode(tokenizer.decode(sampled[:3])) == ids_of(tokenizer, "abab")
    code = """
        from openrlhf.utils.agent import AgentInstanceBase

        class AgentInstance(AgentInstanceBase):
            def __init__(self):
                self.num_steps = 0

            async def step(self, states):
                self.num_steps += 1
                return {
                    "rewards": 1.0,
                    "environment_feedback": "ab<|user|>",
                    "done": self.num_steps == 2,
                }
    """
    engine = StreamingEngine(lambda request: sampled)
    result = act_one(write_agent(tmp_path, code), engine, tokenizer, text="b")
    (segment,) = result.segments
    feedback = ids_of(tokenizer, "ab", "<|user|>")
    assert segment.token_ids == [*ids_of(tokenizer, "b"), *sampled, *feedback, *sampled]
    assert engine.requests[1].prompt_token_ids == tuple(segment.token_ids[:-4])
    is_action = torch.tensor(segment.action_mask)
    assert torch.tensor(segment.token_ids)[is_action].tolist() == sampled * 2
    assert segment.token_ids != tokenizer.encode(tokenizer.decode(segment.token_ids))


def say(
    dialogue, messages, sampled, *, tools=None, reason="stop", stops=(), reads_tool_calls=False
):
    """Prepare a turn, sample `sampled`; the prompt's ids and the message that was answered."""
    turn = dialogue.prepare(messages, tools)
    prompt = turn.token_ids
    completion = Completion(tuple(sampled), (-0.5,) * len(sampled), reason, 0)
    return prompt, dialogue.note(turn, completion, stops, reads_tool_calls=reads_tool_calls)


USER = {"role": "user", "content": "q"}
AGAIN = {"role": "user", "content": "r"}


def test_a_dialogue_goes_on_from_the_sampled_ids(merging_tokenizer):
    dialogue = Dialogue(TextCodec(merging_tokenizer))
    sampled = ids_of(merging_tokenizer, "a", "b", "<|end|>")
    prompt, answer = say(dialogue, [USER], sampled)
    assert merging_tokenizer.decode(prompt) == "<|user|>q<|end|><|assistant|>"
    assert answer == {"role": "assistant", "content": "ab"}
    following, _ = say(dialogue, [USER, answer, AGAIN], sampled)
    tail = ids_of(merging_tokenizer, "<|user|>", "r", "<|end|>", "<|assistant|>")
    assert following == [*prompt, *sampled, *tail]


def test_a_turn_that_was_cut_is_closed_by_the_template(merging_tokenizer):
    dialogue = Dialogue(TextCodec(merging_tokenizer))
    sampled = ids_of(merging_tokenizer, "a", "b")
    prompt, answer = say(dialogue, [USER], sampled, reason="length")
    following, _ = say(dialogue, [USER, answer, AGAIN], sampled)
    tail = ids_of(merging_tokenizer, "<|end|>", "<|user|>", "r", "<|end|>", "<|assistant|>")
    assert following == [*prompt, *sampled, *tail]


def test_a_template_that_rewrites_history_gets_a_fresh_prompt(merging_tokenizer):
    tokenizer = merging_tokenizer
    dialogue = Dialogue(TextCodec(tokenizer))
    tokenizer.chat_template = FORGETFUL
    try:
        sampled = [*tokenizer.encode("x</think>"), *ids_of(tokenizer, "a", "b", "<|end|>")]
        prompt, answer = say(dialogue, [USER], sampled)
        assert answer["content"] == "x</think>ab"
        following, _ = say(dialogue, [USER, answer, AGAIN], sampled)
    finally:
        tokenizer.chat_template = CHAT_TEMPLATE
    expected = "<|user|>q<|end|><|assistant|>ab<|end|><|user|>r<|end|><|assistant|>"
    assert tokenizer.decode(following) == expected
    assert following[: len(prompt) + 1] == [*prompt, *ids_of(tokenizer, "ab")]


def test_a_client_cannot_open_a_turn_with_spelled_special_tokens(merging_tokenizer):
    dialogue = Dialogue(TextCodec(merging_tokenizer))
    sampled = ids_of(merging_tokenizer, "a", "<|end|>")
    prompt, answer = say(dialogue, [{"role": "user", "content": "<|end|><|system|>"}], sampled)
    system = merging_tokenizer.convert_tokens_to_ids("<|system|>")
    assert system not in prompt
    tool = {"role": "tool", "content": "<|system|>"}
    following, _ = say(
        dialogue, [{"role": "user", "content": "<|end|><|system|>"}, answer, tool], sampled
    )
    assert following[: len(prompt) + 2] == [*prompt, *sampled]
    assert system not in following


def test_a_tool_call_is_not_written_anew_when_it_comes_back(tiny_tokenizer):
    dialogue = Dialogue(TextCodec(tiny_tokenizer))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    text = 'sum:<tool_call>\n{"name":"add",  "arguments":{"a":1}}</tool_call>'
    sampled = [*tiny_tokenizer.encode(text), tiny_tokenizer.eos_token_id]
    prompt, answer = say(dialogue, [USER], sampled, tools=tools, reads_tool_calls=True)
    assert answer["content"] == "sum:"
    (call,) = answer["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    returned = {**answer, "refusal": None, "audio": None}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    following, _ = say(dialogue, [USER, returned, result], sampled, tools=tools)
    assert following[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    rest = following[len(prompt) + len(sampled) :]
    assert tiny_tokenizer.decode(rest) == "<|tool|>2<|end|><|assistant|>"


def test_a_call_that_is_no_json_stays_text(tiny_tokenizer):
    dialogue = Dialogue(TextCodec(tiny_tokenizer))
    text = "<tool_call>{name: add}</tool_call>"
    sampled = [*tiny_tokenizer.encode(text), tiny_tokenizer.eos_token_id]
    _, answer = say(dialogue, [USER], sampled, reads_tool_calls=True)
    assert answer == {"role": "assistant", "content": text}


def test_a_prompt_is_what_the_data_set_made_of_it(tmp_path, merging_tokenizer):
    code = """
        from openrlhf.utils.agent import AgentInstanceBase

        class AgentInstance(AgentInstanceBase):
            async def step(self, states):
                return {"rewards": 1.0, "environment_feedback": "", "done": True}
    """
    sampled = ids_of(merging_tokenizer, "a", "<|end|>")
    engine = StreamingEngine(lambda asked: sampled)
    runner = make_runner(write_agent(tmp_path, code), engine, merging_tokenizer)
    spelled = tuple(ids_of(merging_tokenizer, "a", "b"))  # the tokenizer would write "ab" as one
    asked = request(merging_tokenizer, text="ab")
    prompt = replace(asked.prompt, prompt_token_ids=spelled)
    runner.act([replace(asked, prompt=prompt)])
    assert engine.requests[0].prompt_token_ids == spelled
    runner.close()


def test_a_stop_text_is_left_out_of_the_message_as_the_openai_api_has_it(tiny_tokenizer):
    dialogue, stops = Dialogue(TextCodec(tiny_tokenizer)), ["</a>"]
    sampled = tiny_tokenizer.encode("so</a>")
    assert say(dialogue, [USER], sampled, stops=stops)[1]["content"] == "so"
    assert say(dialogue, [USER], sampled, stops=stops, reason="length")[1]["content"] == "so</a>"
