"""From a row's value (text, message list or `conversations`) to the text that a model reads and the
spans of it that are learnt.

Rendered text holds stand-ins for special tokens spelled in messages (see `TextEncoder`), so nothing
they say can open or close a turn. Knows templates; knows nothing of token ids.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from openrlhf.errors import ConfigError
from openrlhf.utils.tokenizer import TemplateError, TextEncoder, chat_template_of, render_chat

Message = dict[str, object]
Span = tuple[int, int]

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_NAMES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
RENDERED = "is_rendered"  # column of `batch_inference`: the prompt is text as the model read it
_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RowError(ValueError):
    """One row cannot be used as it is; the message says why, the caller knows which row."""


class LeftOutError(ValueError):
    """The row is well formed but cannot be learned from; the message is what it is counted as."""


@dataclass(frozen=True)
class Rendered:
    """A text as the model reads it, and the character spans (start, end) of it that are learnt."""

    text: str
    spans: tuple[Span, ...] = ()
    is_cut: bool = False  # no EOS stands behind it: it did not come to its end, or holds its own

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """Return the text cut at its spans, each piece with True if it is learnt; white space
        behind the last span is left out.
        """
        pieces, position = [], 0
        for start, end in self.spans:
            pieces += [(self.text[position:start], False), (self.text[start:end], True)]
            position = end
        tail = self.text[position:]
        pieces.append((tail if tail.strip() or not self.spans else "", False))
        return [piece for piece in pieces if piece[0]]


def to_messages(value: object, *, text_role: str = "user") -> list[Message]:
    """Return messages with the roles of ROLES, from text (one message) or a list with role/content
    or from/value.
    """
    if isinstance(value, str):
        return [{"role": text_role, "content": value}]
    if isinstance(value, Mapping):
        value = value.get("messages") or value.get("conversations") or [value]
    if not isinstance(value, (list, tuple)):
        raise RowError(f"{type(value).__name__} instead of text or a message list")
    if not value:
        raise RowError("an empty message list")
    return [_to_message(item) for item in value]


@lru_cache(maxsize=4)
def frame_of(encoder: TextEncoder) -> tuple[str, str, str]:
    """Return what the tokenizer's chat template writes before a user's words, between them and the
    assistant's, and behind these; nothing where it refuses to.
    """
    question: Message = {"role": "user", "content": "QUESTION"}
    answer: Message = {"role": "assistant", "content": "ANSWER"}
    try:
        asked = render(encoder, [question], add_generation_prompt=True)
        rendered = render_dialogue(encoder, [question, answer])
    except (RowError, ConfigError):  # no template, or rows say what is refused
        return "", "", ""
    start, _, middle = asked.partition("QUESTION")
    stop = max((end for _, end in rendered.spans), default=None)
    return start, middle, rendered.text[:stop].rpartition("ANSWER")[2]


def wrap_input(value: Any, template: str) -> Any:
    """Put the template's text around a prompt: around its text or its last user message."""
    if isinstance(value, str):
        return template.replace("{input}", value)
    messages = [dict(message) for message in value]
    last = next((each for each in reversed(messages) if each["role"] == "user"), None)
    if last is not None and isinstance(last["content"], str):
        last["content"] = template.replace("{input}", last["content"])
    return messages


def wish_template(csft_prompt: str) -> str:
    """Return the template of a prompt with a wished reward: behind it, as the default writes it.

    A wish with `{input}` in it says itself where, as a model learnt it by another template.
    Example: "<rm_score>: 5.00" gives "{input} <rm_score>: 5.00 ".
    """
    return csft_prompt if "{input}" in csft_prompt else f"{{input}} {csft_prompt.strip()} "


