"""The official OpenAI client, and agents written with it, on the policy's own server."""

import time

import pytest

from openrlhf.engines.base import GenerationRequest
from openrlhf.utils.agent import AgentError
from tests.rollout.agent_fakes import (
    StreamingEngine,
    act_one,
    make_runner,
    request,
    says,
    write_agent,
)

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CALCULATOR = """
import json
from openai import AsyncOpenAI
from openrlhf.utils.agent import OpenAIAgentExecutor

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
    },
}

class AgentExecutor(OpenAIAgentExecutor):
    async def run(self, session, prompt, label):
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        messages = [{"role": "user", "content": prompt}]
        for turn in range(4):
            answer = await client.chat.completions.create(
                model=session.model, messages=messages, tools=[ADD], stream=STREAM
            )
            message = await read(answer)
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                numbers = json.loads(call["function"]["arguments"])
                result = str(numbers["a"] + numbers["b"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return {"reward": float(message["content"] == label), "extra_logs": {"turns": turn + 1}}

async def read(answer):
    if not STREAM:
        message = answer.choices[0].message
        expected = "tool_calls" if message.tool_calls else "stop"
        assert answer.choices[0].finish_reason == expected
        return message.model_dump()
    message = {"role": "assistant", "content": "", "tool_calls": []}
    async for chunk in answer:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        for call in delta.tool_calls or []:
            message["tool_calls"].append(call.model_dump(exclude={"index"}))
    return message
"""


@pytest.fixture
def tool_tokenizer(tiny_tokenizer):
    kept = tiny_tokenizer.chat_template
    tiny_tokenizer.chat_template = TOOL_TEMPLATE
    yield tiny_tokenizer
    tiny_tokenizer.chat_template = kept


def adds_twice(tokenizer):
    """A policy that calls the tool with odd spacing, again with its result, then tells it."""

    def say(asked: GenerationRequest):
        text = tokenizer.decode(asked.prompt_token_ids)
        results = [part.split("<|end|>")[0] for part in text.split("<|tool|>")[1:]]
        if len(results) < 2:
            a = results[-1] if results else 1
            words = f'I add.<tool_call>{{"name":"add","arguments":{{"a":{a},  "b":2}}}}</tool_call>'
        else:
            words = results[-1]
        return [*tokenizer.encode(words), tokenizer.eos_token_id]

    return say


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_tool_using_agent_runs_on_the_official_client(is_streamed, tmp_path, tool_tokenizer):
    file = write_agent(tmp_path, f"STREAM = {is_streamed}\n{CALCULATOR}")
    engine = StreamingEngine(adds_twice(tool_tokenizer))
    engine.weight_version = 4
    result = act_one(file, engine, tool_tokenizer, max_length=2000, label="5", text="1+2+2?")
    assert (result.reward, result.num_turns, result.extra_logs) == (1.0, 3, {"turns": 3.0})
    (segment,) = result.segments  # the calls came back as they had been sampled
    text = tool_tokenizer.decode(segment.token_ids)
    call = 'I add.<tool_call>{"name":"add","arguments":{"a":%s,  "b":2}}</tool_call><|end|>'
    turns = [call % 1, "<|tool|>3<|end|><|assistant|>", call % 3, "<|tool|>5<|end|><|assistant|>"]
    assert text.endswith("<|user|>1+2+2?<|end|><|assistant|>" + "".join(turns) + "5<|end|>")
    assert text.startswith('<|system|>[{"type": "function", "function": {"name": "add"')
    num_sampled = sum(len(tool_tokenizer.encode(call % n)) for n in (1, 3)) + 2
    assert len(segment.logprobs) == sum(segment.action_mask) == num_sampled
    assert set(segment.weight_versions) == {4}


