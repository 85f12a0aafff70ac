"""Reward models: a scalar head at the last token of each answer, trained on pairs.

What is exported carries mean and standard deviation of its scores, and is read back: a folder that
does not give the scores the trainer saw is an error, not a model.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.algorithms.preference_loss import pairwise_losses
from openrlhf.config.supervised import RMConfig
from openrlhf.datasets.reward_dataset import PreferenceDataset, PreferencePair
from openrlhf.distributed.collectives import on_main
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.errors import CheckpointError
from openrlhf.models.adapters import add_lora, is_adapted, load_adapter
from openrlhf.models.loading import load_sequence_model
from openrlhf.models.value_head import RewardModel, RewardTerms
from openrlhf.trainer.base_trainer import BaseTrainer, Inputs, SampleSet
from openrlhf.trainer.preference import (
    PreferenceBatch,
    by_side,
    half_pairs,
    pack_pairs,
    pair_metrics,
)
from openrlhf.utils.console import warn
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import base_model_of

NUM_CHECKED_PAIRS = 4  # scored again from the exported files
# Of the largest. In 16 bits, a model that is shared among ranks computes with other kernels.
MAX_SCORE_ERROR = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 0.1}


class RMTrainer(BaseTrainer[PreferencePair, PreferenceBatch]):
    """The loss on the difference of the two scores of a pair."""

    name = "rm"
    data_set = PreferenceDataset
    scores = True
    judged_by = ("acc", "loss")

    def __init__(self, config: RMConfig, inputs: Inputs, strategy: DeepSpeedStrategy) -> None:
        super().__init__(config, inputs, strategy)
        self.loss_kind = config.model.loss_type
        self.with_margin = config.model.margin_loss_enable
        self.scale = (0.0, 1.0)  # mean and standard deviation of scores, of the step below
        self.scaled_step = -1

    @classmethod
    def row_format(cls, config: RMConfig) -> dict[str, Any]:
        return {"with_margin": config.model.margin_loss_enable}

    @classmethod
    def load_model(cls, config: RMConfig, model_path: str) -> RewardModel:
        """Load the backbone with a fresh head, or a reward model to go on with."""
        model = load_sequence_model(model_path, config)
        with_aux_loss = config.model.aux_loss_coef > 0
        return RewardModel(add_lora(model, config.ds.lora), with_aux_loss=with_aux_loss)

    def counts(self, batch: PreferenceBatch) -> dict[str, float]:
        """Return the number of pairs."""
        return {"num_pairs": float(len(batch))}

    def collate(self, samples: Sequence[PreferencePair]) -> PreferenceBatch:
        return pack_pairs(samples)

    def compute_loss(
        self, batch: PreferenceBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Return the pairs' losses / pairs of the step, plus the router loss of experts."""
        terms: RewardTerms = self.engine(batch.packed)
        chosen_B, rejected_B = by_side(terms.scores)
        margin_B = batch.labels if self.with_margin else None
        losses_B = pairwise_losses(chosen_B, rejected_B, kind=self.loss_kind, margin_B=margin_B)
        metrics, halves_S = pair_metrics(losses_B, chosen_B, rejected_B), half_pairs(losses_B)
        loss_sum = self.add_router_loss(losses_B.sum(), terms.aux_loss, halves_S, metrics)
        return loss_sum / denominators["num_pairs"], metrics

    @torch.no_grad()
    def reward_mean_and_std(self, samples: SampleSet[PreferencePair]) -> tuple[float, float]:
        """Return mean and standard deviation of the scores of both sides of all pairs, over all
        ranks.
        """
        self.engine.module.eval()
        sums = {"total": 0.0, "squares": 0.0}
        lengths = samples.lengths.tolist()
        for rows, batch in self.own_batches(samples, range(len(lengths)), lengths):
            scores = self._scores(batch).double()
            if rows:
                sums["total"] += scores.sum().item()
                sums["squares"] += scores.square().sum().item()
        sums = self.strategy.all_reduce_sum(sums)
        mean = sums["total"] / (2 * len(samples))
        return mean, math.sqrt(max(sums["squares"] / (2 * len(samples)) - mean**2, 1e-12))

    def export(self, path: Path) -> None:
        """Write the model with its scale in its config; read back and compared before it counts."""
        samples = self.inputs.eval_samples or self.inputs.samples
        if self.scaled_step != self.global_step:  # a checkpoint's export may be the last
            self.scale = self.reward_mean_and_std(samples)
            self.scaled_step = self.global_step
        mean, std = self.scale
        base_model_of(self.model.model).config.update({"mean": mean, "std": std})
        pairs = [samples[index] for index in range(min(NUM_CHECKED_PAIRS, len(samples)))]
        batch = self.collate(pairs)
        with torch.no_grad():
            expected = self._scores(batch).cpu()
        super().export(path)
        # Putting an adapter on draws random numbers, which are those of a run that goes on.
        with torch.random.fork_rng():
            on_main(lambda: self.check_export(path, batch, expected))

    def _scores(self, batch: PreferenceBatch) -> Tensor:
        """Return the score of each sequence, (2B,)."""
        return self.engine(batch.packed.to(self.engine.device)).scores

    def check_export(self, path: Path, batch: PreferenceBatch, expected: Tensor) -> None:
        """Raise CheckpointError unless the model at `path` gives pairs the `expected` scores."""
        hf_model, device = self.model.model, self.engine.device
        dtype = next(base_model_of(hf_model).parameters()).dtype
        if is_adapted(hf_model):
            base = load_sequence_model(self.inputs.model_path, self.config)
            model = load_adapter(base, path)
        else:
            model = load_sequence_model(path, self.config, allow_fresh_head=False)
        try:
            with torch.no_grad():
                model = model if self.config.ds.load_in_4bit else model.to(device)
                found = RewardModel(model.eval())(batch.packed.to(device)).scores.cpu()
        except torch.OutOfMemoryError:
            warn(f"{path} was not compared with the trained model: {device} has no room for both.")
            return
        error = (found - expected).abs().max().item() / max(expected.abs().max().item(), 1e-6)
        if not error <= MAX_SCORE_ERROR[dtype]:
            raise CheckpointError(
                f"The reward model saved at {path} gives other scores than the one that was "
                f"trained (off by {error:.1e}). Do not use it; this is a bug."
            )
