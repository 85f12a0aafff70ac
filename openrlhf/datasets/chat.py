"""From a row's value (text, message list or `conversations`) to the text that a model reads and the
spans of it that are learnt.

Rendered text holds stand-ins for special tokens spelled in messages (see `TextEncoder`), so nothing
they say can open or close a turn. Whether a template writes all that messages hold is found in
`openrlhf.datasets.template_fields`. Knows nothing of token ids.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from openrlhf.datasets.pictures import is_picture
from openrlhf.datasets.strict_json import strict_json
from openrlhf.datasets.template_fields import (
    PICTURE,
    REASONING,
    TURN_WEIGHTS,
    Message,
    fitted,
    planted,
    tags_of,
    writing_of,
)
from openrlhf.errors import ConfigError
from openrlhf.utils.tokenizer import (
    OF_ROWS,
    TemplateError,
    TextEncoder,
    chat_template_of,
    render_chat,
)

Span = tuple[int, int]

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_NAMES = {
    **{role: role for role in ROLES},
    "human": "user",
    "prompter": "user",
    **dict.fromkeys(("gpt", "bot", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "ipython", "tool_response"), "tool"),
}
_CALLS = ("function_call", "tool_call")  # roles whose text is the JSON of calls
_CALL_KEYS = {"id", "type", "index", "function", "name", "arguments"}
_SPELLED_LIST = re.compile(
    r"""\s*\[\s*\{(?=.*['"](?:role|from)['"]\s*:)"""
    r"""(?=.*['"](?:content|value|tool_calls|function_call)['"]\s*:)"""
    r"""\s*['"]\w+['"]\s*:.*\}\s*\]\s*""",
    re.DOTALL,
)
_TEXT_PARTS = (None, "text", "input_text", "output_text")
RENDERED = "is_rendered"  # column of `infer`: the prompt is text as the model read it
_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RowError(ValueError):
    """One row cannot be used as it is; the message says why, the caller knows which row."""


class LeftOutError(ValueError):
    """The row is well formed but cannot be learned from; the message is what it is counted as."""


@dataclass(frozen=True)
class Rendered:
    """A text as the model reads it, and the character spans (start, end) of it that are learnt.

    Example: `Rendered("2+2=4</s>", ((4, 9),))`: "4</s>" is learnt.
    """

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


def to_messages(
    value: object,
    *,
    text_role: str = "user",
    unread: set[str] | None = None,
    reads_pictures: bool = False,
) -> list[Message]:
    """Return messages with the roles of ROLES, from text (one message) or a list with role/content
    or from/value: parts of text joined, with PICTURE for a picture where they are read, arguments
    of calls as objects. `unread` gets the names of what is left out.
    """
    if isinstance(value, str):
        return [{"role": text_role, "content": _without_mark(value)}]
    unread = set() if unread is None else unread
    if isinstance(value, Mapping):
        key = next((key for key in ("messages", "conversations") if value.get(key)), None)
        if key is not None:
            unread |= {f"'{other}' beside '{key}'" for other in _keys_of(value) - {key}}
        value = [value] if key is None else value[key]
    if not isinstance(value, (list, tuple)):
        raise RowError(f"{type(value).__name__} instead of text or a message list")
    if not value:
        raise RowError("an empty message list")
    return [_to_message(item, unread, reads_pictures=reads_pictures) for item in value]


def spelled_messages(value: object) -> object:
    """Return the message list that a text spells as JSON, as in a cell of a CSV file; anything else
    as it is. Raise RowError for a message list in another notation.
    """
    if not isinstance(value, str) or not _SPELLED_LIST.fullmatch(value):
        return value
    try:
        found = strict_json(value)
    except (ValueError, RecursionError) as error:
        raise RowError(
            f"a message list that cannot be read as JSON: {error}. Write it with json.dumps"
        ) from error
    is_list = all(
        isinstance(item, dict) and (item.get("role") or item.get("from")) for item in found
    )
    return found if is_list else value


def history_messages(value: object, *, reads_pictures: bool) -> list[Message]:
    """Return the messages of a column `history`: pairs of question and answer, or messages; with
    PICTURE for a picture where they are read.
    """
    found = _from_json(value, "'history'") if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)):
        raise RowError(f"'history' is {value!r}, not a list")
    if any(isinstance(turn, Mapping) for turn in found):
        return to_messages(found, reads_pictures=reads_pictures)
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in found):
        raise RowError("'history' is no list of pairs, each of a question and its answer")
    roles = ("user", "assistant")
    turns = [{"role": r, "content": t} for pair in found for r, t in zip(roles, pair, strict=True)]
    return [_to_message(turn, set(), reads_pictures=reads_pictures) for turn in turns]


