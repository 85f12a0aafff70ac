"""A supervised method as a new developer writes one: its config class and its recipe."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from openrlhf.config.base import option
from openrlhf.config.supervised import SFTConfig, SFTModelConfig
from openrlhf.trainer.base_trainer import add_means
from openrlhf.trainer.sft_trainer import SFTTrainer
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch


class FocalModelConfig(SFTModelConfig):
    """`model.*` of focal."""

    focal_power: float = option(2.0, "Power of 1 - p.", ge=0)


class FocalConfig(SFTConfig):
    """Fine-tuning that looks at unlikely tokens more."""

    essentials: ClassVar = (*SFTConfig.essentials, "model.focal_power")
    model: FocalModelConfig = FocalModelConfig()


class FocalTrainer(SFTTrainer):
    """The mean of -(1 - p)^power log p over the tokens a row marks."""

    name = "focal"
    judged_by = ("focal_loss",)

    def compute_loss(
        self, batch: PackedBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        logprobs_N, metrics = self.engine(batch).logprobs, Metrics()
        losses_N = -((1 - logprobs_N.exp()) ** self.config.model.focal_power) * logprobs_N
        add_means(metrics, {"focal_loss": losses_N, "gpt_loss": -logprobs_N})
        return losses_N.sum() / denominators["num_tokens"], metrics
