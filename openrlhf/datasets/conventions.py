"""Columns as Hugging Face names them, recognised where no flag says which to read.

A flag always wins. What was recognised is one line for the user, and the settings that would have
said the same, so that the config a run leaves behind is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from datasets import Dataset

from openrlhf.config.base import Base, Caution, is_given
from openrlhf.config.common import TextDataConfig
from openrlhf.datasets.chat import RENDERED
from openrlhf.datasets.problems import Gathered, missing_column
from openrlhf.errors import ConfigError
from openrlhf.utils.tokenizer import Tokenizer, chat_template_of

PROMPT_COLUMNS = ("input", "prompt", "messages", "conversations", "text")
IMAGE_COLUMNS = ("image", "images")
TEXT_COLUMNS = ("text", "input", "prompt")  # to be learnt as a whole


def if_given(settings: Base, name: str) -> Any:
    """Return a setting that somebody typed, or None."""
    return getattr(settings, name) if is_given(settings, name) else None


def common_settings(data: TextDataConfig, *, overlong: str) -> dict[str, Any]:
    """Return the fields that a `RowFormat` of any kind takes from a command's `data.*`."""
    return {
        "apply_chat_template": if_given(data, "apply_chat_template"),
        "overlong": overlong,
        "allow_special_tokens": data.allow_special_tokens,
    }


def pick_column(
    wanted: str | None, found: Sequence[str], candidates: Sequence[str], *, flag: str
) -> str:
    """Return the column that a flag names, or else the first candidate that is there; raise
    DataError when there is none.
    """
    for name in candidates if wanted is None else (wanted,):
        if name in found:
            return name
    raise missing_column(wanted or candidates[0], found, flag=flag)


def pick_columns(found: Sequence[str], *wanted: tuple[str | None, Sequence[str], str]) -> list[str]:
    """Return the columns of several (flag's value, candidates, flag); raise DataError that names
    all that are not there.
    """
    gathered = Gathered()
    names = [
        gathered.attempt(partial(pick_column, name, found, usual, flag=flag))
        for name, usual, flag in wanted
    ]
    gathered.raise_if_any()
    return list(map(str, names))


def holds_answers(found: Sequence[str]) -> bool:
    """Return True for columns of `batch_inference`, which keeps those of its data beside them."""
    return {"input", "output"}.issubset(found) and bool({RENDERED, "finish_reason"} & {*found})


def holds_dialogues(rows: Dataset, column: str) -> bool:
    """Return True if the first value of a column that is not empty is a message list."""
    kind = rows.features.arrow_schema.field(column).type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
        return False
    return isinstance(next(filter(None, rows[column]), None), (list, tuple, Mapping))


def uses_chat_template(
    asked: bool | None, rows: Dataset, columns: Iterable[str], tokenizer: Tokenizer
) -> bool:
    """Return True if the chat template renders the rows: as the flag says, or else where a column
    holds dialogues. Raise ConfigError when there is no template.
    """
    if asked is not None:
        if asked:
            chat_template_of(tokenizer)
        return asked
    dialogues = [column for column in columns if holds_dialogues(rows, column)]
    if dialogues and not tokenizer.chat_template:
        raise ConfigError(
            f"column '{dialogues[0]}' holds message lists, but the tokenizer "
            f"{tokenizer.name_or_path} has no chat template. Give one with "
            "--tokenizer_chat_template, or a model that has one."
        )
    return bool(dialogues)


def image_notices(columns: Iterable[str]) -> list[str]:
    """Return a caution where rows have images: only their text is used."""
    return [
        Caution(f"column '{name}' is not read: models that see images cannot be trained yet")
        for name in IMAGE_COLUMNS
        if name in columns
    ]


def news(lines: Iterable[str], said: Sequence[str]) -> list[str]:
    """Return the notices of a second data set that the first does not have; cautions, which count
    rows, are always new.
    """
    return [line for line in lines if isinstance(line, Caution) or line not in said]


def recognised_line(columns: Iterable[str | None], what: str) -> str:
    """Return the notice of which columns are read, and as what."""
    names = " and ".join(f"'{column}'" for column in columns if column is not None)
    return f"{names} read as {what}"


def number_of(value: object) -> float | None:
    """Return a number or truth value, also one spelled out as in a CSV file; else None."""
    words = {"true": 1.0, "false": 0.0}
    try:
        return float(words.get(str(value).strip().lower(), value))  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None
