"""A process reward model: cross-entropy of each step's label at the step's own marker.

A mean over the markers of the whole step; markers are what is counted, however texts are split over
micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from openrlhf.config.supervised import PRMConfig
from openrlhf.datasets.process_reward_dataset import (
    ProcessExample,
    ProcessRewardDataset,
    single_token_id,
)
from openrlhf.models.process_reward import MarkedBatch, StepJudge
from openrlhf.trainer.base_trainer import BaseTrainer, SupervisedRun, load_actor
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch


class PRMTrainer(BaseTrainer[ProcessExample, MarkedBatch]):
    """The loss at step markers; labels are among `reward_tokens`, or any token when there are
    none.
    """

    name = "prm"
    sample_set = ProcessRewardDataset

    def __init__(self, run: SupervisedRun[PRMConfig]) -> None:
        super().__init__(run)
        texts, tokenizer = run.config.model.reward_tokens or (), run.inputs.tokenizer
        ids = [single_token_id(tokenizer, text, flag="--reward_tokens") for text in texts]
        self.reward_tokens = torch.tensor(ids) if ids else None
        self.places = {token_id: place for place, token_id in enumerate(ids)}

    @classmethod
    def load_model(cls, config: PRMConfig, model_path: str) -> StepJudge:
        model = load_actor(config, model_path).model
        return StepJudge(model, with_aux_loss=config.model.aux_loss_coef > 0)

    def counts(self, samples: Sequence[ProcessExample]) -> dict[str, float]:
        """Return the number of markers."""
        return {"num_markers": float(sum(len(sample.labels) for sample in samples))}

    def collate(self, samples: Sequence[ProcessExample]) -> MarkedBatch:
        token_ids = [sample.token_ids for sample in samples]
        no_targets = [torch.zeros(len(ids), dtype=torch.bool) for ids in token_ids]
        marker_mask = torch.cat([sample.marker_mask for sample in samples])
        return MarkedBatch(
            PackedBatch.from_sequences(token_ids, no_targets),
            marker_mask.nonzero().squeeze(-1),
            torch.cat([self._labels(sample) for sample in samples]),
            self.reward_tokens,
        )

    def compute_loss(
        self, batch: MarkedBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Return the sum over markers / markers of the step, plus the router loss of experts."""
        terms = self.engine(batch)
        num_markers, total = len(terms.losses), denominators["num_markers"]
        loss_sum = terms.losses.sum()
        metrics = Metrics()
        metrics.add("prm_loss", loss_sum.item() / num_markers, weight=num_markers)
        metrics.add("acc", terms.is_correct.float().mean().item(), weight=num_markers)
        loss_sum = self.add_router_loss(loss_sum, terms.aux_loss, batch.num_markers, metrics)
        metrics.add("loss", loss_sum.item() / num_markers, weight=num_markers)
        return loss_sum / total, metrics

    def _labels(self, sample: ProcessExample) -> Tensor:
        """Return labels as the model takes them; with two reward tokens all are shares of the
        first, so that rows of either kind fit in one batch.
        """
        if sample.is_soft or not self.places:
            return sample.labels
        places = torch.tensor([self.places[int(label)] for label in sample.labels])
        return 1.0 - places.float() if len(self.places) == 2 else places
