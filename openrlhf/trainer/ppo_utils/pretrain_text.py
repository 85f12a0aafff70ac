"""Pre-training text in the policy's updates, so that it does not forget how to write it: PPO-ptx of
InstructGPT (arXiv 2203.02155, section 3.5).

The controller draws as many rows of text as an optimizer step has samples, cuts them up for the
ranks and counts the tokens of the step, which the loss is divided by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrlhf.algorithms.balancing import balanced_partitions
from openrlhf.datasets.sampler import EpochSampler, PromptCursor
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.utils.packing import PackedBatch

if TYPE_CHECKING:
    from openrlhf.trainer.ppo_utils.replay_buffer import UpdateStep

ENDLESS = 2**62  # passes over the text


@dataclass(frozen=True)
class TextShare:
    """The text of one optimizer step as one rank sees it."""

    token_ids: tuple[Tensor, ...]  # (T_i,) int64 each; may be none
    num_tokens: int  # targets of the whole optimizer step, all ranks


def pack_texts(token_ids: Sequence[Tensor]) -> PackedBatch:
    """Return texts as one packed row; every token but the first of each is a target."""
    return PackedBatch.from_sequences(token_ids, [torch.arange(len(ids)) > 0 for ids in token_ids])


class TextMixer:
    """Goes through the text over and over, in an order that seed and pass decide."""

    def __init__(self, texts: SFTDataset, *, seed: int) -> None:
        self.texts = texts
        self.cursor = PromptCursor(EpochSampler(len(texts), seed), num_episodes=ENDLESS)

    def mix(self, shares: Sequence[Sequence[UpdateStep]]) -> list[list[UpdateStep]]:
        """Return the same optimizer steps, [rank][step], each with text beside its samples."""
        mixed: list[list[UpdateStep]] = [[] for _ in shares]
        for steps in zip(*shares, strict=True):
            texts = self._draw(steps[0].num_samples)
            parts = balanced_partitions([len(text) for text in texts], len(steps))
            num_tokens = sum(len(text) - 1 for text in texts)
            for rank, (step, part) in enumerate(zip(steps, parts, strict=True)):
                share = TextShare(tuple(texts[index] for index in part), num_tokens)
                mixed[rank].append(replace(step, texts=share))
        return mixed

    def _draw(self, num_rows: int) -> list[Tensor]:
        rows: list[int] = []
        while len(rows) < num_rows:
            rows += self.cursor.draw(num_rows - len(rows))
        return [self.texts[row].token_ids for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the text, as JSON."""
        return {"fingerprint": self.texts.fingerprint, "cursor": self.cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from where `state_dict` was taken; other text is read from its beginning."""
        if state is not None and state["fingerprint"] == self.texts.fingerprint:
            self.cursor.load_state_dict(state["cursor"])