def agent_of(body: str, extra: str = "") -> str:
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    return (
        "import asyncio, json, openai\n"
        "from openrlhf.utils.agent import OpenAIAgentExecutor\n"
        "KEPT = []\n"
        f"class AgentExecutor(OpenAIAgentExecutor):\n{extra}\n"
        "    async def run(self, session, prompt, label):\n"
        "        client = openai.AsyncOpenAI(\n"
        "            base_url=session.base_url, api_key=session.api_key, max_retries=0)\n"
        "        chat = client.chat.completions\n"
        "        talk = [{'role': 'user', 'content': prompt}]\n"
        f"{lines}\n"
    )


def run_agent(body, tmp_path, tokenizer, *, extra="", **options):
    file = write_agent(tmp_path, agent_of(body, extra))
    engine = StreamingEngine(says(tokenizer, "yes"))
    result = act_one(file, engine, tokenizer, **options)
    return result, engine


def test_models_tokens_and_logprobs_are_told(tmp_path, tiny_tokenizer):
    body = """
models = await client.models.list()
assert [model.id for model in models.data] == [session.model]
told = await client.post("/tokenize", body={"messages": talk}, cast_to=object)
answer = await chat.create(model=session.model, messages=talk, logprobs=True)
choice = answer.choices[0]
assert answer.usage.prompt_tokens == told["count"] == len(told["tokens"])
assert "".join(entry.token for entry in choice.logprobs.content) == "yes<|end|>"
text = await client.post("/tokenize", body={"prompt": "yes"}, cast_to=object)
assert text["count"] == 3 and text["max_model_len"] == 256
return {"reward": sum(entry.logprob for entry in choice.logprobs.content)}
"""
    result, _ = run_agent(body, tmp_path, tiny_tokenizer)
    (segment,) = result.segments
    assert result.reward == pytest.approx(sum(segment.logprobs))


def test_what_the_run_does_not_do_is_refused_by_the_field(tmp_path, tiny_tokenizer):
    body = """
refused = {}
cases = [
    {"temperature": 0.3}, {"n": 2}, {"response_format": {"type": "json_object"}},
    {"tool_choice": "required"}, {"stop": ["a", ""]}, {"messages": []},
    {"messages": [{"role": "king", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"top_logprobs": 3}, {"extra_body": {"guided_json": {"type": "object"}}},
]
for case in cases:
    try:
        await chat.create(**{"model": session.model, "messages": talk, **case})
    except openai.BadRequestError as error:
        refused[next(iter(case)) + str(len(refused))] = error.body["message"]
assert "the run samples with 1.0" in refused["temperature0"]
assert "unknown role 'king'" in refused["messages6"]
assert "guided_json is {" in refused["extra_body9"]
await chat.create(model=session.model, messages=talk)
return {"reward": 1.0, "extra_logs": {key: 1 for key in refused}}
"""
    result, _ = run_agent(body, tmp_path, tiny_tokenizer)
    assert result.num_turns == 1
    assert len(result.extra_logs) == 10  # every case


def test_a_stop_text_of_several_tokens_ends_a_turn_before_it(tmp_path, tiny_tokenizer):
    body = """
answer = await chat.create(model=session.model, messages=talk, stop=["es", "two words"])
assert answer.choices[0].message.content == "y"
return {"reward": 1.0}
"""
    result, engine = run_agent(body, tmp_path, tiny_tokenizer)
    assert engine.requests[0].sampling.stop == ("es", "two words")
    (segment,) = result.segments
    assert tiny_tokenizer.decode(segment.token_ids).endswith("yes<|end|>")  # what was sampled


def test_a_stop_text_that_ends_within_a_character_is_left_out(tmp_path, tiny_tokenizer):
    body = """
ends = {"stop_token_ids": [int(label)]}  # as the engine ends behind a text
answer = await chat.create(model=session.model, messages=talk, stop=["é"], extra_body=ends)
assert answer.choices[0].message.content == "42"
return {"reward": 1.0}
"""
    file = write_agent(tmp_path, agent_of(body))
    ids = tiny_tokenizer("42é", add_special_tokens=False)["input_ids"]
    assert len(ids) == len("42é") + 1
    engine = StreamingEngine(lambda request: ids)
    result = act_one(file, engine, tiny_tokenizer, label=str(ids[-1]))
    assert not isinstance(result, AgentError), result


