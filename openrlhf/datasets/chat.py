"""From a row's value (text, message list or `conversations`) to rendered text and the spans the
assistant wrote.

Rendered text holds stand-ins for special tokens spelled in messages (see `TextEncoder`), so nothing
they say can open or close a turn. Knows templates; knows nothing of token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from openrlhf.errors import ConfigError
from openrlhf.utils.tokenizer import TemplateError, TextEncoder, chat_template_of, render_chat

Message = dict[str, object]
Span = tuple[int, int]

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_NAMES = {
    **{role: role for role in ROLES},
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
RENDERED = "is_rendered"  # column of `batch_inference`: the prompt is text as the model read it
_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RowError(ValueError):
    """One row cannot be used as it is; the message says why, the caller knows which row."""


@dataclass(frozen=True)
class Rendered:
    """A dialogue as its template writes it, and the character spans (start, end) of assistant
    turns.
    """

    text: str
    assistant_spans: tuple[Span, ...]


@dataclass(frozen=True)
class Segment:
    """A piece of rendered text that is tokenised by itself."""

    text: str
    is_target: bool
    is_cut: bool = False  # no EOS stands behind it: it did not come to its end, or holds its own


class LeftOutError(ValueError):
    """The row is well formed but cannot be learned from; the message is what it is counted as."""


class Frame(NamedTuple):
    """What a chat template writes around a user's words and behind the assistant's."""

    start: str
    middle: str  # between the two: the generation prompt and what stands before it
    end: str


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


def render_prompt(
    row: Mapping[str, object],
    *,
    input_key: str,
    input_template: str | None,
    apply_chat_template: bool,
    encoder: TextEncoder,
) -> str:
    """Return the rendered prompt of a row, ready for the assistant to write; raise RowError for one
    that cannot be rendered.

    A trailing assistant turn is an answer, not part of the prompt, and is left out. A prompt that
    is rendered already stays as it is.
    """
    value = row[input_key]
    if is_rendered(row, value, encoder, apply_chat_template=apply_chat_template):
        return plain_text(value, input_key)
    if not apply_chat_template:
        return fill_template(input_template, encoder.plain(plain_text(value, input_key)))
    messages = without_answer(to_messages(value))
    if not messages or is_blank(messages[-1]):
        raise RowError(f"'{input_key}' is empty")
    check_order(messages)
    return render(encoder, messages, add_generation_prompt=True, tools=row.get("tools"))


def asked_part(value: Any) -> Any:
    """Return a prompt column's value as `render_prompt` reads it: messages without a closing
    answer.
    """
    return value if isinstance(value, str) else without_answer(to_messages(value))


def is_rendered(
    row: Mapping[str, object], value: object, encoder: TextEncoder, *, apply_chat_template: bool
) -> bool:
    """Return True for a text that is a rendered prompt: the row says so, or it begins and ends as
    the chat template that is to be applied begins and ends one.
    """
    if not isinstance(value, str) or row.get(RENDERED):
        return isinstance(value, str)
    if not apply_chat_template:
        return False
    frame = frame_of(encoder)
    has_marks = bool(frame.middle.strip())
    return has_marks and value.startswith(frame.start) and value.endswith(frame.middle)


@lru_cache(maxsize=4)
def frame_of(encoder: TextEncoder) -> Frame:
    """Return what the tokenizer's chat template writes; nothing where it refuses to."""
    if not encoder.tokenizer.chat_template:
        return Frame("", "", "")
    question: Message = {"role": "user", "content": "QUESTION"}
    answer: Message = {"role": "assistant", "content": "ANSWER"}
    try:
        asked = render(encoder, [question], add_generation_prompt=True)
        rendered = render_answer(encoder, [question, answer])
    except RowError:  # rows say what is refused
        return Frame("", "", "")
    start, _, middle = asked.partition("QUESTION")
    [(_, stop)] = rendered.assistant_spans
    return Frame(start, middle, rendered.text[:stop].rpartition("ANSWER")[2])


def wrap_input(value: Any, template: str) -> Any:
    """Put the template's text around a prompt: around its text or its last user message."""
    if isinstance(value, str):
        return template.replace("{input}", value)
    messages = [dict(message) for message in value]
    for message in reversed(messages):
        if (message.get("role") or message.get("from")) in ("user", "human"):
            key = "content" if message.get("content") is not None else "value"
            if isinstance(message.get(key), str):
                message[key] = template.replace("{input}", message[key])
            break
    return messages


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
    if value is None:
        raise RowError(f"'{column}' is missing, not text")
    if not isinstance(value, str):
        raise RowError(f"'{column}' is {value!r}, not text. Write it as \"{value}\"")
    if not value.strip():
        raise RowError(f"'{column}' is empty")
    return value


