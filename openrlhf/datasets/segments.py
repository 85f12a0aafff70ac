"""Pieces of a rendered row: what is tokenised by itself, and which of it is learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from openrlhf.datasets.chat import Message, Rendered, RowError, Span, frame_of, without_end
from openrlhf.utils.tokenizer import TextEncoder


@dataclass(frozen=True)
class Segment:
    """A piece of rendered text that is tokenised by itself."""

    text: str
    is_target: bool
    is_cut: bool = False  # no EOS stands behind it: it did not come to its end, or holds its own


class LeftOutError(ValueError):
    """The row is well formed but cannot be learned from; the message is what it is counted as."""


def text_to_learn(value: object, column: str) -> str:
    """Text to learn from; a row without any has no target, another type is an error."""
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
    """The segments of a dialogue whose last answer met its limit: nothing says that it ended."""
    begun = without_end(encoder, rendered, answer)
    if begun is None:
        raise LeftOutError("cut answer that the chat template rewrites")
    *others, last = cut_at_spans(begun.text, begun.assistant_spans)
    return [*others, replace(last, is_cut=True)]


def cut_at_spans(text: str, spans: Sequence[Span]) -> list[Segment]:
    """The rendered text in order, cut at the spans that are learned; white space behind the last
    one is left out.
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
