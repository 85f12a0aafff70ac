"""Groups of samples one by one: prompts are submitted when somebody wants to, and each group is
handed out, scored, as soon as it is finished.

The synchronous step, dynamic sampling, asynchronous training and evaluation all drain one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from openrlhf.datasets.prompt_record import PromptRecord
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.rollout import Rollout

GroupKey = tuple[int, int]  # (episode, row) of the ledger


@dataclass(frozen=True)
class FinishedGroup:
    """What became of a prompt that was submitted."""

    key: GroupKey
    # Scored, sample by sample; an agent's episode may have several. They share a group id that no
    # other group of the stream has. Empty when the group failed.
    rollouts: list[Rollout] = field(default_factory=list)
    failure: str | None = None  # why its samples were dropped


class GroupStream(Protocol):
    """A running source of samples, driven from one thread.

    Every submitted prompt comes out of `finished` exactly once, unless an error ends the stream or
    it is closed. Groups come in the order in which they are finished, which depends on timing;
    what is in a group that has a seed does not, for a given engine.
    """

    def submit(self, key: GroupKey, prompt: PromptRecord, *, tag: str) -> None:
        """Start the samples of a prompt; does not wait for them. Sample ids are
        "<tag>/<row>/<k>", so a tag may not come twice with a row.
        """

    def finished(self, wait_s: float) -> list[FinishedGroup]:
        """Groups finished and scored since the last call; waits up to `wait_s` seconds for the
        first, not at all when nothing runs.

        Raises EngineError, RewardError or AgentError where one ends the run; then nothing more
        comes out of the stream.
        """

    @property
    def num_running(self) -> int:
        """Prompts submitted and not yet handed out."""

    @property
    def in_rounds(self) -> bool:
        """True where prompts that are submitted together end together, and others wait for them."""

    def describe(self) -> str:
        """Who works on what, in words, for whoever waits; may come from any thread."""

    def take_metrics(self) -> Metrics:
        """Metrics of generation, rewards and agents since the last call."""

    def close(self) -> None:
        """Abandon what runs and end the threads of the stream; its engines live on."""