def test_a_client_may_send_the_sampling_of_its_episode(tmp_path, tiny_tokenizer):
    body = """
sampling = {"temperature": session.temperature, "top_p": session.top_p}
await chat.create(model=session.model, messages=talk, **sampling)
return {"reward": session.temperature + session.top_p}
"""
    sampling = {"temperature": 0.6, "top_p": 0.9}
    result, _ = run_agent(body, tmp_path, tiny_tokenizer, sampling=sampling)
    assert result.reward == 1.5


THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}--{% endif %}"
    "{% endif %}"
)


def test_variables_that_a_row_sets_for_the_chat_template_are_those_of_its_episode(
    tmp_path, tiny_tokenizer
):
    body = "await chat.create(model=session.model, messages=talk)\nreturn {'reward': 1.0}"
    kept, tiny_tokenizer.chat_template = tiny_tokenizer.chat_template, THINKING
    columns = {"chat_template_kwargs": {"enable_thinking": False, "other": None}}
    try:
        result, _ = run_agent(body, tmp_path, tiny_tokenizer, columns=columns)
    finally:
        tiny_tokenizer.chat_template = kept
    (segment,) = result.segments
    assert "<|assistant|>--yes" in tiny_tokenizer.decode(segment.token_ids)


def test_a_full_context_is_told_as_openai_tells_it(tmp_path, tiny_tokenizer):
    body = """
for turn in range(9):
    try:
        answer = await chat.create(model=session.model, messages=talk)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
        break
    talk += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
return {"reward": 1.0, "truncated": True}
"""
    result, _ = run_agent(body, tmp_path, tiny_tokenizer, max_length=40)
    (segment,) = result.segments
    assert len(segment.token_ids) <= 40
    assert 2 < result.num_turns < 9


def test_a_blocking_client_is_answered(tmp_path, tiny_tokenizer):
    body = """
plain = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
answer = plain.chat.completions.create(model=session.model, messages=talk)
return {"reward": float(answer.choices[0].message.content == "yes")}
"""
    result, _ = run_agent(body, tmp_path, tiny_tokenizer)
    assert result.reward == 1.0


def test_a_key_ends_with_its_episode_and_others_are_refused(tmp_path, tiny_tokenizer):
    body = """
KEPT.append(session.api_key)
await chat.create(model=session.model, messages=talk)
for key in ["sk-wrong", *KEPT[:-1]]:
    stranger = openai.AsyncOpenAI(base_url=session.base_url, api_key=key, max_retries=0)
    try:
        await stranger.chat.completions.create(model=session.model, messages=talk)
    except (openai.AuthenticationError, openai.ConflictError):
        continue
    return {"reward": 0.0}
return {"reward": 1.0}
"""
    file = write_agent(tmp_path, agent_of(body))
    runner = make_runner(file, StreamingEngine(says(tiny_tokenizer, "yes")), tiny_tokenizer)
    for name in ("first", "second"):
        result = runner.act([request(tiny_tokenizer, name=name)])[name]
        assert (result.reward, result.num_turns) == (1.0, 1)
    runner.close()


def test_sessions_of_many_episodes_do_not_mix(tmp_path, tiny_tokenizer):
    body = """
for turn in range(3):
    answer = await chat.create(model=session.model, messages=talk)
    talk += [answer.choices[0].message.model_dump(), {"role": "user", "content": "go"}]
await client.close()
return {"reward": 1.0}
"""
    file = write_agent(tmp_path, agent_of(body))
    engine = StreamingEngine(lambda asked: [*asked.prompt_token_ids[1:3], 1], delay_s=0.02)
    runner = make_runner(file, engine, tiny_tokenizer)
    names = [f"{a}{b}" for a in "abcd" for b in "efghi"]
    began_s = time.monotonic()
    results = runner.act([request(tiny_tokenizer, text=name, name=name) for name in names])
    for name, result in results.items():
        (segment,) = result.segments
        text = tiny_tokenizer.decode(segment.token_ids)
        turn = f"<|assistant|>{name}<|end|>"
        assert text == f"<|user|>{name}<|end|>{turn}" + f"<|user|>go<|end|>{turn}" * 2
    assert time.monotonic() - began_s < 25
    runner.close()