@lru_cache(maxsize=4)
def frame_of(encoder: TextEncoder) -> tuple[str, str, str]:
    """Return the text that the chat template writes before a user's words, between them and the
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


TWO_ANSWERS: Sequence[Message] = [
    {"role": "user", "content": "QUESTION"},
    {"role": "assistant", "content": "ANSWER"},
] * 2


def ends_each_turn(encoder: TextEncoder) -> bool:
    """Return False if an earlier turn of the assistant has no token at which inference stops."""
    try:
        rendered = render_dialogue(encoder, TWO_ANSWERS)
    except (RowError, ConfigError):  # rows say what is refused
        return True
    if len(rendered.spans) < 2:
        return True
    start, end = rendered.spans[0]
    [ids] = encoder.encode_segments([rendered.text[start:end]])
    return ids[-1] in encoder.end_ids


def rewrites_turns(encoder: TextEncoder) -> bool:
    """Return True if the chat template writes an earlier turn of the assistant in another way than
    a last one, and marks no turns: its tokens cannot be told apart.
    """
    try:
        render_dialogue(encoder, TWO_ANSWERS)
    except ConfigError:
        return True
    except RowError:  # rows say what is refused
        pass
    return False


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
        is_number = isinstance(value, (int, float)) and math.isfinite(value)
        remedy = f'. Write it as "{value}"' if is_number else ""
        raise RowError(f"'{column}' is {value!r}, not text{remedy}")
    if not value or not value.strip():
        raise RowError(f"'{column}' is {'missing, not text' if value is None else 'empty'}")
    return value


def is_blank(message: Message) -> bool:
    """Return True for a message without text, reasoning, a tool's values or tool calls."""
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else content
    return not said and not any(message.get(key) for key in ("tool_calls", *REASONING))


def is_to_learn(message: Message) -> bool:
    """Return False for a turn that says so: `weight`, `train` or `loss_mask` 0; raise RowError for
    another share than all or nothing.
    """
    weights = {key: message[key] for key in TURN_WEIGHTS if key in message}
    for key, weight in weights.items():
        if weight not in (0, 1):
            raise RowError(f"'{key}' of a message is {weight!r}, not 0 or 1")
    return all(weights.values())


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


