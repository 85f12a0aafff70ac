"""In which order rows are seen: a pure function of seed and epoch, whatever the number of ranks or
workers.

The cursor is the only state of a run's way through its data; it is two numbers and goes into
checkpoints as JSON.
"""

from functools import lru_cache

import torch
from torch import Tensor

_EPOCH_STRIDE = 1_000_003  # a prime, so that (seed, epoch) pairs of one run never share a generator


@lru_cache(maxsize=2)
def epoch_order(num_rows: int, seed: int, epoch: int) -> Tensor:
    """Return the row indices of one epoch, (num_rows,) int64, each exactly once."""
    generator = torch.Generator().manual_seed(seed + _EPOCH_STRIDE * epoch)
    return torch.randperm(num_rows, generator=generator)


class PromptCursor:
    """A run's way through its prompts: `num_episodes` passes, a draw never spans two of them."""

    def __init__(self, num_rows: int, seed: int, *, num_episodes: int) -> None:
        self.num_rows, self.seed, self.num_episodes = num_rows, seed, num_episodes
        self.episode = 0
        self.position = 0  # rows of this episode already drawn

    def order(self, episode: int) -> Tensor:
        """Return the row indices of an episode as they are drawn."""
        return epoch_order(self.num_rows, self.seed, episode)

    @property
    def is_exhausted(self) -> bool:
        """Return True once every episode has been drawn to its end."""
        return self.episode >= self.num_episodes or self.num_rows == 0

    def draw(self, num_rows: int) -> list[int]:
        """Return the next row indices: at most `num_rows`, fewer at an episode's end, none when all
        is drawn.
        """
        if self.is_exhausted:
            return []
        drawn = self.order(self.episode)[self.position : self.position + num_rows]
        self.position += len(drawn)
        if self.position >= self.num_rows:
            self.episode, self.position = self.episode + 1, 0
        return drawn.tolist()

    def state_dict(self) -> dict[str, int]:
        """Return the position that a checkpoint keeps, as plain numbers."""
        return {"episode": self.episode, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a checkpoint stood, with the rows and the seed of then."""
        self.episode, self.position = state["episode"], state["position"]
