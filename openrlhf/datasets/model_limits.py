"""What a model can read, held against every token of a data set before the model is loaded.

An id beyond the embeddings reads other memory or ends deep in a kernel; a place beyond the
positions was never trained, or does not exist. Knows numbers; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets import Dataset

from openrlhf.datasets.problems import row_place
from openrlhf.datasets.token_store import TokenizedRows
from openrlhf.errors import DataError


@dataclass(frozen=True)
class ModelLimits:
    """The sizes of a model that reads the rows."""

    path: str
    num_embeddings: int | None  # token ids are below it; None: not known
    num_positions: int | None  # tokens of the longest sequence; None: any number


def check_fits(content: TokenizedRows, rows: Dataset, limits: ModelLimits) -> None:
    """Raise DataError where the model cannot read an example; `rows` are those it was made from."""
    problems = [_unknown_id(content, rows, limits), _too_long(content, rows, limits)]
    if found := [problem for problem in problems if problem is not None]:
        raise DataError(found)


def unknown_id(place: str, token_id: int, limits: ModelLimits) -> str:
    """What to say of an id that the model has no embedding for."""
    return (
        f"{place} has token id {token_id}, and the model {limits.path} has {limits.num_embeddings} "
        "embeddings. Use a model whose folder holds its own tokenizer, or give it embeddings for "
        "the tokens that were added."
    )


def _unknown_id(content: TokenizedRows, rows: Dataset, limits: ModelLimits) -> str | None:
    if limits.num_embeddings is None:
        return None
    found = [store.first_id_from(limits.num_embeddings) for store in content.stores]
    if not any(found):
        return None
    index, token_id = min(place for place in found if place is not None)
    return unknown_id(row_place(rows, content.row_ids[index]), token_id, limits)


def _too_long(content: TokenizedRows, rows: Dataset, limits: ModelLimits) -> str | None:
    if limits.num_positions is None or not content.row_ids:
        return None
    first, *others = [store.lengths for store in content.stores]
    for lengths in others:
        first = first.maximum(lengths)
    num_long, longest = int((first > limits.num_positions).sum()), int(first.argmax())
    if not num_long:
        return None
    return (
        f"{num_long} of {len(rows)} rows are longer than the {limits.num_positions} positions of "
        f"the model {limits.path}: {row_place(rows, content.row_ids[longest])} has "
        f"{int(first[longest])} tokens. Type --max_len {limits.num_positions}, "
        "or set max_position_embeddings in its config.json if it can read more."
    )
