"""Scalar heads: the critic's value at tokens, the reward model's score of whole sequences.

Both hold an AutoModelForSequenceClassification with one label, so what they save loads there, head
included.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PretrainedConfig
from typing_extensions import Self, Unpack

from openrlhf.errors import ConfigError
from openrlhf.models.actor import PackedModel, unwrap_peft
from openrlhf.models.adapters import SCALE_FIELDS
from openrlhf.models.loading import LoadOptions, load_sequence_model
from openrlhf.utils.packing import PackedBatch


@dataclass(frozen=True)
class RewardScale:
    """Mean and standard deviation of a reward model's scores, kept in its config."""

    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(cls, config: PretrainedConfig) -> RewardScale:
        """Read `mean` and `std`; missing or unusable ones are a ConfigError."""
        mean, std = (config.to_dict().get(name) for name in SCALE_FIELDS)
        if None in (mean, std) or not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise ConfigError(
                f"--normalize_reward: mean {mean} and std {std} in the reward model's config are "
                "unusable. Train it with train_rm, write both to its config.json (std above 0), or "
                "leave the flag out."
            )
        return cls(float(mean), float(std))

    def apply(self, scores: Tensor) -> Tensor:
        """Return (x - mean) / std."""
        return (scores - self.mean) / self.std


class RewardTerms(NamedTuple):
    """What a scalar head says about a batch."""

    scores: Tensor  # (N,) fp32; of a reward model one for each sequence
    aux_loss: Tensor | None = None  # (B,) router loss of each sequence, of a mixture of experts


class ScalarHeadModel(PackedModel):
    """A sequence classifier with one label, read at chosen positions of a packed row."""

    def __init__(
        self, model: nn.Module, *, normalize_reward: bool = False, with_aux_loss: bool = False
    ) -> None:
        super().__init__(model, with_aux_loss=with_aux_loss)
        config = unwrap_peft(model).config
        self.head_name = config.value_head_prefix
        self.scale = RewardScale.of(config) if normalize_reward else None

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        normalize_reward: bool = False,
        value_head_prefix: str | None = None,
        allow_fresh_head: bool = True,
        **options: Unpack[LoadOptions],
    ) -> Self:
        """Load from a folder or hub id; see `load_sequence_model` for the head."""
        model = load_sequence_model(
            path, value_head_prefix=value_head_prefix, allow_fresh_head=allow_fresh_head, **options
        )
        return cls(model, normalize_reward=normalize_reward)

    def scores_at(self, batch: PackedBatch, positions_N: Tensor) -> RewardTerms:
        """Return the scalar of each of these row positions, (N,) fp32."""
        states = self.states_at(batch, positions_N)
        head = unwrap_peft(self.model).get_submodule(self.head_name)
        scores = states.spread(head(states.hidden_nH).squeeze(-1).float())
        scores = scores if self.scale is None else self.scale.apply(scores)
        return RewardTerms(scores, states.aux_loss)


class CriticModel(ScalarHeadModel):
    """V at the position before each target token."""

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return values -> (N,) fp32."""
        return self.scores_at(batch, batch.predict_index).scores


class RewardModel(ScalarHeadModel):
    """One reward for each sequence, read at its last token."""

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return rewards -> (B,) fp32."""
        return self.scores_at(batch, last_tokens(batch)).scores


class RewardLearner(RewardModel):
    """A reward model in training, with the router losses of a mixture of experts when asked."""

    def forward(self, batch: PackedBatch) -> RewardTerms:
        """Return rewards and the router losses."""
        return self.scores_at(batch, last_tokens(batch))


def last_tokens(batch: PackedBatch) -> Tensor:
    """Return the row position of the last token of every sequence, (B,) int64."""
    return batch.cu_seqlens[1:].long() - 1
