"""Columns as Hugging Face names them, recognised where no flag says which to read.

A flag always wins. What was recognised is one line for the user, and the settings that would have
said the same, so that the config a run leaves behind is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from datasets import Dataset

from openrlhf.config.base import Caution
from openrlhf.datasets.chat import RENDERED
from openrlhf.errors import DataError
from openrlhf.utils.tokenizer import Tokenizer, chat_template_of

PROMPT_COLUMNS = ("input", "prompt", "messages", "conversations", "text")
IMAGE_COLUMNS = ("image", "images")
TEXT_COLUMNS = ("text", "input", "prompt")  # to be learnt as a whole


def pick_columns(found: Sequence[str], *wanted: tuple[str | None, Sequence[str], str]) -> list[str]:
    """Return for each (flag's value, candidates, flag) the column that the flag names, or else the
    first candidate that is there; raise DataError that names all that are not there.
    """
    names, problems = [], []
    for asked, usual, flag in wanted:
        there = [name for name in (usual if asked is None else (asked,)) if name in found]
        names += there[:1]
        if not there:
            problems.append(
                f"column '{asked or usual[0]}' is not in the data set; columns found: "
                f"{', '.join(found) or 'none'}. Give the right one with {flag}."
            )
    if problems:
        raise DataError(problems)
    return names


def holds_answers(found: Sequence[str]) -> bool:
    """Return True for columns of `batch_inference`, which keeps those of its data beside them."""
    return {"input", "output"}.issubset(found) and bool({RENDERED, "finish_reason"} & {*found})


def holds_dialogues(rows: Dataset, column: str) -> bool:
    """Return True if the first value of a column that is not empty is a message list."""
    return isinstance(next(filter(None, rows[column]), None), (list, tuple, Mapping))


def uses_chat_template(
    asked: bool | None, rows: Dataset, columns: Iterable[str], tokenizer: Tokenizer
) -> bool:
    """Return True if the chat template renders the rows: as the flag says, or else where a column
    holds dialogues. Raise ConfigError when there is no template.
    """
    is_chat = any(holds_dialogues(rows, name) for name in columns) if asked is None else asked
    if is_chat:
        chat_template_of(tokenizer)
    return is_chat


def news(lines: Iterable[str], said: Sequence[str]) -> list[str]:
    """Return the notices of a second data set that the first does not have; cautions, which count
    rows, are always new.
    """
    return [line for line in lines if isinstance(line, Caution) or line not in said]


def number_of(value: object) -> float | None:
    """Return a number or truth value, also one spelled out as in a CSV file; else None."""
    words = {"true": 1.0, "false": 0.0}
    try:
        return float(words.get(str(value).strip().lower(), value))  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None
