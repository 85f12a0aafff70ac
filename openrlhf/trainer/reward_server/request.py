"""The body of a request for rewards: from bytes to texts, or a refusal that names the field.

`{"query": [text, ...], "prompts"?: [...], "labels"?: [...], "is_truncated"?: [...], "ids"?: [...],
"model"?: name}`. Size and shape are bounded on the raw bytes, before anything is parsed. Knows
nothing of HTTP but its status codes, and nothing of models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from openrlhf.config.reward_server import ServerLimitsConfig

MAX_DEPTH = 8  # lists and objects within each other
VALUES_PER_QUERY = 64  # values that a label may be made of
MAX_ID_CHARS = 256
MAX_ID_BITS = 64
MAX_NAME_CHARS = 64  # of a field's name that is given back in a refusal
COLUMNS = ("prompts", "labels", "is_truncated", "ids")  # one value for each text
FIELDS = ("query", *COLUMNS, "model")
NOT_A_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


class RefusedError(Exception):
    """A request that is not answered: the HTTP status, the reason, and the field it lies in."""

    def __init__(self, status: int, error: str, field: str | None) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.field = field


@dataclass(frozen=True)
class RewardRequest:
    """B texts to score; what else is sent is of no use to a reward model."""

    queries: Sequence[str]  # B
    ids: Sequence[object] | None = None  # B, given back as they came
    model: str | None = None  # None: all that are served


def read_request(body: bytes, limits: ServerLimitsConfig) -> RewardRequest:
    """The request in a body; raises RefusedError."""
    fields = _parse(body, limits)
    for name in fields:
        if name not in FIELDS:
            problem = f"unknown field; known are {', '.join(FIELDS)}"
            raise RefusedError(422, problem, _spelled(name))
    if "query" not in fields:
        raise RefusedError(400, "the field is missing", "query")
    queries = _texts(fields["query"], limits)
    for name in COLUMNS:
        _check_column(fields, name, len(queries))
    _check_words(fields, "prompts")
    _check_ids(fields)
    model = fields.get("model")
    if not isinstance(model, str | None):
        raise RefusedError(422, f"must be a name, not {_kind(model)}", "model")
    return RewardRequest(queries, fields.get("ids"), model)


def _parse(body: bytes, limits: ServerLimitsConfig) -> dict[str, Any]:
    _check_shape(body, limits.max_queries * VALUES_PER_QUERY)
    try:
        text = body.decode("utf-8")
        fields = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RefusedError(400, f"not UTF-8 at byte {error.start}", "body") from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"not JSON: {str(error)[:200]}", "body") from error
    if not isinstance(fields, dict):
        raise RefusedError(400, f"must be a JSON object, not {_kind(fields)}", "body")
    return fields


def _check_shape(body: bytes, max_values: int) -> None:
    """Refuse nesting and numbers of values that no honest request has, without parsing them."""
    # Without escaped backslashes and escaped quotes every quote begins or ends a string.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = bare.count(b'"') // 2
    outside = b"" if num_strings > max_values else b"".join(bare.split(b'"')[::2])
    brackets = outside.translate(None, NOT_A_BRACKET)
    depth = 0
    for sign in brackets[: 2 * max_values]:
        depth += 1 if sign in b"[{" else -1
        if depth > MAX_DEPTH:
            raise RefusedError(400, f"nested deeper than {MAX_DEPTH}", "body")
    if num_strings + outside.count(b",") + len(brackets) > 2 * max_values:
        raise RefusedError(413, "more values than a request may have", "body")


def _texts(value: object, limits: ServerLimitsConfig) -> list[str]:
    if not isinstance(value, list):
        raise RefusedError(422, f"must be a list of texts, not {_kind(value)}", "query")
    if len(value) > limits.max_queries:
        raise RefusedError(
            413, f"{len(value)} texts; at most {limits.max_queries} are taken", "query"
        )
    for index, text in enumerate(value):
        field = f"query[{index}]"
        if not isinstance(text, str):
            raise RefusedError(422, f"must be a text, not {_kind(text)}", field)
        if len(text) > limits.max_chars:
            problem = f"{len(text)} characters; at most {limits.max_chars} are taken"
            raise RefusedError(413, problem, field)
        _check_unicode(text, field)
    return value


def _check_unicode(text: str, field: str) -> None:
    """JSON can spell halves of characters, which are no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RefusedError(
            422, f"half a character (a lone surrogate) at position {error.start}", field
        ) from error


def _check_column(fields: Mapping[str, object], name: str, count: int) -> None:
    value = fields.get(name)
    if value is None:
        return
    if not isinstance(value, list):
        raise RefusedError(422, f"must be a list, not {_kind(value)}", name)
    if len(value) != count:
        raise RefusedError(422, f"{len(value)} values for {count} texts in query", name)


def _check_words(fields: Mapping[str, Any], name: str) -> None:
    for index, value in enumerate(fields.get(name) or ()):
        if not isinstance(value, str):
            raise RefusedError(422, f"must be a text, not {_kind(value)}", f"{name}[{index}]")


def _check_ids(fields: Mapping[str, Any]) -> None:
    """Only what is small and what JSON can hold may come back with the rewards."""
    for index, value in enumerate(fields.get("ids") or ()):
        problem = _problem_of_id(value)
        if problem is not None:
            raise RefusedError(422, problem, f"ids[{index}]")
        if isinstance(value, str):
            _check_unicode(value, f"ids[{index}]")


def _problem_of_id(value: object) -> str | None:
    if isinstance(value, str):
        is_long = len(value) > MAX_ID_CHARS
        return f"{len(value)} characters; at most {MAX_ID_CHARS} are taken" if is_long else None
    if isinstance(value, bool | list | dict):
        return f"must be a text, a number or null, not {_kind(value)}"
    if isinstance(value, int) and value.bit_length() > MAX_ID_BITS:
        return f"a whole number of more than {MAX_ID_BITS} bits"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number too large to be sent back"
    return None


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in pairs:
        if name in fields:
            raise RefusedError(400, "the field stands there twice", _spelled(name))
        fields[name] = value
    return fields


def _spelled(name: str) -> str:
    """The name of a field as a refusal can say it: short, halves of characters escaped."""
    start = name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}…"
    return start.encode("utf-8", "backslashreplace").decode("utf-8")


def _refuse_constant(word: str) -> NoReturn:
    raise RefusedError(400, f"not JSON: {word} is no number", "body")


def _kind(value: object) -> str:
    """What JSON calls a value's type."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    return "null" if value is None else names.get(type(value), "a number")
