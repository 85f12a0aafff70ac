"""Prompts for RL: every row rendered, tokenised and measured once, before any engine starts.

A literal example: {"input": "2+2=", "answer": "4"} with label_key "answer" becomes
PromptRecord(row_id=0, prompt_text="2+2=", prompt_token_ids=(20, 13, 20, 31), label="4", ...).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from datasets import Dataset
from torch import Tensor

from openrlhf.config.notices import Caution
from openrlhf.datasets.chat import (
    STANDARD_PROMPT_COLUMNS,
    RowError,
    ends_with_answer,
    has_placeholder,
    pick_column,
    render_prompt,
)
from openrlhf.datasets.problems import Problems, missing_column, row_place
from openrlhf.datasets.token_store import TokenStore
from openrlhf.datasets.tokenized import CHUNK_ROWS, Progress
from openrlhf.errors import ConfigError, DataError
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer, chat_template_of

OVERLONG_POLICIES = ("filter", "truncate_left", "error")


@dataclass(frozen=True)
class PromptFormat:
    """How rows become prompts."""

    input_key: str = "input"
    label_key: str | None = None
    input_template: str | None = None
    apply_chat_template: bool = False
    max_len: int | None = None  # tokens of a prompt; None for no limit
    overlong: str = "filter"  # filter | truncate_left | error
    allow_special_tokens: bool = False  # special tokens spelled in the data keep their meaning


@dataclass(frozen=True)
class PromptRecord:
    """One prompt as the engines get it."""

    row_id: int  # index of the row in the data set, before anything was dropped
    prompt_text: str
    prompt_token_ids: tuple[int, ...]
    label: object = None
    datasource: str = "default"
    columns: dict[str, object] = field(default_factory=dict)  # the row's other columns


class PromptDataset:
    """Prompts that fit the length limit, in file order; raises DataError for rows that cannot be
    used.
    """

    def __init__(
        self,
        rows: Dataset,
        tokenizer: Tokenizer,
        prompt_format: PromptFormat,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.notices: list[str] = []  # what a person should be told, one line each
        self.num_dropped = 0  # over-long prompts left out
        self.num_truncated = 0  # over-long prompts cut at their beginning
        self.num_answered = 0  # dialogues whose last answer was left out
        self._rows = rows
        self._format = prompt_format
        self._encoder = TextEncoder(
            tokenizer, allow_special_tokens=prompt_format.allow_special_tokens
        )
        self._input_key = self._check_columns()
        self._kept: list[int] = []
        self._texts: list[str] = []
        self._tokens = TokenStore()
        self._build(progress)
        self._report()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> PromptRecord:
        row_id = self._kept[index]
        row = self._rows[row_id]
        label_key = self._format.label_key
        return PromptRecord(
            row_id=row_id,
            prompt_text=self._texts[index],
            prompt_token_ids=tuple(self._tokens[index].tolist()),
            label=row[label_key] if label_key else None,
            datasource=str(row.get("datasource") or "default"),
            columns={name: value for name, value in row.items() if name != self._input_key},
        )

    @property
    def lengths(self) -> Tensor:
        """Token count of every prompt, (len,) int64."""
        return self._tokens.lengths

    @property
    def fingerprint(self) -> str:
        """A hash of all token ids, to notice on resume that the data changed."""
        return self._tokens.fingerprint()

    def _check_columns(self) -> str:
        columns, form = self._rows.column_names, self._format
        if form.overlong not in OVERLONG_POLICIES:
            raise ConfigError(
                f"--overlong_prompts {form.overlong} is unknown. "
                f"Use {', '.join(OVERLONG_POLICIES)}."
            )
        name, notice = pick_column(form.input_key, columns, STANDARD_PROMPT_COLUMNS)
        if name is None:
            raise missing_column(form.input_key, columns, flag="--input_key")
        if form.label_key and form.label_key not in columns:
            raise missing_column(form.label_key, columns, flag="--label_key")
        if form.apply_chat_template:
            chat_template_of(self._encoder.tokenizer)
        elif form.input_template and not has_placeholder(form.input_template):
            self.notices.append(
                Caution(f"--input_template {form.input_template!r} has no {{}} and is not used")
            )
        if notice:
            self.notices.append(notice)
        return name

    def _build(self, progress: Progress | None) -> None:
        problems = Problems()
        num_hidden = 0
        for start in range(0, len(self._rows), CHUNK_ROWS):
            row_ids, texts = self._render_chunk(start, problems)
            num_hidden += sum(map(self._encoder.hides_anything, texts))
            for row_id, text, ids in zip(
                row_ids, texts, self._encoder.encode_prompts(texts), strict=True
            ):
                self._add(row_id, self._encoder.reveal(text), ids, problems)
            if progress is not None:
                progress(min(start + CHUNK_ROWS, len(self._rows)), len(self._rows))
        problems.raise_if_any("prompt data set", "Repair the rows, or choose other columns.")
        if num_hidden:
            self.notices.append(
                f"{num_hidden} prompts spell special tokens; they were tokenised as plain text"
            )

    def _render_chunk(self, start: int, problems: Problems) -> tuple[list[int], list[str]]:
        stop = min(start + CHUNK_ROWS, len(self._rows))
        chunk = self._rows[start:stop]
        row_ids, texts = [], []
        for offset in range(stop - start):
            row = {name: values[offset] for name, values in chunk.items()}
            try:
                self._check_label(row)
                texts.append(self._render(row))
                row_ids.append(start + offset)
            except RowError as error:
                problems.add(row_place(self._rows, start + offset), str(error))
        return row_ids, texts

    def _render(self, row: dict[str, object]) -> str:
        text = render_prompt(
            row,
            input_key=self._input_key,
            input_template=self._format.input_template,
            apply_chat_template=self._format.apply_chat_template,
            encoder=self._encoder,
        )
        if self._format.apply_chat_template:
            self.num_answered += ends_with_answer(row[self._input_key])
        return text

    def _check_label(self, row: dict[str, object]) -> None:
        key = self._format.label_key
        if not key:
            return
        label = row[key]
        if label is None:
            raise RowError(f"'{key}' is missing")
        if isinstance(label, float) and not math.isfinite(label):
            raise RowError(f"'{key}' is {label}")

    def _add(self, row_id: int, text: str, ids: list[int], problems: Problems) -> None:
        limit = self._format.max_len
        if limit is not None and len(ids) > limit:
            if self._format.overlong == "error":
                what = f"{len(ids)} tokens, over the limit of {limit}"
                problems.add(row_place(self._rows, row_id), what)
                return
            if self._format.overlong == "filter":
                self.num_dropped += 1
                return
            self.num_truncated += 1
            ids = self._cut(ids, limit)
            text = self._encoder.tokenizer.decode(ids, skip_special_tokens=False)
        self._kept.append(row_id)
        self._texts.append(text)
        self._tokens.append(ids)

    def _cut(self, ids: list[int], limit: int) -> list[int]:
        """The last tokens of a prompt, behind the BOS it began with."""
        num_leading = len(self._encoder.leading_ids)
        room = max(limit - num_leading, 1)
        return [*ids[:num_leading], *ids[num_leading:][-room:]]

    def _report(self) -> None:
        limit, num_rows = self._format.max_len, len(self._rows)
        if self.num_answered:
            self.notices.append(
                f"{self.num_answered} of {num_rows} prompts end with the assistant's turn, which "
                "was left out"
            )
        if self.num_dropped:
            self.notices.append(
                Caution(
                    f"{self.num_dropped} of {num_rows} prompts are over {limit} tokens and were "
                    "left out"
                )
            )
        if self.num_truncated:
            self.notices.append(
                Caution(
                    f"{self.num_truncated} of {num_rows} prompts are over {limit} tokens and lost "
                    "their beginning"
                )
            )
        if not self._kept:
            raise DataError(
                f"all {num_rows} prompts are longer than --prompt_max_len {limit}. "
                "Raise it, or use shorter ones."
            )
