"""Prompts for RL: every row rendered, tokenised and measured once, before any engine starts.

A literal example: {"input": "2+2=", "answer": "4"} with label_key "answer" becomes
PromptRecord(row_id=0, prompt_text="2+2=", prompt_token_ids=(20, 13, 20, 31), label="4", ...).
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, ClassVar

from datasets import Dataset

from openrlhf.datasets.chat import (
    Rendered,
    RowError,
    fill_template,
    plain_text,
    to_messages,
    without_answer,
    wrap_input,
)
from openrlhf.datasets.loading import data_set_of
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.datasets.template_fields import as_parts
from openrlhf.datasets.tokenized import (
    DIALOGUE_COLUMNS,
    IMAGE_COLUMNS,
    PROMPT_COLUMNS,
    Row,
    RowFormat,
    Tokenised,
    TokenizedDataset,
    Tokens,
    columns_of,
    pick_columns,
    prompt_columns,
)
from openrlhf.errors import DataError
from openrlhf.utils.rollout import PromptRecord


class PromptDataset(TokenizedDataset):
    """Prompts that fit the length limit, in file order; raises DataError for rows that cannot be
    used.
    """

    subject: ClassVar[str] = "prompt data set"
    flags = "--prompt_max_len"

    def __getitem__(self, index: int) -> PromptRecord:
        [(token_ids, _)], extra = self._example(index)
        stored = self._rows[self.row_ids[index]]
        row, label_key = self.read(stored), self._format.label_key
        beside = {self._input_key, *self._image_keys}
        of_dialogues = {*DIALOGUE_COLUMNS} & stored.keys()
        columns = stored | {n: row[n] for n in of_dialogues if not isinstance(stored[n], str)}
        return PromptRecord(
            row_id=self.row_ids[index],
            prompt_text=extra["text"],
            prompt_token_ids=tuple(token_ids.tolist()),
            label=row[label_key] if label_key else "",
            datasource=self._source_of(row, self.row_ids[index]),
            columns={name: value for name, value in columns.items() if name not in beside},
            source=self._asked_part(row),
            images=self.images(index),
            num_image_tokens=self._per_row["num_image_tokens"][self.row_ids[index]],
        )

    @property
    def says_cut(self) -> bool:
        """Return True if `asked` returns text as it was cut."""
        return self._format.around is None

    @property
    def num_spelled_as_text(self) -> int:
        """Return the number of rows with control tokens that were read as text."""
        form = self._format
        is_read = form.allow_special_tokens and not form.apply_chat_template
        return 0 if is_read else sum(self._per_row["is_spelled"])

    def _source_of(self, row: Row, row_id: int) -> str:
        """Return by which name a row is evaluated: its own, or its data set's among several."""
        return str(row.get("datasource") or data_set_of(self._rows, row_id) or "default")

    def asked(self, index: int) -> Any:
        """Return the prompt of `index` without what stands around it: messages, or text as the
        model reads it.
        """
        row = self.read(self._rows[self.row_ids[index]])
        if self._is_dialogue(row):
            return self._asked_part(row)
        if self._format.around is None:
            return self._example(index)[1]["text"]
        return self._encoder.reveal(self._prompt_text(row, self._input_key))

    @classmethod
    def find_columns(cls, form: RowFormat, rows: Dataset) -> list[str]:
        """Return the columns of the prompt and, where it has one, of the label."""
        label = [(form.label_key, (), "--label_key")] if form.label_key else []
        found = columns_of(rows, form)
        wanted = (form.input_key, prompt_columns(found), "--input_key")
        return pick_columns(found, wanted, *label)

    def _unread_columns(self, read: set[str]) -> list[str]:
        """Return columns with a meaning for prompts that this one does not have: all columns are
        there for reward functions.
        """
        meant = {*PROMPT_COLUMNS, *DIALOGUE_COLUMNS, *IMAGE_COLUMNS}
        known = meant & {*super()._unread_columns(read)}
        if self._format.has_agents:
            known.discard("chat_template_kwargs")
        return sorted(known)

    def _settle(self) -> None:
        self._input_key, *_ = self._columns
        is_chat = self._uses_chat_template([self._input_key])
        self._format = replace(self._format, apply_chat_template=is_chat)
        how = self._words_of_chat([self._input_key]) if is_chat else "text"
        self._say_read([self._input_key], how, fills_template=not is_chat)

    def _tokens_of(self, row: Row) -> Tokenised:
        key, column, around = self._format.label_key, self._input_key, self._format.around
        label = row[key] if key else None
        if key and (label is None or (isinstance(label, float) and not math.isfinite(label))):
            raise RowError(f"'{key}' is {'missing' if label is None else label}")
        if around is not None and self._is_dialogue(row):
            read = to_messages(row[column], reads_pictures=self._reads_images)
            row, around = {**row, column: wrap_input(read, around)}, None
        text = self._prompt_text(row, column)
        text = text if around is None else wrap_input(text, around)
        # The fingerprint depends on the label, and on all that reward functions may read.
        extra = {"text": self._encoder.reveal(text), "label": label, "others": self._hash(row)}
        return [self._encode(Rendered(text))], extra

    def _hash(self, row: Row) -> str:
        """Return a hash of the columns besides the prompt and its images."""
        beside = {self._input_key, *self._image_keys}
        others = {name: value for name, value in row.items() if name not in beside}
        text = json.dumps(others, sort_keys=True, default=_steady_text)
        return hashlib.sha256(text.encode()).hexdigest()

    def _holds_messages(self, row: Row) -> bool:
        if not self._format.apply_chat_template or self._is_rendered(row, self._input_key):
            return False
        return bool(self._is_dialogue(row) or row.get("system") or row.get("history"))

    def _is_dialogue(self, row: Row) -> bool:
        """Return True for messages: all rows have them, or none, as the column of a file must."""
        return self._format.apply_chat_template and not isinstance(row[self._input_key], str)

    def _asked_part(self, row: Row) -> Any:
        """Return a prompt as its row has it: text, or messages without a closing answer."""
        if not self._holds_messages(row):
            return row[self._input_key]
        messages = without_answer(self._messages(row, self._input_key))
        return [as_parts(message) for message in messages]

    def _cut(self, tokens: list[Tokens], extra: Any, limit: int) -> Tokenised:
        """Return the last tokens of a prompt, behind the BOS it began with."""
        [(ids, _)] = tokens
        ids = self._encoder.last_ids(ids, limit)
        text = self._encoder.tokenizer.decode(ids, skip_special_tokens=False)
        return [Tokens(ids, [False] * len(ids))], {**extra, "text": text}

    def _check_useful(self, tokens: list[Tokens]) -> None:
        """Accept every prompt: none has a target."""


