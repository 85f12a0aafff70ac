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
from openrlhf.models.actor import (
    enable_gradient_checkpointing,
    hidden_states,
    model_states,
    unwrap_peft,
)
from openrlhf.models.loading import LoadOptions, load_sequence_model
from openrlhf.models.router_loss import experts_per_token, refuse_reentrant
from openrlhf.utils.packing import PackedBatch


@dataclass(frozen=True)
class RewardScale:
    """Mean and standard deviation of a reward model's scores, kept in its config."""

    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(cls, config: PretrainedConfig) -> RewardScale:
        """Read `mean` and `std`; missing or unusable ones are a ConfigError."""
        fields = config.to_dict()
        mean, std = fields.get("mean"), fields.get("std")
        if mean is None or std is None:
            raise ConfigError(
                "--normalize_reward: the reward model's config has no mean and std. "
                "Train it with train_rm, add both to its config.json, or drop the flag."
            )
        if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise ConfigError(
                f"--normalize_reward: mean {mean} and std {std} in the reward model's config are "
                "unusable: both must be finite and std above 0."
            )
        return cls(float(mean), float(std))

    def apply(self, scores: Tensor) -> Tensor:
        """(x - mean) / std."""
        return (scores - self.mean) / self.std


class ScalarHeadModel(nn.Module):
    """A sequence classifier with one label, read at chosen positions of a packed row."""

    def __init__(self, model: nn.Module, *, normalize_reward: bool = False) -> None:
        super().__init__()
        self.model = model
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

    def scores_at(self, batch: PackedBatch, positions: Tensor) -> Tensor:
        """Scalar of each of these row positions, fp32."""
        return self.scores_of(hidden_states(self.model, batch).index_select(0, positions))

    def scores_of(self, hidden: Tensor) -> Tensor:
        """Scalar of each of these hidden states, fp32."""
        head = unwrap_peft(self.model).get_submodule(self.head_name)
        scores = head(hidden).squeeze(-1).float()
        return scores if self.scale is None else self.scale.apply(scores)

    def gradient_checkpointing_enable(self, use_reentrant: bool = False) -> None:
        """Trade compute for activation memory."""
        enable_gradient_checkpointing(self.model, use_reentrant=use_reentrant)


class CriticModel(ScalarHeadModel):
    """V at the position before each target token."""

    def forward(self, batch: PackedBatch) -> Tensor:
        """Values -> (N,) fp32."""
        return self.scores_at(batch, batch.predict_index)


class RewardModel(ScalarHeadModel):
    """One reward for each sequence, read at its last token."""

    def forward(self, batch: PackedBatch) -> Tensor:
        """Rewards -> (B,) fp32."""
        return self.scores_at(batch, last_tokens(batch))


class RewardTerms(NamedTuple):
    """What a reward model in training says about a batch."""

    scores: Tensor  # (B,) fp32
    aux_loss: Tensor | None = None  # (B,) router loss of each sequence, of a mixture of experts


class RewardLearner(RewardModel):
    """A reward model in training, with the router losses of a mixture of experts when asked."""

    def __init__(self, model: nn.Module, *, with_aux_loss: bool = False) -> None:
        super().__init__(model)
        self.top_k = experts_per_token(unwrap_peft(model)) if with_aux_loss else None

    def forward(self, batch: PackedBatch) -> RewardTerms:
        """Rewards and the router losses."""
        hidden_TH, aux_loss = model_states(self.model, batch, top_k=self.top_k)
        return RewardTerms(self.scores_of(hidden_TH[last_tokens(batch)]), aux_loss)

    def gradient_checkpointing_enable(self, use_reentrant: bool = False) -> None:
        """Trade compute for activation memory."""
        if self.top_k is not None:
            refuse_reentrant(use_reentrant=use_reentrant)
        super().gradient_checkpointing_enable(use_reentrant)


def last_tokens(batch: PackedBatch) -> Tensor:
    """Row position of the last token of every sequence, (B,) int64."""
    return batch.cu_seqlens[1:].long() - 1
