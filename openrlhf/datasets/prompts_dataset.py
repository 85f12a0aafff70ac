"""Prompts for RL: every row rendered, tokenised and measured once, before any engine starts.

A literal example: {"input": "2+2=", "answer": "4"} with label_key "answer" becomes
PromptRecord(row_id=0, prompt_text="2+2=", prompt_token_ids=(20, 13, 20, 31), label="4", ...).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset
from torch import Tensor

from openrlhf.config.notices import Caution
from openrlhf.datasets.chat import (
    RowError,
    asked_part,
    ends_with_answer,
    fill_template,
    has_placeholder,
    plain_text,
    render_prompt,
    to_messages,
    without_answer,
    wrap_input,
)
from openrlhf.datasets.conventions import (
    PROMPT_COLUMNS,
    count_rendered,
    image_notices,
    pick_column,
    recognised_line,
    rendered_notices,
    unread_notices,
    uses_chat_template,
)
from openrlhf.datasets.problems import Gathered, Problems, row_place
from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.datasets.token_store import TokenizedRows, TokenStore
from openrlhf.datasets.tokenized import (
    CHUNK_ROWS,
    Progress,
    cached,
    map_chunks,
    spelled_notices,
)
from openrlhf.errors import ConfigError, DataError
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer

OVERLONG_POLICIES = ("filter", "truncate_left", "error")


@dataclass(frozen=True)
class PromptFormat:
    """How rows become prompts."""

    input_key: str | None = None  # None: the first of PROMPT_COLUMNS that is there
    label_key: str | None = None
    input_template: str | None = None
    apply_chat_template: bool | None = None  # None: where the column holds dialogues
    max_len: int | None = None  # tokens of a prompt; None for no limit
    overlong: str = "filter"  # filter | truncate_left | error
    allow_special_tokens: bool = True  # those spelled in plain text are what they say
    around: str | None = None  # around what is asked, with {input}: see `wrap_input`

    def check_columns(self, rows: Dataset) -> None:
        """Raise DataError that names each column that is not there; needs no tokenizer."""
        self.find_input(rows)

    def find_input(self, rows: Dataset) -> str:
        """The column of the prompt; raises DataError that names it and that of the label."""
        gathered, columns = Gathered(), rows.column_names
        flag = "--input_key"
        name = gathered.attempt(
            lambda: pick_column(self.input_key, columns, PROMPT_COLUMNS, flag=flag)
        )
        if self.label_key:
            gathered.attempt(lambda: pick_column(self.label_key, columns, (), flag="--label_key"))
        gathered.raise_if_any()
        assert name is not None, "or else problems were raised"
        return name


# What became of rows, beside the prompts that they are: keys of the counts that are kept.
DROPPED, TRUNCATED, ANSWERED = "dropped", "truncated", "answered"


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
        self._rows = rows
        self._format = prompt_format
        self._encoder = TextEncoder(
            tokenizer, allow_special_tokens=prompt_format.allow_special_tokens
        )
        self._input_key = self._check_columns()
        self.notices += image_notices(rows.column_names) + unread_notices(rows)
        self._content = cached(
            rows,
            tokenizer,
            f"{type(self).__qualname__} {self._format!r}",
            lambda: self._build(progress),
            progress=progress,
            notices=self.notices,
        )
        self._report()

    def __len__(self) -> int:
        return len(self._content.row_ids)

    def __getitem__(self, index: int) -> PromptRecord:
        row_id = self._content.row_ids[index]
        row = self._rows[row_id]
        label_key = self._format.label_key
        return PromptRecord(
            row_id=row_id,
            prompt_text=str(self._content.extras[index]),
            prompt_token_ids=tuple(self._content.stores[0][index].tolist()),
            label=row[label_key] if label_key else "",
            datasource=str(row.get("datasource") or "default"),
            columns={name: value for name, value in row.items() if name != self._input_key},
            source=asked_part(row[self._input_key]),
        )

    @property
    def lengths(self) -> Tensor:
        """Token count of every prompt, (len,) int64."""
        return self._content.stores[0].lengths

    @property
    def fingerprint(self) -> str:
        """A hash of all token ids and labels, to notice on resume that the data changed."""
        digest = hashlib.sha256(self._content.stores[0].fingerprint().encode())
        key = self._format.label_key
        for start in range(0, len(self._rows), CHUNK_ROWS) if key else ():
            labels = self._rows[start : start + CHUNK_ROWS][key]
            digest.update(json.dumps(labels, default=str).encode())
        return digest.hexdigest()

    @property
    def num_dropped(self) -> int:
        """Over-long prompts left out."""
        return self._content.dropped[DROPPED]

    @property
    def num_truncated(self) -> int:
        """Over-long prompts cut at their beginning."""
        return self._content.dropped[TRUNCATED]

    @property
    def num_answered(self) -> int:
        """Dialogues whose last answer was left out."""
        return self._content.dropped[ANSWERED]

    def _check_columns(self) -> str:
        form = self._format
        if form.overlong not in OVERLONG_POLICIES:
            raise ConfigError(
                f"--overlong_prompts {form.overlong} is unknown. "
                f"Use {', '.join(OVERLONG_POLICIES)}."
            )
        name = form.find_input(self._rows)
        tokenizer = self._encoder.tokenizer
        is_chat = uses_chat_template(form.apply_chat_template, self._rows, [name], tokenizer)
        is_found = is_chat and not form.apply_chat_template
        if is_found or name != (form.input_key or "input"):
            how = "messages, with the chat template" if is_chat else "text"
            self.notices.append(recognised_line([name], how))
        if form.input_template and (is_found or not has_placeholder(form.input_template)):
            why = "is not used for messages" if is_found else "has no {} and is not used"
            self.notices.append(Caution(f"--input_template {form.input_template!r} {why}"))
        self._format = replace(form, input_key=name, apply_chat_template=is_chat)
        num = count_rendered(self._rows, name, self._encoder, apply_chat_template=is_chat)
        self.notices += rendered_notices(num, len(self._rows))
        return name

    @property
    def is_chat(self) -> bool:
        """Whether the chat template renders the prompts."""
        return bool(self._format.apply_chat_template)

    @property
    def recognised(self) -> dict[str, object]:
        """Settings of the config, dotted, that say how the rows are read."""
        return {"data.input_key": self._input_key, "data.apply_chat_template": self.is_chat}

    def _build(self, progress: Progress | None) -> TokenizedRows:
        prompts, problems, num_rows = TokenizedRows([TokenStore()]), Problems(), len(self._rows)
        num_done = 0
        for part, found in map_chunks(self._build_chunk, num_rows):
            prompts.extend(part)
            problems.extend(found)
            num_done = min(num_done + CHUNK_ROWS, num_rows)
            if progress is not None:
                progress(num_done, num_rows)
        problems.raise_if_any("prompt data set", "Repair the rows, or choose other columns.")
        return prompts

    def _build_chunk(self, start: int) -> tuple[TokenizedRows, Problems]:
        prompts, problems = TokenizedRows([TokenStore()]), Problems()
        row_ids, texts = self._render_chunk(start, prompts, problems)
        encoded = self._encoder.encode_prompts(texts)
        for row_id, text, ids in zip(row_ids, texts, encoded, strict=True):
            try:
                self._add(row_id, self._encoder.reveal(text), ids, prompts)
            except RowError as error:
                problems.add(row_place(self._rows, row_id), str(error))
        return prompts, problems

    def _render_chunk(
        self, start: int, prompts: TokenizedRows, problems: Problems
    ) -> tuple[list[int], list[str]]:
        stop = min(start + CHUNK_ROWS, len(self._rows))
        chunk = self._rows[start:stop]
        row_ids, texts = [], []
        for offset in range(stop - start):
            row = {name: values[offset] for name, values in chunk.items()}
            num_spelled = self._encoder.num_spelled
            try:
                self._check_label(row)
                texts.append(self._render(row))
                prompts.num_spelled += self._encoder.num_spelled > num_spelled
                prompts.dropped[ANSWERED] += self._is_answered(row)
                row_ids.append(start + offset)
            except RowError as error:
                problems.add(row_place(self._rows, start + offset), str(error))
        return row_ids, texts

    def asked(self, index: int) -> Any:
        """The prompt of `index` without what stands around it: messages, or text as the model
        reads it.
        """
        row = self._rows[self._content.row_ids[index]]
        if self.is_chat and not isinstance(row[self._input_key], str):
            return asked_part(row[self._input_key])
        if self._format.around is None:
            return str(self._content.extras[index])
        return self._encoder.reveal(self._rendered(row))

    def _render(self, row: dict[str, object]) -> str:
        around = self._format.around
        if around is None:
            return self._rendered(row)
        if not self.is_chat or isinstance(row[self._input_key], str):
            return wrap_input(self._rendered(row), around)
        messages = wrap_input(asked_part(row[self._input_key]), around)
        return self._rendered({**row, self._input_key: messages})

    def _rendered(self, row: dict[str, object]) -> str:
        return render_prompt(
            row,
            input_key=self._input_key,
            input_template=self._format.input_template,
            apply_chat_template=self.is_chat,
            encoder=self._encoder,
        )

    def _is_answered(self, row: dict[str, object]) -> bool:
        return self.is_chat and ends_with_answer(row[self._input_key])

    def _check_label(self, row: dict[str, object]) -> None:
        key = self._format.label_key
        if not key:
            return
        label = row[key]
        if label is None:
            raise RowError(f"'{key}' is missing")
        if isinstance(label, float) and not math.isfinite(label):
            raise RowError(f"'{key}' is {label}")

    def _add(self, row_id: int, text: str, ids: list[int], prompts: TokenizedRows) -> None:
        limit = self._format.max_len
        if limit is not None and len(ids) > limit:
            if self._format.overlong == "error":
                raise RowError(f"{len(ids)} tokens, over the limit of {limit}")
            if self._format.overlong == "filter":
                prompts.dropped[DROPPED] += 1
                return
            prompts.dropped[TRUNCATED] += 1
            ids = self._cut(ids, limit)
            text = self._encoder.tokenizer.decode(ids, skip_special_tokens=False)
        prompts.row_ids.append(row_id)
        prompts.extras.append(text)
        prompts.stores[0].append(ids)

    def _cut(self, ids: list[int], limit: int) -> list[int]:
        """The last tokens of a prompt, behind the BOS it began with."""
        num_leading = len(self._encoder.leading_ids)
        room = max(limit - num_leading, 1)
        return [*ids[:num_leading], *ids[num_leading:][-room:]]

    def _report(self) -> None:
        limit, num_rows = self._format.max_len, len(self._rows)
        is_text = not self.is_chat and self._format.allow_special_tokens
        self.notices += spelled_notices(self._content.num_spelled, num_rows, are_read=is_text)
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
        if not len(self):
            raise DataError(
                f"all {num_rows} prompts are longer than --prompt_max_len {limit}. "
                "Raise it, or use shorter ones."
            )


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
