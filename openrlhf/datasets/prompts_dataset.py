"""Prompts for RL: every row rendered, tokenised and measured once, before any engine starts.

A literal example: {"input": "2+2=", "answer": "4"} with label_key "answer" becomes
PromptRecord(row_id=0, prompt_text="2+2=", prompt_token_ids=(20, 13, 20, 31), label="4", ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset

from openrlhf.config.base import Caution
from openrlhf.datasets.chat import (
    RowError,
    Segment,
    asked_part,
    fill_template,
    plain_text,
    render_prompt,
    to_messages,
    without_answer,
    wrap_input,
)
from openrlhf.datasets.conventions import (
    PROMPT_COLUMNS,
    pick_columns,
    recognised_line,
    uses_chat_template,
)
from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.datasets.tokenized import Draft, Row, RowFormat, TokenizedDataset, Tokens
from openrlhf.errors import DataError


@dataclass(frozen=True)
class PromptFormat(RowFormat):
    """How rows become prompts."""

    input_key: str | None = None  # None: the first of PROMPT_COLUMNS that is there
    label_key: str | None = None
    max_len: int | None = None  # tokens of a prompt; None for no limit
    around: str | None = None  # text around what is asked, with {input}, as `wrap_input` puts it

    def check_columns(self, rows: Dataset) -> None:
        self.find_input(rows)

    def find_input(self, rows: Dataset) -> str:
        """Return the column of the prompt; raise DataError that names it and that of the label."""
        wanted: list[tuple[str | None, Sequence[str], str]] = [
            (self.input_key, PROMPT_COLUMNS, "--input_key")
        ]
        if self.label_key:
            wanted.append((self.label_key, (), "--label_key"))
        return pick_columns(rows.column_names, *wanted)[0]


class PromptDataset(TokenizedDataset[PromptFormat]):
    """Prompts that fit the length limit, in file order; raises DataError for rows that cannot be
    used.
    """

    subject = "prompt data set"

    def __getitem__(self, index: int) -> PromptRecord:
        [tokens], extra = self._example(index)
        row = self._rows[self.row_ids[index]]
        label_key = self._format.label_key
        return PromptRecord(
            row_id=self.row_ids[index],
            prompt_text=extra["text"],
            prompt_token_ids=tuple(tokens.ids),
            label=row[label_key] if label_key else "",
            datasource=str(row.get("datasource") or "default"),
            columns={name: value for name, value in row.items() if name != self._input_key},
            source=asked_part(row[self._input_key]),
        )

    @property
    def recognised(self) -> dict[str, object]:
        return {"data.input_key": self._input_key, **super().recognised}

    def asked(self, index: int) -> Any:
        """Return the prompt of `index` without what stands around it: messages, or text as the
        model reads it.
        """
        row = self._rows[self.row_ids[index]]
        if self._format.apply_chat_template and not isinstance(row[self._input_key], str):
            return asked_part(row[self._input_key])
        if self._format.around is None:
            return self._example(index)[1]["text"]
        return self._encoder.reveal(self._rendered(row))

    def _check_columns(self) -> None:
        form = self._format
        name = form.find_input(self._rows)
        tokenizer = self._encoder.tokenizer
        is_chat = uses_chat_template(form.apply_chat_template, self._rows, [name], tokenizer)
        is_found = is_chat and not form.apply_chat_template
        if is_found or name != (form.input_key or "input"):
            how = "messages, with the chat template" if is_chat else "text"
            self.notices.append(recognised_line([name], how))
        if form.input_template and is_found:
            self.notices.append(
                Caution(f"--input_template {form.input_template!r} is not used for messages")
            )
        self._input_key = name
        self._format = replace(form, input_key=name, apply_chat_template=is_chat)

    def _draft(self, row: Row) -> Draft:
        key, column, around = self._format.label_key, self._input_key, self._format.around
        label = row[key] if key else None
        if key and label is None:
            raise RowError(f"'{key}' is missing")
        if isinstance(label, float) and not math.isfinite(label):
            raise RowError(f"'{key}' is {label}")
        if around is None:
            text = self._rendered(row)
        elif self._format.apply_chat_template and not isinstance(row[column], str):
            text = self._rendered({**row, column: wrap_input(asked_part(row[column]), around)})
        else:
            text = wrap_input(self._rendered(row), around)
        # The fingerprint depends on the label.
        extra = {"text": self._encoder.reveal(text), "label": label}
        return Draft([[Segment(text, is_target=False)]], extra)

    def _rendered(self, row: Row) -> str:
        return render_prompt(
            row,
            input_key=self._input_key,
            input_template=self._format.input_template,
            apply_chat_template=bool(self._format.apply_chat_template),
            encoder=self._encoder,
        )

    def _cut(self, draft: Draft, tokens: list[Tokens], limit: int) -> list[Tokens]:
        """Return the last tokens of a prompt, behind the BOS it began with."""
        [(ids, _)], num_leading = tokens, len(self._encoder.leading_ids)
        room = max(limit - num_leading, 1)
        ids = [*ids[:num_leading], *ids[num_leading:][-room:]]
        draft.extra["text"] = self._encoder.tokenizer.decode(ids, skip_special_tokens=False)
        return [Tokens(ids, [False] * len(ids))]

    def _reason_to_leave_out(self, tokens: list[Tokens]) -> str:
        return ""

    def _report(self) -> None:
        if not len(self):
            raise DataError(
                f"all {len(self._rows)} prompts are longer than --prompt_max_len "
                f"{self._format.max_len}. Raise it, or use shorter ones."
            )
        super()._report()


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