def without_answer(messages: Sequence[Message]) -> list[Message]:
    """Return the messages before the assistant's turns at the end."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return list(messages[:end])


# Who may speak after whom; None is the beginning.
_FOLLOWERS: dict[str | None, tuple[str, ...]] = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


def check_order(messages: Sequence[Message]) -> None:
    """Raise RowError unless user and assistant take turns, after at most one system message, tools
    answer the assistant, and no user's message is blank.
    """
    before = None
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role not in _FOLLOWERS[before]:
            after = f"after the {before}'s" if before else "the first"
            raise RowError(f"message {number} is the {role}'s, {after}")
        if role == "user" and is_blank(message):
            raise RowError(f"message {number}, the user's, is empty")
        before = role


def plain_text(value: object, column: str) -> str:
    """Return the text of a column; raise RowError for anything else and for blank text."""
    if isinstance(value, (list, tuple, Mapping)):
        raise RowError(f"'{column}' is a message list. Add --apply_chat_template")
    if value is not None and not isinstance(value, str):
        raise RowError(f"'{column}' is {value!r}, not text. Write it as \"{value}\"")
    if not value or not value.strip():
        raise RowError(f"'{column}' is {'missing, not text' if value is None else 'empty'}")
    return value


def is_blank(message: Message) -> bool:
    """Return True for a message without text, parts of another kind or tool calls."""
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else content
    return not said and not message.get("tool_calls")


def fill_template(input_template: str | None, text: str) -> str:
    """Return the text inside a format string with one {}; a template without {} is not used."""
    if input_template is None or not has_placeholder(input_template):
        return text
    return input_template.format(text)


def has_placeholder(input_template: str | None) -> bool:
    """Return True if the template wraps anything; raise ConfigError when it is no format string
    with one {}.
    """
    if not input_template:
        return False
    try:
        return "\0" in input_template.format("\0")
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(
            f"--input_template {input_template!r} is not a format string with one {{}} "
            f"({error!r}). "
            "Write other braces twice."
        ) from error


def render(
    encoder: TextEncoder,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    tools: object = None,
) -> str:
    """Return the dialogue as the chat template writes it; raise RowError when the template refuses
    it.
    """
    return _run_template(encoder, messages, tools, add_generation_prompt=add_generation_prompt)[0]


def render_dialogue(
    encoder: TextEncoder,
    messages: Sequence[Message],
    *,
    tools: object = None,
    first: int = 0,
    is_cut: bool = False,
) -> Rendered:
    """Return the dialogue with the spans of the assistant's turns among its messages from `first`
    on, their end markers included; `is_cut`: the last of them met its length limit.

    Spans come from the template's generation markers, else from rendering prefixes of the dialogue,
    and end where inference stops: no model samples what a template writes behind that. Raises
    ConfigError for a template without markers whose prefixes are no prefixes, RowError for a
    refused dialogue.
    """
    check_order(messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    learnt = [i for i in turns if i >= first]
    if not learnt:
        raise RowError(f"the last message is the {messages[-1]['role']}'s, not the assistant's")
    if _GENERATION_MARKER.search(chat_template_of(encoder.tokenizer)):
        text, spans = _run_template(encoder, messages, tools, wants_spans=True)
        spans = spans[len(turns) - len(learnt) :]
    else:
        text = render(encoder, messages, tools=tools)
        spans = [_prefix_span(encoder, messages, i, text, tools) for i in learnt]
    spans = [(start, encoder.end_of_turn(text, start, end)) for start, end in spans]
    if spans and encoder.says_nothing(text[spans[-1][1] :]):
        text = text[: spans[-1][1]]
    if is_cut and spans:  # the template would end an answer that did not end
        *others, (start, end) = spans
        cut = text[:end].removesuffix(frame_of(encoder)[2])
        return Rendered(cut, (*others, (start, len(cut))), is_cut=True)
    return Rendered(text, tuple(spans))


def _prefix_span(
    encoder: TextEncoder, messages: Sequence[Message], index: int, text: str, tools: object
) -> Span:
    before = render(encoder, messages[:index], add_generation_prompt=True, tools=tools)
    is_last = index + 1 == len(messages)
    after = text if is_last else render(encoder, messages[: index + 1], tools=tools)
    if not (text.startswith(after) and after.startswith(before)):
        raise ConfigError(
            f"the chat template of {encoder.tokenizer.name_or_path} rewrites earlier turns, so the "
            "assistant's tokens cannot be told apart. Give one with {% generation %} markers with "
            "--tokenizer_chat_template, or leave --multiturn out."
        )
    return len(before), len(after)


def _run_template(
    encoder: TextEncoder, messages: Sequence[Message], tools: object, **options: bool
) -> tuple[str, list[Span]]:
    try:
        return render_chat(
            encoder.tokenizer,
            [_shown(encoder, message) for message in messages],
            tools=_tool_list(encoder, tools),
            **options,
        )
    except TemplateError as error:
        raise RowError(f"the chat template refuses it: {error}") from error


def _tool_list(encoder: TextEncoder, tools: object) -> list | None:
    """Return the tools of a row as a template may read them; JSON text keeps its nulls."""
    is_text = isinstance(tools, str)
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools or None
    except json.JSONDecodeError as error:
        raise RowError(f"'tools' is no JSON: {error}") from error
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise RowError(f"'tools' is {type(tools).__name__}, not a list")
    return _shown(encoder, tools, keeps_nulls=is_text) or None


def _to_message(item: object) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"a message is {type(item).__name__}, not an object with role and content")
    name = item.get("role") or item.get("from")  # a table gives every row both, one of them null
    role = _ROLE_NAMES.get(str(name).lower())
    if role is None:
        raise RowError(f"unknown role {name!r}; roles are {', '.join(ROLES)}")
    content = item.get("content")
    content = item.get("value") if content is None else content
    others = {
        key: value
        for key, value in item.items()
        if key not in ("role", "from", "content", "value") and value is not None
    }
    if content is None and not others:
        raise RowError(f"a {role} message without content")
    return {"role": role, "content": "" if content is None else content, **others}


def _shown(encoder: TextEncoder, value: Any, *, keeps_nulls: bool = False) -> Any:
    """Return a value with a stand-in for every special token in its texts, those of keys included,
    and without the keys that a table sets to null because other rows have them.
    """
    if isinstance(value, str):
        return encoder.hide(value)
    shown = partial(_shown, encoder, keeps_nulls=keeps_nulls)
    if isinstance(value, Mapping):
        return {shown(k): shown(v) for k, v in value.items() if keeps_nulls or v is not None}
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    return value
