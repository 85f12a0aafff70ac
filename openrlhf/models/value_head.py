"""Scalar heads: the critic's value at tokens, the reward model's score of whole sequences.

Both hold an AutoModelForSequenceClassification with one label, so what they save loads there, head
included.
"""

import math
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PretrainedConfig

from openrlhf.errors import ConfigError
from openrlhf.models.actor import PackedModel
from openrlhf.models.adapters import SCALE_FIELDS
from openrlhf.utils.packing import PackedBatch, base_model_of


def reward_mean_and_std(config: PretrainedConfig) -> tuple[float, float]:
    """Return mean and standard deviation of a reward model's scores; missing or unusable ones are a
    ConfigError.
    """
    mean, std = (config.to_dict().get(name) for name in SCALE_FIELDS)
    if None in (mean, std) or not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ConfigError(
            f"--normalize_reward: mean {mean} and std {std} in the reward model's config are "
            "unusable. Train it with openrlhf rm, write both to its config.json (std above 0), or "
            "leave the flag out."
        )
    return float(mean), float(std)


class RewardTerms(NamedTuple):
    """Output of a scalar head for a batch.

    Example: `RewardTerms(tensor([1.3, -0.4]))` of a reward model for two sequences.
    """

    scores: Tensor  # (N,) fp32; of a reward model one for each sequence
    aux_loss: Tensor | None = None  # (B,) router loss of each sequence, of a mixture of experts


class ScalarHead(nn.Linear):
    """A head that computes in fp32: in the weights' 16 bits its output would lie on a grid, on
    which close scores are equal.
    """

    def forward(self, hidden_nH: Tensor) -> Tensor:
        """Return the scalars, (n, 1) fp32."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden_nH.float(), self.weight.float(), bias)


class RewardModel(PackedModel):
    """A sequence classifier with one label, read at chosen positions of a packed row: one reward
    for each sequence, at its last token.
    """

    def __init__(
        self, model: nn.Module, *, normalize_reward: bool = False, with_aux_loss: bool = False
    ) -> None:
        super().__init__(model, with_aux_loss=with_aux_loss)
        config = base_model_of(model).config
        self.head_name = config.value_head_prefix
        for module in base_model_of(model).get_submodule(self.head_name).modules():
            if type(module) is nn.Linear:  # an adapter has two of them, the old and its own
                module.__class__ = ScalarHead
        self.scale = reward_mean_and_std(config) if normalize_reward else (0.0, 1.0)

    def scores_at(self, batch: PackedBatch, positions_N: Tensor) -> RewardTerms:
        """Return the scalar of each of these row positions, (N,) fp32."""
        states = self.states_at(batch, positions_N)
        head = base_model_of(self.model).get_submodule(self.head_name)
        scores = states.spread(head(states.hidden_nH).squeeze(-1).float())
        mean, std = self.scale
        return RewardTerms((scores - mean) / std, states.aux_loss)

    def forward(self, batch: PackedBatch) -> RewardTerms:
        """Return rewards, (B,), and router losses when asked for."""
        return self.scores_at(batch, batch.cu_seqlens[1:].long() - 1)


class CriticModel(RewardModel):
    """V at the position before each target token."""

    def forward(self, batch: PackedBatch) -> Tensor:  # type: ignore[override]
        """Return values -> (N,) fp32."""
        return self.scores_at(batch, batch.predict_index).scores
