"""The ledger: every prompt that was drawn ends as trained, filtered or failed, or is still pending.

`check` asserts the balance after every step, so that a sample cannot vanish between generation and
the optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ledger:
    """Outcome of every drawn prompt, keyed by (episode, row)."""

    num_drawn: int = 0
    pending: set[tuple[int, int]] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)

    def draw(self, keys: Iterable[tuple[int, int]]) -> None:
        """Note prompts that were handed to the engines."""
        for key in keys:
            assert key not in self.pending, f"prompt {key} was drawn twice"
            self.pending.add(key)
            self.num_drawn += 1

    def settle(self, keys: Iterable[tuple[int, int]], outcome: str) -> None:
        """Note what became of prompts: "trained", "filtered:<why>" or "failed:<why>"."""
        for key in keys:
            assert key in self.pending, f"prompt {key} has no open entry for {outcome}"
            self.pending.remove(key)
            self.outcomes[outcome] += 1

    def check(self) -> None:
        """Assert drawn == trained + filtered + failed + pending."""
        settled = sum(self.outcomes.values())
        assert self.num_drawn == settled + len(self.pending), (
            f"ledger out of balance: drawn {self.num_drawn}, settled {dict(self.outcomes)}, "
            f"pending {len(self.pending)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers and lists, for JSON."""
        pending = [list(key) for key in sorted(self.pending)]
        return {
            "num_drawn": self.num_drawn,
            "pending": pending,
            "outcomes": dict(self.outcomes),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.num_drawn = state["num_drawn"]
        self.pending = {(episode, row) for episode, row in state["pending"]}
        self.outcomes = Counter(state["outcomes"])
        self.check()
