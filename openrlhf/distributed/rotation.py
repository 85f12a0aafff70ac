"""Which checkpoints go when there are too many: the oldest, never the newest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """What is kept of one step; a resumable state, an exported model, or both."""

    step: int
    states: Path | None
    export: Path | None
    num_bytes: int

    @property
    def paths(self) -> list[Path]:
        """The folders there are."""
        return [path for path in (self.states, self.export) if path is not None]


def superfluous(entries: Sequence[Entry], *, max_num: int, max_bytes: float) -> list[Entry]:
    """Entries, given by rising step, that do not fit beside the newer ones; oldest first.

    States and exports count alike. The newest stays even where it alone is over the budget.
    """
    num_kept, kept_bytes = 0, 0
    for entry in reversed(entries):
        kept_bytes += entry.num_bytes
        if num_kept > 0 and (num_kept == max_num or kept_bytes > max_bytes):
            break
        num_kept += 1
    return list(entries[: len(entries) - num_kept])
