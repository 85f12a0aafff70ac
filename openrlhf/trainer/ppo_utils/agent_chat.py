"""Messages in and out, tokens in between: one episode's dialogue with the policy.

A message that the policy wrote comes back from the client as text. Where the chat template keeps
it as it was, the sampled ids themselves stay in the next prompt; where it does not (reasoning cut
out, white space trimmed), the dialogue is rendered anew and the trace begins a segment.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf.datasets.chat import Message, RowError, render, to_messages
from openrlhf.engines.base import Completion
from openrlhf.errors import ConfigError
from openrlhf.trainer.ppo_utils.agent_engine import TextCodec
from openrlhf.utils.agent import BadAnswerError

KEPT_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
# The form that Hermes and Qwen models write: one JSON object between two marks, any number of them.
MAX_DEPTH = 64  # of JSON: what is nested deeper, templates and encoders fail on
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A function the policy wants called."""

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(8)}")

    def to_json(self) -> dict[str, Any]:
        """As the OpenAI API writes it."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Reply:
    """What the policy said, taken apart."""

    text: str  # as it was sampled, without the token that ended it
    content: str | None  # None where there is nothing but tool calls
    tool_calls: tuple[ToolCall, ...] = ()

    def to_message(self) -> Message:
        """The assistant's message of the API."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.to_json() for call in self.tool_calls]
        return message


@dataclass(frozen=True)
class _Turn:
    """A turn that was sampled."""

    messages: list[Message]  # that it answers, as clients write them
    spoken: list[Message]  # the same with the policy's own words in its messages
    tools: object
    rendered: str  # of `spoken`, with the beginning of the answer
    token_ids: list[int]  # prompt and answer
    reply: Reply
    stop_text: str  # of the token that ended it; empty when it was cut

    @property
    def answer(self) -> Message:
        """The reply as it is compared with what a client sends back."""
        return comparable(self.reply.to_message())


@dataclass(frozen=True)
class PreparedTurn:
    """A prompt that is ready to be sampled from."""

    token_ids: list[int]
    rendered: str
    messages: list[Message]
    spoken: list[Message]
    tools: object


class Dialogue:
    """Turns messages into prompts that go on from what was sampled wherever that is possible."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self._turns: list[_Turn] = []

    def prepare(self, messages: object, tools: object = None) -> PreparedTurn:
        """The prompt for the next turn; BadAnswerError for messages the template refuses."""
        wanted = [comparable(message) for message in checked_messages(messages)]
        last = self._turn_before(wanted, tools)
        continued = None if last is None else self._continue(last, wanted, tools)
        return continued or self._begin(wanted, tools)

    def note(
        self, prepared: PreparedTurn, completion: Completion, *, reads_tool_calls: bool
    ) -> Reply:
        """Remember a sampled turn and answer what it says."""
        is_cut = completion.finish_reason == "length"
        body = completion.token_ids if is_cut else completion.token_ids[:-1]
        text = self.codec.decode(body)
        stop_text = "" if is_cut else self.codec.decode(completion.token_ids[-1:])
        reply = parse_reply(text) if reads_tool_calls else Reply(text, text)
        self._turns.append(
            _Turn(
                messages=prepared.messages,
                spoken=prepared.spoken,
                tools=prepared.tools,
                rendered=prepared.rendered,
                token_ids=[*prepared.token_ids, *completion.token_ids],
                reply=reply,
                stop_text=stop_text,
            )
        )
        return reply

    def _turn_before(self, messages: list[Message], tools: object) -> _Turn | None:
        """The longest turn whose question and answer the messages begin with."""
        begun = [
            turn
            for turn in self._turns
            if len(turn.messages) < len(messages)
            and turn.tools == tools
            and messages[: len(turn.messages)] == turn.messages
            and messages[len(turn.messages)] == turn.answer
        ]
        return max(begun, key=lambda turn: len(turn.messages), default=None)

    def _continue(self, last: _Turn, messages: list[Message], tools: object) -> PreparedTurn | None:
        """The prompt behind a sampled turn; None where the template does not keep that as it was.

        The policy's own words stand in for its message, so that a tool call is not written anew.
        """
        own: Message = {"role": "assistant", "content": last.reply.text}
        spoken = [*last.spoken, own, *messages[len(last.messages) + 1 :]]
        rendered = self._render(spoken, tools)
        kept = last.rendered + self.codec.encoder.hide(last.reply.text) + last.stop_text
        if not rendered.startswith(kept):
            return None
        ids = [*last.token_ids, *self.codec.encode_continuation(rendered[len(kept) :])]
        return PreparedTurn(ids, rendered, messages, spoken, tools)

    def _begin(self, messages: list[Message], tools: object) -> PreparedTurn:
        rendered = self._render(messages, tools)
        ids = self.codec.encoder.encode_prompts([rendered])[0]
        return PreparedTurn(ids, rendered, messages, messages, tools)

    def _render(self, messages: Sequence[Message], tools: object) -> str:
        try:
            shown = [for_template(message) for message in messages]
            return render(self.codec.encoder, shown, add_generation_prompt=True, tools=tools)
        except (RowError, ConfigError) as error:
            raise BadAnswerError(str(error)) from error


def parse_reply(text: str) -> Reply:
    """Content and tool calls of a text; a call that is not valid JSON stays content."""
    calls = []
    for match in TOOL_CALL.finditer(text):
        call = _tool_call(match[1])
        if call is None:
            return Reply(text, text)
        calls.append(call)
    if not calls:
        return Reply(text, text)
    return Reply(text, TOOL_CALL.sub("", text).strip() or None, tuple(calls))


def read_json(text: str) -> Any:
    """Return what JSON holds; ValueError where it nests too deeply or has halves of characters."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [part for item in level for part in _parts(item)]
    if level:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _tool_call(text: str) -> ToolCall | None:
    try:
        call = read_json(text)
    except ValueError:
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)


def checked_messages(messages: object) -> list[Message]:
    """Messages with known roles and text; raises BadAnswerError naming the bad one."""
    if not isinstance(messages, list) or not messages:
        raise BadAnswerError("messages is not a list with at least one message")
    checked = []
    for index, message in enumerate(messages):
        try:
            (known,) = to_messages([message])
        except RowError as error:
            raise BadAnswerError(f"messages[{index}]: {error}") from error
        checked.append({**known, "content": _text_of(known["content"], index)})
    return checked


def _text_of(content: object, index: int) -> str:
    """Text of a message, from a string or from text parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [p.get("text") for p in parts if isinstance(p, Mapping) and p.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise BadAnswerError(f"messages[{index}].content has parts that are not text")
    return "".join(str(text) for text in texts)


def comparable(message: Mapping[str, Any]) -> Message:
    """A message without what clients add or leave out, arguments of tool calls as objects."""
    kept: Message = {key: message[key] for key in KEPT_KEYS if message.get(key)}
    kept["content"] = message.get("content") or ""
    if "tool_calls" in kept:
        kept["tool_calls"] = [_function_of(call) for call in message["tool_calls"]]
    return kept


def for_template(message: Message) -> Message:
    """A message as chat templates read it: tool calls below "function"."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    shown = [{"type": "function", "function": call} for call in calls]
    return {**message, "tool_calls": shown}


def _function_of(call: Any) -> dict[str, Any]:
    function = call.get("function", {}) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments or "{}")
        except ValueError as error:
            raise BadAnswerError(f"tool call arguments are not JSON: {error}") from error
    return {"name": function.get("name"), "arguments": arguments}