class Dialogue:
    """Messages as the chat template reads them, with the tools and variables of their row."""

    def __init__(
        self,
        encoder: TextEncoder,
        messages: Sequence[Message],
        *,
        tools: object = None,
        variables: object = None,
        learnt: Sequence[int] = (),
        is_prompt: bool = False,
    ) -> None:
        """Raise RowError where the template would leave a turn's words or calls out, or write them
        otherwise than they are meant; `learnt` are the messages whose reasoning counts, too.
        """
        self._encoder = encoder
        self._options: dict[str, Any] = {
            "tools": _tool_list(encoder, tools),
            "variables": _variables(variables),
        }
        has_tools = self._options["tools"] or any("tool_calls" in message for message in messages)
        self.template = chat_template_of(encoder.tokenizer, for_tools=bool(has_tools))
        tags = tags_of(self.template)
        shape = planted(messages, learnt, tags=tags, is_prompt=is_prompt, **self._options)
        writing = writing_of(encoder.tokenizer, self.template, shape)
        if writing.problem:
            raise RowError(writing.problem)
        encoder.unread |= writing.unread
        self._messages = [_shown(encoder, fitted(each, writing)) for each in messages]

    def write(self, num_messages: int | None = None, **options: bool) -> tuple[str, list[Span]]:
        """Return the first messages, or all, as the template writes them, and its spans."""
        try:
            return render_chat(
                self._encoder.tokenizer,
                self._messages[:num_messages],
                template=self.template,
                **self._options,
                **options,
            )
        except TemplateError as error:
            raise RowError(f"the chat template refuses it: {error}") from error

    def marked_spans(self, turns: Sequence[int], learnt: Sequence[int]) -> tuple[str, list[Span]]:
        """Return the text, and what the template marks of the turns that are learnt."""
        text, found = self.write(wants_spans=True)
        if len(found) > len(turns):  # several a turn, or one behind the last
            begins = [len(self.write(turn, wants_spans=True)[1]) for turn in turns]
            ranges = zip(turns, begins, [*begins[1:], len(found)], strict=True)
            spans = {turn: found[start:end] for turn, start, end in ranges}
        else:  # one a turn, or for the last turns only
            numbered = enumerate(turns, len(found) - len(turns))
            spans = {turn: found[k : k + 1] for k, turn in numbered if k >= 0}
        marked = []
        for turn in learnt:
            own = spans.get(turn, [])
            is_own = own and self._is_said(turn, "".join(text[a:b] for a, b in own))
            marked += own if is_own else [self.span_of(turn, text)]
        return text, marked

    def _is_said(self, index: int, text: str) -> bool:
        """Return True if a text has what a turn says last: a template may mark some turns only."""
        message = self._messages[index]
        content, calls = message["content"], message.get("tool_calls")
        parts = content if isinstance(content, list) else [{"text": content}]
        words = tags_of(self.template).split(str(parts[-1].get("text", "")))[-1].strip()
        if not words and calls:
            words = calls[-1]["function"]["name"]  # type: ignore[index]
        return words in text

    def span_of(self, index: int, text: str) -> Span:
        """Return the span of a turn in the text of all, as rendering what is before it shows;
        raise ConfigError where that is no beginning of the text.
        """
        before, _ = self.write(index, add_generation_prompt=True)
        is_last = index + 1 == len(self._messages)
        after = text if is_last else self.write(index + 1)[0]
        if text.startswith(after) and after.startswith(before):
            return len(before), len(after)
        told = f"the chat template of {self._encoder.tokenizer.name_or_path} "
        remedy = "Give one with {% generation %} markers with --tokenizer_chat_template"
        if is_last:
            told += "writes a prompt otherwise than the beginning of a whole dialogue"
        else:
            told += "rewrites earlier turns"
            remedy += ", or leave out --multiturn and all answers of a response but one"
        raise ConfigError(f"{told}, so the assistant's tokens cannot be told apart. {remedy}.")


def render(
    encoder: TextEncoder,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    tools: object = None,
    variables: object = None,
) -> str:
    """Return the dialogue as the chat template writes it; raise RowError when the template refuses
    it or leaves something of it out.
    """
    told: dict[str, Any] = {"tools": tools, "variables": variables}
    dialogue = Dialogue(encoder, messages, is_prompt=add_generation_prompt, **told)
    return dialogue.write(add_generation_prompt=add_generation_prompt)[0]


