"""Texts whose steps are judged one by one: a marker token ends each step, a label belongs to each.

A label is a token (hard: text, or true/false for the first and second reward token) or the share of
the first of two reward tokens (soft: a number from 0 to 1). Knows no loss; the marker's own
position is where it is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor

from openrlhf.datasets.chat import RowError, Segment, plain_text
from openrlhf.datasets.conventions import pick_columns, recognised_line
from openrlhf.datasets.tokenized import (
    Draft,
    Json,
    Row,
    RowFormat,
    TokenizedDataset,
    Tokens,
)
from openrlhf.errors import ConfigError
from openrlhf.utils.tokenizer import Tokenizer, encode_text

STEPWISE_COLUMNS = ("prompt", "completions", "labels")


@dataclass(frozen=True)
class ProcessFormat(RowFormat):
    """How rows become judged steps."""

    input_key: str | None = None  # None: `input`, `text`, or the columns of STEPWISE_COLUMNS
    label_key: str | None = None  # None: `label` or `labels`
    placeholder_token: str = ""  # the marker
    reward_tokens: tuple[str, ...] = ()  # what a label may be, the positive one first; () for any

    def check_columns(self, rows: Dataset) -> None:
        if not self.is_stepwise(rows):
            self.find_columns(rows)

    def is_stepwise(self, rows: Dataset) -> bool:
        """Return True if steps and labels stand in columns of their own."""
        is_usual = self.input_key in (None, "input") and "input" not in rows.column_names
        return is_usual and set(STEPWISE_COLUMNS) <= set(rows.column_names)

    def find_columns(self, rows: Dataset) -> tuple[str, str]:
        """Return the columns of the text and of its labels; raise DataError that names both."""
        text, labels = pick_columns(
            rows.column_names,
            (self.input_key, ("input", "text"), "--input_key"),
            (self.label_key, ("label", "labels"), "--label_key"),
        )
        return text, labels


@dataclass(frozen=True)
class ProcessExample:
    """A text and what its M markers are worth."""

    token_ids: Tensor  # (T,) int64
    marker_mask: Tensor  # (T,) bool, True at the M markers
    labels: Tensor  # (M,) int64 token ids, or (M,) float32 shares of the first reward token
    is_soft: bool


class ProcessRewardDataset(TokenizedDataset[ProcessFormat]):
    """Texts with a label for each step, in file order; raises DataError."""

    flags = "--input_key, --label_key and --max_len"

    def __init__(
        self,
        rows: Dataset,
        tokenizer: Tokenizer,
        row_format: ProcessFormat,
    ) -> None:
        self.marker_id = single_token_id(
            tokenizer, row_format.placeholder_token, flag="--placeholder_token"
        )
        self.reward_token_ids = tuple(
            single_token_id(tokenizer, text, flag="--reward_tokens")
            for text in row_format.reward_tokens
        )
        self._hard_ids: dict[str, int] = dict(
            zip(row_format.reward_tokens, self.reward_token_ids, strict=True)
        )
        super().__init__(rows, tokenizer, row_format)

    def __getitem__(self, index: int) -> ProcessExample:
        [tokens], values = self._example(index)
        token_ids, marker_mask = tokens.tensors
        is_soft = isinstance(values[0], float)
        labels = torch.tensor(values, dtype=torch.float32 if is_soft else torch.int64)
        return ProcessExample(token_ids, marker_mask, labels[: int(marker_mask.sum())], is_soft)

    def _check_columns(self) -> None:
        form = self._format
        self._is_stepwise = form.is_stepwise(self._rows)
        if self._is_stepwise:
            self._label_key = "labels"
            self.notices.append(recognised_line(STEPWISE_COLUMNS, "steps and their labels"))
            return
        self._input_key, self._label_key = form.find_columns(self._rows)
        asked = (form.input_key or "input", form.label_key or "label")
        if asked != (names := (self._input_key, self._label_key)):
            self.notices.append(recognised_line(names, "text and its labels"))

    @property
    def recognised(self) -> dict[str, object]:
        if self._is_stepwise:
            return {}
        return {"data.input_key": self._input_key, "data.label_key": self._label_key}

    def _draft(self, row: Row) -> Draft:
        text = self._stepwise_text(row) if self._is_stepwise else row[self._input_key]
        steps = plain_text(text, "prompt" if self._is_stepwise else self._input_key)
        marker = self._format.placeholder_token
        text = marker.join(map(self._encoder.plain, steps.split(marker)))
        return Draft([[Segment(text, is_target=False)]], self._labels(row))

    def _stepwise_text(self, row: Row) -> str:
        """Return prompt and steps on lines of their own, each step with the marker at its end."""
        steps = row["completions"]
        if not isinstance(steps, (list, tuple)) or not all(isinstance(s, str) for s in steps):
            raise RowError("'completions' is not a list of texts")
        marker = self._format.placeholder_token
        if any(marker in step for step in steps):
            raise RowError(f"'completions' holds the step marker {marker!r} itself")
        return "\n".join([plain_text(row["prompt"], "prompt"), *(step + marker for step in steps)])

    def _labels(self, row: Row) -> list[Json]:
        values = row[self._label_key]
        if not isinstance(values, (list, tuple)):
            raise RowError(f"'{self._label_key}' is {type(values).__name__}, not a list of labels")
        return [self._label(value) for value in values]

    def _label(self, value: object) -> Json:
        """Return a token id for a hard label, a float for a soft one."""
        if isinstance(value, str):
            return self._hard_id(value)
        if not isinstance(value, (int, float)):
            raise RowError(f"label {value!r} is neither a token nor a number from 0 to 1")
        num_tokens = len(self.reward_token_ids)
        if num_tokens != 2:
            raise RowError(f"label {value} needs exactly two --reward_tokens, not {num_tokens}")
        if isinstance(value, bool):
            return self.reward_token_ids[0 if value else 1]
        if not 0 <= value <= 1:  # NaN is refused here too
            raise RowError(f"soft label {value} is not from 0 to 1")
        return float(value)

    def _hard_id(self, text: str) -> int:
        if text in self._hard_ids:
            return self._hard_ids[text]
        if self._format.reward_tokens:
            raise RowError(
                f"unknown label {text!r}; --reward_tokens are "
                f"{', '.join(self._format.reward_tokens)}"
            )
        ids = encode_text(self._encoder.tokenizer, text, allow_special_tokens=True)
        if len(ids) != 1:
            raise RowError(f"label {text!r} is {len(ids)} tokens, not one")
        self._hard_ids[text] = ids[0]
        return ids[0]

    def _assemble(self, segments: list[Segment], ids: list[list[int]]) -> Tokens:
        token_ids = self._encoder.with_leading_ids(ids[0])
        return Tokens(token_ids, [token == self.marker_id for token in token_ids])

    def _refine(self, draft: Draft, tokens: list[Tokens]) -> list[Tokens]:
        num_markers, labels = sum(tokens[0].mask), draft.extra
        if num_markers != len(labels):
            raise RowError(
                f"{num_markers} step markers {self._format.placeholder_token!r} "
                f"but {len(labels)} labels"
            )
        if len({type(label) for label in labels}) > 1:
            raise RowError("labels are partly tokens and partly numbers")
        return tokens


def single_token_id(tokenizer: Tokenizer, text: str, *, flag: str) -> int:
    """Return the id of a text that must be one token; raise ConfigError with the flag it comes
    from.
    """
    ids: Sequence[int] = encode_text(tokenizer, text, allow_special_tokens=True) if text else []
    if len(ids) != 1:
        raise ConfigError(
            f"{flag} {text!r} is {len(ids)} tokens for {tokenizer.name_or_path}, not one. "
            "Give a text that is a single token."
        )
    return int(ids[0])
