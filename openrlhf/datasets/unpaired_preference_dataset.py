"""Answers that are labelled desirable or not, one by one, as KTO learns from them.

Rows are read as supervised rows with a label beside them. Prompt and response can be told apart,
because the KL estimate of KTO puts a prompt before another row's response.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from datasets import Dataset

from openrlhf.datasets.chat import RowError
from openrlhf.datasets.sft_dataset import Columns, SFTDataset, SFTExample
from openrlhf.datasets.tokenized import (
    Row,
    RowFormat,
    Tokenised,
    columns_of,
    number_of,
    pick_columns,
    refuse_classes,
)


@dataclass(frozen=True)
class UnpairedExample(SFTExample):
    """A prompt, its response, and whether that is wanted.

    Example: prompt [7, 8] and the wanted response [9, 2]: `token_ids` [7, 8, 9, 2], `loss_mask`
    [F, F, T, T], `is_desirable` True.
    """

    is_desirable: bool
    ref_sums: Sequence[float] | None = None  # of the response under a reference, once asked

    @property
    def prompt_length(self) -> int:
        """Return the number of tokens before the response."""
        return int(self.loss_mask.int().argmax())


class UnpairedPreferenceDataset(SFTDataset):
    """Labelled responses, in file order; raises DataError."""

    flags = "--input_key, --output_key, --label_key and --max_len"

    def __getitem__(self, index: int) -> UnpairedExample:
        [tokens], is_desirable = self._example(index)
        return UnpairedExample(*tokens, is_desirable)

    @classmethod
    def find_columns(cls, form: RowFormat, rows: Dataset) -> Columns:
        picked = pick_columns(columns_of(rows, form), (form.label_key, ("label",), "--label_key"))
        refuse_classes(rows, picked[0])
        return super().find_columns(form, rows)

    def _unread_columns(self, read: set[str]) -> list[str]:
        return super()._unread_columns(read | {self._format.label_key or "label"})

    def _tokens_of(self, row: Row) -> Tokenised:
        name = self._format.label_key or "label"
        if (number := number_of(row[name])) not in (0, 1):
            raise RowError(f"'{name}' is {row[name]!r}; labels are 1 and 0")
        tokens, _ = super()._tokens_of(row)
        return tokens, bool(number)
