"""Supervised fine-tuning and continued pre-training: token mean of -log p over the whole step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from openrlhf.algorithms.language_loss import sft_loss
from openrlhf.config.base import is_given
from openrlhf.datasets.sft_dataset import SFTDataset, SFTExample
from openrlhf.trainer.base_trainer import BaseTrainer
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch


class SFTTrainer(BaseTrainer[SFTExample, PackedBatch]):
    """The language-model loss on the tokens a row marks."""

    name = "sft"
    data_set = SFTDataset
    reads_pictures = True
    judged_by = ("gpt_loss", "acc")

    @classmethod
    def row_format(cls, config: Any) -> dict[str, Any]:
        is_typed = is_given(config, "model.pretrain_mode_enable")  # else the columns tell
        return {"pretrain_mode": config.model.pretrain_mode_enable if is_typed else None}

    def counts(self, batch: PackedBatch) -> dict[str, float]:
        """Return the number of tokens that are learned."""
        return {"num_tokens": float(batch.target_mask.sum())}

    def collate(self, samples: Sequence[SFTExample]) -> PackedBatch:
        packed = PackedBatch.from_sequences(
            [sample.token_ids for sample in samples], [sample.loss_mask for sample in samples]
        )
        pictures = [sample.images for sample in samples]
        return packed.with_pictures(pictures, self.inputs.image_processor)

    def compute_loss(
        self, batch: PackedBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Return -sum log p / tokens of the step, plus the router losses of a mixture of experts,
        which count as many times as their sequence has targets.
        """
        stats = self.engine(batch)
        num_tokens, metrics = len(stats.logprobs), Metrics()
        loss_sum = sft_loss(stats.logprobs, num_tokens_global=1)
        metrics.add("gpt_loss", loss_sum.double() / num_tokens, weight=num_tokens)
        metrics.add("acc", stats.is_top.float().mean().item(), weight=num_tokens)
        loss_sum = self.add_router_loss(loss_sum, stats.aux_loss, batch.num_targets, metrics)
        return loss_sum / denominators["num_tokens"], metrics

    def summarise(self, values: dict[str, float]) -> dict[str, float]:
        """Return the perplexity; infinite where the exponential of the loss overflows."""
        loss = values["gpt_loss"]
        return {"ppl": math.exp(loss) if loss < 700 else math.inf}