def test_bodies_that_are_no_requests_are_refused(tmp_path, tiny_tokenizer):
    body = """
import httpx
headers = {"authorization": f"Bearer {session.api_key}"}
async with httpx.AsyncClient(base_url=session.base_url, headers=headers) as web:
    statuses = [
        (await web.post("/chat/completions", content=b"{")).status_code,
        (await web.post("/chat/completions", json=[1])).status_code,
        (await web.post("/chat/completions", content=b"[" * 99_999)).status_code,
        (await web.post("/chat/completions", content=DEEP)).status_code,
        (await web.post("/chat/completions", content=HALF)).status_code,
        (await web.post("/chat/completions", content=HALF_IN_BYTES)).status_code,
        (await web.post("/chat/completions", json={"model": "m", "messages": talk})).status_code,
        (await web.post("/chat/completions", json={"messages": DEEP_CALL})).status_code,
        (await web.post("/tokenize", json={})).status_code,
        (await web.get("/nothing")).status_code,
        (await web.get("/health", headers={"authorization": ""})).status_code,
        (await web.get("/models", headers={"authorization": ""})).status_code,
    ]
await chat.create(model=session.model, messages=talk)
return {"reward": 1.0, "extra_logs": {str(k): s for k, s in enumerate(statuses)}}
"""
    extra = r"""
    global DEEP, HALF, HALF_IN_BYTES, DEEP_CALL
    DEEP = b'{"messages": [{"role": "user", "content": ""}], "x": ' + b"[" * 300 + b"]" * 300 + b"}"
    HALF = b'{"messages": [{"role": "user", "content": "a \ud800 b"}]}'
    HALF_IN_BYTES = HALF.replace(b"\\ud800", b"\xed\xa0\x80")
    CALL = {"function": {"name": "f", "arguments": '{"a":' * 5000}}
    DEEP_CALL = [{"role": "user", "content": "x"},
                 {"role": "assistant", "content": "", "tool_calls": [CALL]}]
"""
    result, _ = run_agent(body, tmp_path, tiny_tokenizer, extra=extra)
    statuses = list(result.extra_logs.values())
    assert statuses == [*[400] * 9, 404, 200, 401]


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
    engine = StreamingEngine(says(tiny_tokenizer, "one two three " * 20), token_s=0.02)
    file = write_agent(tmp_path, agent_of(body))
    result = act_one(file, engine, tiny_tokenizer)
    assert (result.num_turns, len(engine.aborted)) == (1, 1)  # the lost turn is not trained on


def test_a_streamed_answer_has_logprobs_and_usage_where_they_are_asked_for(
    tmp_path, tiny_tokenizer
):
    body = """
try:
    await chat.create(model=session.model, messages=talk, stream=True, temperature=0.2)
    return {"reward": 0.0}
except openai.BadRequestError as error:
    assert "the run samples with 1.0" in error.body["message"]
stream = await chat.create(
    model=session.model, messages=talk, stream=True, logprobs=True,
    stream_options={"include_usage": True})
chunks = [chunk async for chunk in stream]
told = [token.token for token in chunks[0].choices[0].logprobs.content]
assert chunks[0].choices[0].delta.role == "assistant" and "".join(told) == "yes<|end|>"
assert chunks[-1].choices == [] and chunks[-2].choices[0].finish_reason == "stop"
return {"reward": chunks[-1].usage.completion_tokens}
"""
    result, _ = run_agent(body, tmp_path, tiny_tokenizer)
    assert result.reward == 4