def render_dialogue(
    encoder: TextEncoder,
    messages: Sequence[Message],
    *,
    first: int = 0,
    is_cut: bool = False,
    **told: object,
) -> Rendered:
    """Return the dialogue with the spans of the assistant's turns among its messages from `first`
    on, their end markers included; `is_cut`: the last of them met its length limit, `told`: tools
    and variables. Turns that are empty, or that say so, are not learnt.

    Spans come from the template's generation markers, else from rendering prefixes of the dialogue,
    and end where inference stops: no model samples what a template writes behind that. Raises
    ConfigError for a template without markers whose prefixes are no prefixes, RowError for a
    refused dialogue, LeftOutError where no turn is to be learnt.
    """
    check_order(messages)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not [i for i in turns if i >= first]:
        raise RowError(f"the last message is the {messages[-1]['role']}'s, not the assistant's")
    learnt = [i for i in turns if i >= first and is_to_learn(messages[i])]
    spoken = [i for i in learnt if not is_blank(messages[i])]
    if not spoken:
        raise LeftOutError("empty response" if learnt else "no turn is to be learnt")
    asked = {k for m in messages if m["role"] != "assistant" for k in TURN_WEIGHTS if m.get(k)}
    encoder.unread |= {f"'{key}' of turns that are not the assistant's" for key in asked}
    if len(spoken) < len(learnt):
        encoder.unread.add("empty turns of the assistant")
    dialogue = Dialogue(encoder, messages, learnt=spoken, **told)  # type: ignore[arg-type]
    if _GENERATION_MARKER.search(dialogue.template):
        text, spans = dialogue.marked_spans(turns, spoken)
    else:
        text, _ = dialogue.write()
        spans = [dialogue.span_of(i, text) for i in spoken]
    spans = _until_ends(encoder, text, spans)
    if spans and encoder.says_nothing(text[spans[-1][1] :]):
        text = text[: spans[-1][1]]
    if is_cut and spans:  # the template would end an answer that did not end
        *others, (start, end) = spans
        cut = text[:end].removesuffix(frame_of(encoder)[2])
        return Rendered(cut, (*others, (start, len(cut))), is_cut=True)
    return Rendered(text, tuple(spans))


def _until_ends(encoder: TextEncoder, text: str, spans: Sequence[Span]) -> list[Span]:
    """Return spans up to where inference stops, without one behind a stop that says nothing."""
    kept: list[Span] = []
    for start, end in spans:
        before, stop = kept[-1] if kept else (0, 0)
        is_over = bool(kept) and encoder.end_of_turn(text, before, end) == stop
        if not is_over or not encoder.says_nothing(text[stop:end]):
            kept.append((start, encoder.end_of_turn(text, start, end)))
    return kept


def _tool_list(encoder: TextEncoder, tools: object) -> list | None:
    """Return the tools of a row as a template may read them."""
    if isinstance(tools, str) and tools.strip():
        tools = _from_json(tools, "'tools'")
    if tools and not isinstance(tools, list):
        raise RowError(f"'tools' is {type(tools).__name__}, not a list")
    return _shown(encoder, tools) or None


def _variables(value: object) -> Mapping[str, Any]:
    """Return the variables that `chat_template_kwargs` of a row sets."""
    if isinstance(value, str):
        value = _from_json(value, "'chat_template_kwargs'")
    if value is not None and not isinstance(value, Mapping):
        raise RowError(f"'chat_template_kwargs' is {value!r}, not an object")
    if taken := OF_ROWS & (value or {}).keys():
        raise RowError(f"'chat_template_kwargs' sets {min(taken)}, which the row itself does")
    return value or {}


def _from_json(text: str, name: str) -> Any:
    try:
        return strict_json(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{name} cannot be read as JSON: {error}") from error


def _to_message(item: object, unread: set[str], *, reads_pictures: bool) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"a message is {type(item).__name__}, not an object with role and content")
    name = item.get("role") or item.get("from")  # a table gives every row both, one of them null
    role = _ROLE_NAMES.get(str(name).lower())
    if role is None and name is None:
        keys = ", ".join(repr(key) for key, value in item.items() if value is not None)
        remedy = "; parts stand in the content of a message" if "type" in item else ""
        raise RowError(f"a message has no role, only {keys or 'nothing'}{remedy}")
    if role is None:
        raise RowError(f"unknown role {name!r}; roles are {', '.join(ROLES)}")
    given = [key for key in ("content", "value") if item.get(key) is not None]
    called = [key for key in ("tool_calls", "function_call") if item.get(key)]
    unread |= {f"'{key}' of messages" for key in (*given[1:], *called[1:])}
    content = item[given[0]] if given else None
    calls = item[called[0]] if called else None
    others = {
        key: value
        for key, value in item.items()
        if key not in ("role", "from", "content", "value", "tool_calls", "function_call")
        and value is not None
    }
    thoughts: list[object] = [None, ""]
    for key in REASONING:  # data sets leave it empty, or give it under two names
        if others.get(key) in thoughts:
            others.pop(key, None)
        else:
            thoughts.append(others[key])
    if str(name).lower() in _CALLS:
        calls, content = content, None
    if calls:
        others["tool_calls"] = _tool_calls(calls, unread)
    if content is None and (role not in ("assistant", "tool") or not others):
        found = f", but with {', '.join(others)}" if others else ""
        raise RowError(f"a message of role {role} without content{found}")
    content = _content(content, role, unread, reads_pictures=reads_pictures)
    return {"role": role, "content": content, **others}


