"""Many token sequences in one growing buffer: 4 bytes a token instead of a Python object each.

`TokenizedRows` is all that tokenising a data set leaves behind; it knows neither rows nor formats.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

Json: TypeAlias = bool | int | float | str | list["Json"] | None


class TokenStore:
    """An append-only list of token sequences, each with an optional mask."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._masks = bytearray()
        self._ends = array("q")

    @classmethod
    def from_buffers(cls, buffers: Sequence[bytes]) -> TokenStore:
        """The store that `to_buffers` came from."""
        store = cls()
        ids, masks, ends = buffers
        store._ids.frombytes(ids)
        store._masks.extend(masks)
        store._ends.frombytes(ends)
        return store

    def to_buffers(self) -> list[bytes]:
        """Ids, masks and boundaries as raw bytes."""
        return [self._ids.tobytes(), bytes(self._masks), self._ends.tobytes()]

    def append(self, token_ids: Sequence[int], mask: Sequence[bool] | None = None) -> None:
        """Add a sequence of T ids and its mask of T flags (all False when None)."""
        self._ids.extend(token_ids)
        self._masks.extend(bytes(len(token_ids)) if mask is None else bytes(mask))
        assert len(self._masks) == len(self._ids), "a mask of another length than its ids"
        self._ends.append(len(self._ids))

    def extend(self, other: TokenStore) -> None:
        """Add all sequences of another store."""
        offset = len(self._ids)
        self._ids.extend(other._ids)
        self._masks.extend(other._masks)
        self._ends.extend(offset + end for end in other._ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Tensor:
        """Token ids of one sequence, (T,) int64."""
        start, stop = self._bounds(index)
        return torch.frombuffer(self._ids[start:stop], dtype=torch.int32).long()

    def mask(self, index: int) -> Tensor:
        """Mask of one sequence, (T,) bool."""
        start, stop = self._bounds(index)
        return torch.frombuffer(self._masks[start:stop], dtype=torch.uint8).bool()

    @property
    def lengths(self) -> Tensor:
        """Token count of every sequence, (len,) int64."""
        ends = torch.tensor(self._ends.tolist(), dtype=torch.int64)
        return torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64))

    def first_id_from(self, least: int) -> tuple[int, int] | None:
        """The first sequence with an id of at least `least`, and that id; None without one."""
        if not self._ids:
            return None
        ids = torch.frombuffer(self._ids, dtype=torch.int32)
        if int(ids.max()) < least:
            return None
        place = int((ids >= least).int().argmax())
        return bisect_right(self._ends, place), int(ids[place])

    def fingerprint(self) -> str:
        """SHA-256 over ids, masks and boundaries."""
        digest = hashlib.sha256(self._ids.tobytes())
        digest.update(self._masks)
        digest.update(self._ends.tobytes())
        return digest.hexdigest()

    def _bounds(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self._ends):
            raise IndexError(f"index {index} of {len(self._ends)} sequences")
        return (self._ends[index - 1] if index else 0), self._ends[index]


@dataclass
class TokenizedRows:
    """The examples of a data set, and what became of the rows that are none."""

    stores: list[TokenStore]  # one for each sequence of an example: two for a pair
    row_ids: list[int] = field(default_factory=list)  # row of each example in the data set
    extras: list[Json] = field(default_factory=list)  # what an example holds besides its tokens
    dropped: Counter[str] = field(default_factory=Counter)  # rows left out, by reason
    num_truncated: int = 0
    num_spelled: int = 0  # rows whose data spells special tokens

    def extend(self, other: TokenizedRows) -> None:
        """Add the examples of rows that follow."""
        for store, others in zip(self.stores, other.stores, strict=True):
            store.extend(others)
        self.row_ids += other.row_ids
        self.extras += other.extras
        self.dropped += other.dropped
        self.num_truncated += other.num_truncated
        self.num_spelled += other.num_spelled

    def fingerprint(self) -> str:
        """A hash of all examples."""
        digest = hashlib.sha256(json.dumps(self.extras).encode())
        for store in self.stores:
            digest.update(store.fingerprint().encode())
        return digest.hexdigest()
