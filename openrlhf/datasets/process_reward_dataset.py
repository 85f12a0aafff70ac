"""Texts whose steps are judged one by one: a marker token ends each step, a label belongs to each.

A label is a token (hard: text, or true/false for the first and second reward token) or the share of
the first of two reward tokens (soft: a number from 0 to 1). Knows no loss; the marker's own
position is where it is taken.
"""

from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor

from openrlhf.datasets.chat import Rendered, RowError, plain_text
from openrlhf.datasets.tokenized import (
    Row,
    RowFormat,
    Tokenised,
    TokenizedDataset,
    Tokens,
    columns_of,
    pick_columns,
    refuse_classes,
)
from openrlhf.errors import ConfigError
from openrlhf.utils.tokenizer import Tokenizer, encode_text

STEPWISE_COLUMNS = ["prompt", "completions", "labels"]


@dataclass(frozen=True)
class ProcessExample:
    """A text and what its M markers are worth.

    Example: three markers worth good, good, bad: `labels` tensor([10, 10, 12]).
    """

    token_ids: Tensor  # (T,) int64
    marker_mask: Tensor  # (T,) bool, True at the M markers
    labels: Tensor  # (M,) int64 token ids, or (M,) float32 shares of the first reward token
    is_soft: bool


class ProcessRewardDataset(TokenizedDataset):
    """Texts with a label for each step, in file order; raises DataError."""

    flags = "--input_key, --label_key and --max_len"

    def __getitem__(self, index: int) -> ProcessExample:
        [(token_ids, marker_mask)], values = self._example(index)
        is_soft = isinstance(values[0], float)
        labels = torch.tensor(values, dtype=torch.float32 if is_soft else torch.int64)
        return ProcessExample(token_ids, marker_mask, labels[: int(marker_mask.sum())], is_soft)

    @classmethod
    def find_columns(cls, form: RowFormat, rows: Dataset) -> list[str]:
        """Return the columns of the text and of its labels, or STEPWISE_COLUMNS where they are
        those.
        """
        found = columns_of(rows, form)
        is_usual = form.input_key in (None, "input") and "input" not in found
        if is_usual and set(STEPWISE_COLUMNS) <= set(found):
            columns = STEPWISE_COLUMNS
        else:
            columns = pick_columns(
                found,
                (form.input_key, ("input", "text"), "--input_key"),
                (form.label_key, ("label", "labels"), "--label_key"),
            )
        refuse_classes(rows, columns[-1])
        return columns

    def _settle(self) -> None:
        form, tokenizer = self._format, self._encoder.tokenizer
        self.marker_id = single_token_id(
            tokenizer, form.placeholder_token, flag="--placeholder_token"
        )
        self.reward_token_ids = tuple(
            single_token_id(tokenizer, text, flag="--reward_tokens") for text in form.reward_tokens
        )
        is_stepwise = self._columns == STEPWISE_COLUMNS
        if is_stepwise and form.placeholder_token == "\n":
            raise ConfigError(
                "--placeholder_token is the line break that stands between steps anyway. Give "
                "another token."
            )
        how = "steps and their labels" if is_stepwise else "text and its labels"
        self._say_read(self._columns, how)

    def _tokens_of(self, row: Row) -> Tokenised:
        marker = self._format.placeholder_token
        steps = self._marked_text(row).split(marker)
        text = marker.join(map(self._encoder.plain, steps))
        ids = self._encode(Rendered(text)).ids
        mask = [token == self.marker_id for token in ids]
        name = str(self._columns[-1])
        values = row[name]
        if not isinstance(values, (list, tuple)):
            raise RowError(f"'{name}' is {type(values).__name__}, not a list of labels")
        labels = [self._label(value) for value in values]
        if sum(mask) != len(labels):
            raise RowError(f"{sum(mask)} step markers {marker!r} but {len(labels)} labels")
        if len({type(label) for label in labels}) > 1:
            raise RowError("labels are partly tokens and partly numbers")
        return [Tokens(ids, mask)], labels

    def _marked_text(self, row: Row) -> str:
        """Return the text of a row; prompt and steps of their own columns stand on lines of their
        own, each step with the marker at its end.
        """
        if self._columns != STEPWISE_COLUMNS:
            name = str(self._columns[0])
            return plain_text(row[name], name)
        steps, marker = row["completions"], self._format.placeholder_token
        if not isinstance(steps, (list, tuple)) or not all(isinstance(s, str) for s in steps):
            raise RowError("'completions' is not a list of texts")
        if any(marker in step for step in steps):
            raise RowError(f"'completions' holds the step marker {marker!r} itself")
        return "\n".join([plain_text(row["prompt"], "prompt"), *(step + marker for step in steps)])

    def _label(self, value: object) -> int | float:
        """Return a token id for a hard label, a float for a soft one."""
        texts, ids = self._format.reward_tokens, self.reward_token_ids
        if isinstance(value, str):
            if texts and value not in texts:
                raise RowError(f"unknown label {value!r}; --reward_tokens are {', '.join(texts)}")
            found = encode_text(self._encoder.tokenizer, value, allow_special_tokens=True)
            if len(found) != 1:
                raise RowError(f"label {value!r} is {len(found)} tokens, not one")
            return found[0]
        if not isinstance(value, (int, float)):
            raise RowError(f"label {value!r} is neither a token nor a number from 0 to 1")
        if len(ids) != 2:
            raise RowError(f"label {value} needs exactly two --reward_tokens, not {len(ids)}")
        if isinstance(value, bool):
            return ids[0 if value else 1]
        if not 0 <= value <= 1:  # NaN is refused here too
            raise RowError(f"soft label {value} is not from 0 to 1")
        return float(value)


def single_token_id(tokenizer: Tokenizer, text: str, *, flag: str) -> int:
    """Return the id of a text that must be one token; raise ConfigError with the flag it comes
    from.
    """
    ids = encode_text(tokenizer, text, allow_special_tokens=True) if text else []
    if len(ids) != 1:
        raise ConfigError(
            f"{flag} {text!r} is {len(ids)} tokens for {tokenizer.name_or_path}, not one. "
            "Give a text that is a single token."
        )
    return ids[0]