def is_blank(message: Message) -> bool:
    """Return True for a message without text, parts of another kind or tool calls."""
    content = message.get("content")
    if isinstance(content, str):
        return not content.strip() and not message.get("tool_calls")
    return not content and not message.get("tool_calls")


def fill_template(input_template: str | None, text: str) -> str:
    """Return the text inside a format string with one {}; a template without {} is not used."""
    if not has_placeholder(input_template):
        return text
    assert input_template is not None
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
    text, _ = _run_template(
        encoder, messages, add_generation_prompt=add_generation_prompt, tools=tools
    )
    return text


def render_dialogue(
    encoder: TextEncoder, messages: Sequence[Message], *, tools: object = None
) -> Rendered:
    """Return the dialogue with the span of every assistant turn, its end marker included.

    Spans come from the template's generation markers, else from rendering prefixes of the dialogue.
    Raises ConfigError naming the template when its prefixes are no prefixes, RowError for a refused
    dialogue.
    """
    check_order(messages)
    if has_generation_markers(encoder):
        text, spans = _run_template(encoder, messages, tools=tools, wants_spans=True)
        return _ended(encoder, text, spans)
    text = render(encoder, messages, tools=tools)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return _ended(encoder, text, [_prefix_span(encoder, messages, i, text, tools) for i in turns])


def render_answer(
    encoder: TextEncoder, messages: Sequence[Message], *, tools: object = None
) -> Rendered:
    """Return the dialogue with the span of its last message only, which must be the assistant's."""
    if messages[-1]["role"] != "assistant":
        raise RowError(f"the last message is the {messages[-1]['role']}'s, not the assistant's")
    if len(messages) < 2:
        raise RowError("the assistant's message answers nothing")
    check_order(messages)
    prompt = render(encoder, messages[:-1], add_generation_prompt=True, tools=tools)
    text = render(encoder, messages, tools=tools)
    if text.startswith(prompt):
        return _ended(encoder, text, [(len(prompt), len(text))])
    spans = render_dialogue(encoder, messages, tools=tools).assistant_spans
    return Rendered(text, spans[-1:])


def without_end(encoder: TextEncoder, rendered: Rendered, answer: Message) -> Rendered | None:
    """Return the dialogue up to the last word of its last message, an answer that met its limit:
    the template would end an answer that did not end.

    None where the template does not keep the answer as it is.
    """
    words, (start, end) = encoder.hide(_words(answer)), rendered.assistant_spans[-1]
    for said in (words, words.strip()):
        place = rendered.text.rfind(said, start, end)
        if said and place >= 0:
            stop = place + len(said)
            return Rendered(rendered.text[:stop], (*rendered.assistant_spans[:-1], (start, stop)))
    return None


def _words(message: Message) -> str:
    """Return the text a message ends with; nothing where it ends with a tool call or an image."""
    content = message.get("content")
    if isinstance(content, list) and content and isinstance(content[-1], Mapping):
        content = content[-1].get("text")
    return content if isinstance(content, str) and not message.get("tool_calls") else ""


def has_generation_markers(encoder: TextEncoder) -> bool:
    """Return True if the chat template marks what the assistant writes with {% generation %}."""
    return _GENERATION_MARKER.search(chat_template_of(encoder.tokenizer)) is not None


def _prefix_span(
    encoder: TextEncoder, messages: Sequence[Message], index: int, text: str, tools: object
) -> Span:
    before = render(encoder, messages[:index], add_generation_prompt=True, tools=tools)
    after = render(encoder, messages[: index + 1], tools=tools)
    if not (text.startswith(after) and after.startswith(before)):
        raise ConfigError(
            f"the chat template of {encoder.tokenizer.name_or_path} rewrites earlier turns, so the "
            "assistant's tokens cannot be told apart. Give one with {% generation %} markers with "
            "--tokenizer_chat_template, or leave --multiturn out."
        )
    return len(before), len(after)


def _ended(encoder: TextEncoder, text: str, spans: Sequence[Span]) -> Rendered:
    """Return the dialogue with spans that end where inference stops: no model samples what a
    template writes behind that. Text behind the last span is left out if it says nothing.
    """
    spans = [(start, encoder.end_of_turn(text, start, end)) for start, end in spans]
    if spans and encoder.says_nothing(text[spans[-1][1] :]):
        text = text[: spans[-1][1]]
    return Rendered(text, tuple(spans))


