"""What a chat template writes of a dialogue, found by rendering it with sentinels in its fields.

A template may leave fields out (tool calls, a tool's name), or write them as Python's text of an
object. Dialogues of one shape, the same fields in the same turns, are rendered alike, so each shape
is looked at once. Fields that a template reads in another form are given to it in that form.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from operator import itemgetter
from typing import Any

from openrlhf.utils.tokenizer import TemplateError, Tokenizer, names, render_chat

Message = dict[str, object]

REASONING = ("reasoning_content", "reasoning", "thinking")  # one thing; templates read either
PICTURE = "\ufdd1"  # stands for a picture in the text of a message; no text of a row keeps it
TURN_WEIGHTS = ("weight", "train", "loss_mask")  # 0: the turn is not learnt


@dataclass(frozen=True)
class Writing:
    """The form in which a template takes messages of a shape, and what it does not write.

    Example: `Writing(has_parts=True, unread=frozenset({"tools"}))`
    """

    has_parts: bool = False  # content is a list with a part of text
    has_text_arguments: bool = False  # arguments of calls are JSON text
    has_text_results: bool = False  # values that a tool returned are JSON text
    problem: str = ""  # why the messages cannot be rendered
    unread: frozenset[str] = frozenset()  # names of fields that are left out


@dataclass(frozen=True)
class Field:
    """A field of a message with a sentinel in it.

    Example: `Field("Zq3q", "message 2, the assistant's: its text", "")`
    """

    sentinel: str  # "" for a field that holds no text
    name: str  # as an error says it
    key: str  # as a notice says it; "" where leaving it out is an error


def fitted(message: Message, writing: Writing) -> Message:
    """Return a message as the template reads it."""
    found = {key: value for key, value in message.items() if key not in TURN_WEIGHTS}
    content = message["content"]
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False) if writing.has_text_results else content
    elif writing.has_parts or PICTURE in content:
        content = in_parts(content)
    if thought := next((message[key] for key in REASONING if key in message), None):
        found |= dict.fromkeys(REASONING, thought)
    if writing.has_text_arguments and "tool_calls" in message:
        found["tool_calls"] = [_with_text_arguments(call) for call in _calls_of(message)]
    return {**found, "content": content}


def as_parts(message: Message) -> Message:
    """Return a message with pictures in its text as one with content parts; any other as it is."""
    content = message["content"]
    has_pictures = isinstance(content, str) and PICTURE in content
    return {**message, "content": in_parts(str(content))} if has_pictures else message


def in_parts(text: str) -> list[Message]:
    """Return the content parts of a text with pictures in it."""
    first, *others = text.split(PICTURE)
    parts: list[Message] = [{"type": "text", "text": first}] if first or not others else []
    for each in others:
        parts.append({"type": "image"})
        parts += [{"type": "text", "text": each}] if each else []
    return parts


def _calls_of(message: Message) -> list[dict[str, Any]]:
    calls: Any = message.get("tool_calls") or []
    return calls


def _with_text_arguments(call: Mapping[str, Any]) -> Message:
    written = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": written}}


@lru_cache(maxsize=32)
def tags_of(template: str) -> re.Pattern[str]:
    """Return the tags at which a template may split a text: those of thoughts, and its own."""
    names = {"think", *re.findall(r"</?(\w+)>", template)}
    return re.compile(rf"(</?(?:{'|'.join(sorted(names))})>)")


def planted(
    messages: Sequence[Message],
    learnt: Sequence[int],
    *,
    tags: re.Pattern[str],
    tools: list | None,
    variables: Mapping[str, Any],
    is_prompt: bool,
) -> str:
    """Return the shape of a dialogue as JSON: its messages with sentinels instead of what they
    hold, and what the sentinels stand for. `tags` are those that the template may split texts at.
    """
    garden = _Garden(tags)
    shape = [garden.plant(m, i, is_learnt=i in learnt) for i, m in enumerate(messages)]
    if tools:
        tools = [garden.tool(tools)]
    fields = [(each.sentinel, each.name, each.key) for each in garden.fields]
    return json.dumps([shape, fields, tools, variables, is_prompt], default=str)


class _Garden:
    """Puts sentinels into messages, and keeps what each stands for."""

    def __init__(self, tags: re.Pattern[str]) -> None:
        self.fields: list[Field] = []
        self._tags = tags
        self._links: dict[object, str] = {}  # ids of calls, which templates may compare

    def sentinel(self, name: str, *, key: str = "") -> str:
        """Return a new sentinel; with a key for a field that may be left out."""
        self.fields.append(Field(f"Zq{len(self.fields)}q", name, key))
        return self.fields[-1].sentinel

    def plant(self, message: Message, index: int, *, is_learnt: bool) -> Message:
        """Return a message with sentinels; of one that is not learnt, reasoning may be left out,
        as templates do with earlier turns.
        """
        where, shape = f"message {index + 1}, the {message['role']}'s", dict(message)
        for key, value in message.items():
            if key == "content":
                shape[key] = self._content(value, where, is_learnt=is_learnt)
            elif key == "tool_calls":
                shape[key] = [self._call(call, where) for call in _calls_of(message)]
            elif key in REASONING and message["role"] == "assistant":
                told = "" if is_learnt else f"'{key}' of earlier turns"
                shape[key] = self.sentinel(f"{where}: its {key}", key=told)
            elif key == "tool_call_id":
                shape[key] = self._link(value)
            elif key not in ("role", *TURN_WEIGHTS):
                shape[key] = self._other(value, f"'{key}' of messages")
        return shape

    def _content(self, content: object, where: str, *, is_learnt: bool) -> object:
        if not isinstance(content, str):
            name = f"{where}: its values"
            return {self.sentinel(name): self.sentinel(name)}
        texts = content.split(PICTURE)
        return PICTURE.join(self._text(each, where, is_learnt=is_learnt) for each in texts)

    def _text(self, text: str, where: str, *, is_learnt: bool) -> str:
        pieces = self._tags.split(text)
        told = "" if is_learnt else "thoughts of earlier turns"
        for k in range(0, len(pieces), 2):
            is_thought = k + 1 < len(pieces)
            name = f"{where}: its {'thoughts' if is_thought else 'text'}"
            if words := pieces[k].strip():  # what stands around them may be split at
                mark = self.sentinel(name, key=told if is_thought else "")
                pieces[k] = pieces[k].replace(words, mark)
        return "".join(pieces)

    def _call(self, call: Mapping[str, Any], where: str) -> Message:
        name = f"{where}: its tool calls"
        held = call["function"]["arguments"]
        arguments: Message = {self.sentinel(name): self.sentinel(name)} if held else {}
        lists = [value for value in held.values() if isinstance(value, list)]
        if any(isinstance(value, dict) for value in held.values()):
            arguments[self.sentinel(name)] = {self.sentinel(name): self.sentinel(name)}
        if any(isinstance(item, dict) for items in lists for item in items):
            arguments[self.sentinel(name)] = [{self.sentinel(name): self.sentinel(name)}]
        links = {"id": self._link(call["id"])} if "id" in call else {}
        function = {"name": self.sentinel(name), "arguments": arguments}
        return {**call, **links, "function": function}

    def tool(self, tools: Sequence[Any]) -> Message:
        """Return a tool with what any of these has."""
        given = [tool for tool in tools if isinstance(tool, Mapping)]
        functions = [tool.get("function") or tool for tool in given]
        function: Message = {"name": self.sentinel("tools", key="tools"), "description": "d"}
        properties: Message = {}
        if any(each.get("description") for each in functions):
            function["description"] = self.sentinel("tools", key="'description' of tools")
        if any((each.get("parameters") or {}).get("properties") for each in functions):
            name = self.sentinel("tools", key="'parameters' of tools")
            properties = {name: {"type": "string", "description": "d"}}
        function["parameters"] = {"type": "object", "properties": properties}
        is_wrapped = any("function" in tool for tool in given)
        return {"type": "function", "function": function} if is_wrapped else function

    def _link(self, value: object) -> str:
        return self._links.setdefault(str(value), f"{len(self._links):09d}")

    def _other(self, value: object, key: str) -> object:
        """Return another field's value: with a sentinel where it is text."""
        if isinstance(value, str):
            return self.sentinel(key, key=key) if value.strip() else value
        self.fields.append(Field("", key, key))
        return 1 if type(value) in (int, float) else value


