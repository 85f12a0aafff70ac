"""Messages in and out, tokens in between: one episode's dialogue with the policy.

A message that the policy wrote comes back from the client as text. Where the chat template keeps
it as it was, the sampled ids themselves stay in the next prompt; where it does not (reasoning cut
out, white space trimmed), the dialogue is rendered anew and the trace begins a segment.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from openrlhf.datasets.chat import Message, RowError, render, to_messages
from openrlhf.engines.base import Completion
from openrlhf.errors import ConfigError
from openrlhf.rollout.agents.engine import TextCodec
from openrlhf.utils.agent import BadAnswerError

KEPT_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
# The form that Hermes and Qwen models write: one JSON object between two marks, any number of them.
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass
class Turn:
    """A turn of the dialogue: its prompt, and what was said once it is sampled."""

    messages: list[Message]  # that it answers, as clients write them
    spoken: list[Message]  # the same with the policy's own words in its messages
    tools: object
    rendered: str  # of `spoken`, with the beginning of the answer
    token_ids: list[int]  # prompt, then answer
    text: str = ""  # as it was sampled, without the token that ended it
    stop_text: str = ""  # of the token that ended it; empty when it was cut
    message: Message = field(default_factory=dict)  # the assistant's message of the API


class Dialogue:
    """Turns messages into prompts that go on from what was sampled wherever that is possible."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self._turns: list[Turn] = []

    def prepare(self, messages: object, tools: object = None) -> Turn:
        """Return the next turn's prompt; BadAnswerError for messages the template refuses."""
        wanted = [comparable(message) for message in checked_messages(messages)]
        last = self._turn_before(wanted, tools)
        continued = None if last is None else self._continue(last, wanted, tools)
        return continued or self._begin(wanted, tools)

    def note(self, turn: Turn, completion: Completion, *, reads_tool_calls: bool) -> Message:
        """Remember a sampled turn and return the assistant's message."""
        is_cut = completion.finish_reason == "length"
        body = completion.token_ids if is_cut else completion.token_ids[:-1]
        turn.text = self.codec.decode(body)
        turn.stop_text = "" if is_cut else self.codec.decode(completion.token_ids[-1:])
        plain: Message = {"role": "assistant", "content": turn.text}
        turn.message = with_tool_calls(turn.text) or plain if reads_tool_calls else plain
        turn.token_ids = [*turn.token_ids, *completion.token_ids]
        self._turns.append(turn)
        return turn.message

    def _turn_before(self, messages: list[Message], tools: object) -> Turn | None:
        """Return the longest turn whose question and answer the messages begin with."""
        begun = [
            turn
            for turn in self._turns
            if len(turn.messages) < len(messages)
            and turn.tools == tools
            and messages[: len(turn.messages)] == turn.messages
            and messages[len(turn.messages)] == comparable(turn.message)
        ]
        return max(begun, key=lambda turn: len(turn.messages), default=None)

    def _continue(self, last: Turn, messages: list[Message], tools: object) -> Turn | None:
        """Return the prompt behind a turn; None where the template does not keep that as it was.

        The policy's own words stand in for its message, so that a tool call is not written anew.
        """
        own: Message = {"role": "assistant", "content": last.text}
        spoken = [*last.spoken, own, *messages[len(last.messages) + 1 :]]
        rendered = self._render(spoken, tools)
        kept = last.rendered + self.codec.encoder.hide(last.text) + last.stop_text
        if not rendered.startswith(kept):
            return None
        ids = [*last.token_ids, *self.codec.encode_continuation(rendered[len(kept) :])]
        return Turn(messages, spoken, tools, rendered, ids)

    def _begin(self, messages: list[Message], tools: object) -> Turn:
        rendered = self._render(messages, tools)
        ids = self.codec.encoder.encode_prompt(rendered)
        return Turn(messages, messages, tools, rendered, ids)

    def _render(self, messages: Sequence[Message], tools: object) -> str:
        try:
            shown = [for_template(message) for message in messages]
            return render(self.codec.encoder, shown, add_generation_prompt=True, tools=tools)
        except (RowError, ConfigError) as error:
            raise BadAnswerError(str(error)) from error


def with_tool_calls(text: str) -> Message | None:
    """Return the message of a text with tool calls; None without any, or with a broken one."""
    calls = []
    for match in TOOL_CALL.finditer(text):
        try:
            call = from_json(match[1])
        except ValueError:
            return None
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False)
        function = {"name": name, "arguments": written}
        calls.append(
            {"id": f"call_{secrets.token_hex(8)}", "type": "function"} | {"function": function}
        )
    if not calls:
        return None
    content = TOOL_CALL.sub("", text).strip() or None
    return {"role": "assistant", "content": content, "tool_calls": calls}


def checked_messages(messages: object) -> list[Message]:
    """Return messages with known roles and text; raises BadAnswerError naming the bad one."""
    if not isinstance(messages, list) or not messages:
        raise BadAnswerError("messages is not a list with at least one message")
    checked = []
    for index, message in enumerate(messages):
        try:
            (known,) = to_messages([message])
        except RowError as error:
            raise BadAnswerError(f"messages[{index}]: {error}") from error
        checked.append({**known, "content": text_of_parts(known["content"], index)})
    return checked


def text_of_parts(content: object, index: int) -> str:
    """Return the text of a message, from a string or from text parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [p.get("text") for p in parts if isinstance(p, Mapping) and p.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise BadAnswerError(f"messages[{index}].content has parts that are not text")
    return "".join(str(text) for text in texts)


def comparable(message: Mapping[str, Any]) -> Message:
    """Return a message without what clients add or leave out, tool arguments as objects."""
    kept: Message = {key: message[key] for key in KEPT_KEYS if message.get(key)}
    kept["content"] = message.get("content") or ""
    if "tool_calls" in kept:
        kept["tool_calls"] = [function_of(call) for call in message["tool_calls"]]
    return kept


def function_of(call: Any) -> dict[str, Any]:
    """Return name and arguments of a tool call; raises BadAnswerError."""
    function = call.get("function", {}) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments or "{}")
        except ValueError as error:
            raise BadAnswerError(f"tool call arguments are not JSON: {error}") from error
    return {"name": function.get("name"), "arguments": arguments}


def for_template(message: Message) -> Message:
    """Return a message as chat templates read it: tool calls below "function"."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    shown = [{"type": "function", "function": call} for call in calls]
    return {**message, "tool_calls": shown}