def _run_template(
    encoder: TextEncoder,
    messages: Sequence[Message],
    *,
    tools: object,
    add_generation_prompt: bool = False,
    wants_spans: bool = False,
) -> tuple[str, list[Span]]:
    try:
        return render_chat(
            encoder.tokenizer,
            [_hide(encoder, message) for message in messages],
            tools=_hide_value(encoder, _tool_list(tools)),
            add_generation_prompt=add_generation_prompt,
            wants_spans=wants_spans,
        )
    except TemplateError as error:
        _refuse_unreadable(error)
        raise RowError(f"the chat template refuses it: {error}") from error


def _refuse_unreadable(error: TemplateError) -> None:
    """Raise ConfigError where no dialogue at all can be rendered: the template does not parse."""
    import jinja2  # noqa: PLC0415 - needed for templates only

    if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
        raise ConfigError(
            f"the chat template does not parse: line {error.__cause__.lineno}: {error}. Repair it, "
            "or give another one with --tokenizer_chat_template."
        ) from error


def _tool_list(tools: object) -> list | None:
    """Return the tools of a row, without the nulls that a table puts where other rows have a key;
    those of JSON text are its own.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise RowError(f"'tools' is no JSON: {error}") from error
    else:
        tools = _without_nulls(tools)
    if tools is not None and not isinstance(tools, Sequence):
        raise RowError(f"'tools' is {type(tools).__name__}, not a list")
    return list(tools) if tools else None


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


def _hide(encoder: TextEncoder, message: Message) -> Message:
    return {
        key: value if key == "role" else _hide_value(encoder, _without_nulls(value))
        for key, value in message.items()
    }


def _hide_value(encoder: TextEncoder, value: Any) -> Any:
    """Return the value with a stand-in for every special token in its texts, those of keys
    included.
    """
    if isinstance(value, str):
        return encoder.hide(value)
    if isinstance(value, Mapping):
        return {_hide_value(encoder, k): _hide_value(encoder, v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hide_value(encoder, item) for item in value]
    return value


def _without_nulls(value: Any) -> Any:
    """Return the value without keys that are null, at any depth."""
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(item) for item in value]
    return value


def text_to_learn(value: object, column: str) -> str:
    """Return text to learn from; a row without any has no target, another type is an error."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise LeftOutError("empty response")
    if isinstance(value, (list, tuple, Mapping)):
        raise RowError(f"'{column}' is a message list. Add --apply_chat_template")
    if not isinstance(value, str):
        raise RowError(f"'{column}' is {value!r}, not text. Write it as \"{value}\"")
    return value


def rendered_segments(
    encoder: TextEncoder, prompt: str, answer: str, *, is_cut: bool
) -> list[Segment]:
    """Return the segments of a prompt that was rendered before; behind a generation prompt of the
    chat template the answer ends as the template ends one.
    """
    frame = frame_of(encoder)
    is_chat = bool(frame.middle.strip()) and frame.middle in prompt
    end = frame.end if is_chat and not is_cut else ""
    has_end = is_cut or (bool(end.strip()) and encoder.says_nothing(end))
    said = encoder.hide(answer) if is_chat else encoder.plain(answer)
    target = Segment(said + end, is_target=True, is_cut=has_end)
    return [Segment(prompt, is_target=False), target]


def cut_segments(encoder: TextEncoder, rendered: Rendered, answer: Message) -> list[Segment]:
    """Return the segments of a dialogue whose last answer met its limit: nothing says that it
    ended.
    """
    begun = without_end(encoder, rendered, answer)
    if begun is None:
        raise LeftOutError("cut answer that the chat template rewrites")
    *others, last = cut_at_spans(begun.text, begun.assistant_spans)
    return [*others, replace(last, is_cut=True)]


def cut_at_spans(text: str, spans: Sequence[Span]) -> list[Segment]:
    """Return the rendered text in order, cut at the spans that are learned; white space behind the
    last one is left out.
    """
    segments: list[Segment] = []
    position = 0
    for start, end in spans:
        segments.append(Segment(text[position:start], is_target=False))
        segments.append(Segment(text[start:end], is_target=True))
        position = end
    tail = text[position:]
    if tail.strip():
        segments.append(Segment(tail, is_target=False))
    return [segment for segment in segments if segment.text]