def _content(content: object, role: str, unread: set[str], *, reads_pictures: bool) -> object:
    """Return the text of a message, or the values that a tool returned."""
    if content is None or isinstance(content, str):
        return _without_mark(content or "")
    parts = content if isinstance(content, (list, tuple)) else []
    texts = [PICTURE if reads_pictures and is_picture(part) else _text_of(part) for part in parts]
    if parts and None not in texts:
        words = [part for part in parts if isinstance(part, Mapping) and not is_picture(part)]
        keys = {key for part in words for key in _keys_of(part)}
        unread |= {f"'{key}' of content parts" for key in keys - {"type", "text"}}
        return "".join(map(str, texts))
    # What a part is of stands under the name of its type; a tool's own values have no such form.
    has_parts = any(isinstance(p, Mapping) and str(p.get("type")) in p for p in parts)
    if role == "tool" and isinstance(content, (list, tuple, Mapping)) and not has_parts:
        return content
    bad: Any = parts[texts.index(None)] if parts else content
    kind = bad.get("type") if isinstance(bad, Mapping) else type(bad).__name__
    raise RowError(
        f"content of type {kind!r} in the {role}'s message; only text is read, and images where "
        "the model sees them"
    )


def _text_of(part: object) -> str | None:
    """Return the text of a content part; None for a part of another kind."""
    if isinstance(part, Mapping):
        part = part.get("text") if part.get("type") in _TEXT_PARTS else None
    return _without_mark(part) if isinstance(part, str) else None


def _without_mark(text: str) -> str:
    """Return the text of a message with what Unicode puts in place of noncharacters, such as the
    mark of a picture.
    """
    return text.replace(PICTURE, "\ufffd")


def _tool_calls(value: object, unread: set[str]) -> list[Message]:
    """Return calls as OpenAI's API writes them, but with arguments as objects, which is how most
    templates read them. `unread` gets the names of what is left out.
    """
    if isinstance(value, str):
        value = _from_json(value, "a tool call")
    calls = []
    for call in value if isinstance(value, (list, tuple)) else [value]:
        call = call if isinstance(call, Mapping) else {}
        function: Any = call.get("function") or call
        if not isinstance(function, Mapping):
            raise RowError("a tool call is no object with a name and arguments")
        keys = _keys_of(call) | _keys_of(function)
        held = next((key for key in ("arguments", "parameters") if function.get(key)), "")
        unread |= {f"'{key}' of tool calls" for key in keys - _CALL_KEYS - {held}}
        name, arguments = function.get("name"), function.get(held) or {}
        if isinstance(arguments, str):
            arguments = _from_json(arguments, "the arguments of a tool call")
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise RowError("a tool call is no object with a name and arguments")
        links = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
        made = {"name": name, "arguments": arguments}
        calls.append({"type": "function", **links, "function": made})
    return calls


def _keys_of(value: Mapping[str, Any]) -> set[str]:
    """Return the keys that have values: a table sets those of other rows to null."""
    return {key for key, each in value.items() if each is not None}


def _shown(encoder: TextEncoder, value: Any) -> Any:
    """Return a value with a stand-in for every special token in its texts, those of keys
    included.
    """
    if isinstance(value, str):
        return encoder.hide(value)
    shown = partial(_shown, encoder)
    if isinstance(value, Mapping):
        return {shown(k): shown(v) for k, v in value.items()}
    return [*map(shown, value)] if isinstance(value, (list, tuple)) else value