def _steady_text(value: object) -> str:
    """Return a text for a value that JSON cannot hold. It is the same in every process: the text of
    most objects has their address, so their type stands for them.
    """
    is_plain = isinstance(value, (date, time, timedelta, Decimal, bytes))
    return str(value) if is_plain else type(value).__name__


class StudentPrompts(PromptDataset):
    """Prompts of rows that a student answers, whose limit is that of prompt and answer."""

    flags = "--input_key and --max_len"

    @classmethod
    def find_columns(cls, form: RowFormat, rows: Dataset) -> list[str]:
        """Return the column whose prompts rows with answers have, or else the usual one."""
        with suppress(DataError):
            form = replace(form, input_key=SFTDataset.find_columns(form, rows)[0])
        return super().find_columns(form, rows)


def preprocess_data(
    data: Mapping[str, object],
    input_template: str | None = None,
    input_key: str = "input",
    apply_chat_template: Callable[..., str] | None = None,
) -> str:
    """Return the prompt of a row as text; `apply_chat_template` is the tokenizer's method.

    For scripts that prepare data as they did for OpenRLHF.
    """
    if apply_chat_template is None:
        return fill_template(input_template, plain_text(data[input_key], input_key))
    messages = without_answer(to_messages(data[input_key]))
    return apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