@lru_cache(maxsize=8192)
def writing_of(tokenizer: Tokenizer, template: str, shape: str) -> Writing:
    """Return the fields of the dialogues of a shape (of `planted`) that a chat template prints: in
    the first form in which all that they say is there, as it is meant.
    """
    messages, found, tools, variables, is_prompt = json.loads(shape)
    fields = [Field(*field) for field in found]
    problems = []
    for writing in _forms(messages):
        try:
            text, _ = render_chat(
                tokenizer,
                [fitted(message, writing) for message in messages],
                template=template,
                tools=tools,
                variables=variables,
                add_generation_prompt=is_prompt,
            )
        except TemplateError as error:
            problems.append((-1, f"the chat template refuses it: {error}"))
            continue
        lost = next(_lost(text, fields), None)
        if lost is None:
            unread = {f.key for f in fields if f.key and not _is_read(f, text, template)}
            if "tools" in unread:
                unread = {name for name in unread if not name.endswith(" of tools")}
            unread |= {
                f"'{n}' of chat_template_kwargs" for n in variables if not names(template, n)
            }
            flags = (writing.has_parts, writing.has_text_arguments, writing.has_text_results)
            return Writing(*flags, unread=frozenset(unread))
        problems.append(lost)
    _, told = max(problems, key=itemgetter(0))  # of the form that came furthest
    return Writing(problem=told)


def _forms(messages: Sequence[Message]) -> Iterator[Writing]:
    """Yield the forms that messages may have, the most common first."""
    kinds = [type(message["content"]) for message in messages]
    has_calls = any(message.get("tool_calls") for message in messages)
    has_values = any(kind is not str for kind in kinds)
    yield from (
        Writing(has_parts, text_arguments, text_results)
        for has_parts, text_arguments, text_results in product(
            (False, True), (False, True)[: 1 + has_calls], (False, True)[: 1 + has_values]
        )
    )


def _lost(text: str, fields: Sequence[Field]) -> Iterator[tuple[int, str]]:
    """Yield the number of each field that a text must hold as it is meant, and what is wrong."""
    for number, field in enumerate(fields):
        if field.key:
            continue
        if field.sentinel not in text:
            yield number, f"{field.name} would be left out by the chat template"
        elif re.search(rf"'{field.sentinel}':|: '{field.sentinel}'|\\\"{field.sentinel}", text):
            told = "would be written by the chat template as the text of an object"
            yield number, f"{field.name} {told}"


def _is_read(field: Field, text: str, template: str) -> bool:
    """Return True if a field that may be left out is written, or has no text and is named in the
    template.
    """
    if field.sentinel:
        return field.sentinel in text
    return names(template, field.key.partition("'")[2].partition("'")[0])
