"""Reward models: a scalar head at the last token of each answer, trained on pairs.

What is exported carries mean and standard deviation of its scores, and is read back: a folder that
does not give the scores the trainer saw is an error, not a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from typing_extensions import Unpack

from openrlhf.algorithms.reward_loss import pairwise_losses
from openrlhf.config.preference import RMConfig
from openrlhf.datasets.command_data import rm_format
from openrlhf.datasets.reward_dataset import PreferenceDataset, PreferencePair
from openrlhf.distributed import collectives
from openrlhf.distributed.export import export_hf
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.errors import CheckpointError
from openrlhf.models.actor import unwrap_peft
from openrlhf.models.adapter_files import load_adapter
from openrlhf.models.adapters import add_lora, is_adapted
from openrlhf.models.loading import load_sequence_model
from openrlhf.models.value_head import RewardLearner, RewardModel, RewardTerms
from openrlhf.trainer.base_trainer import BaseTrainer, LoopParts, SampleSet
from openrlhf.trainer.pair_batch import PairBatch, by_side, empty_pair
from openrlhf.trainer.supervised_run import (
    Progress,
    Recipe,
    SupervisedRun,
    load_options,
    run_supervised,
)
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.tokenizer import Tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

NUM_CHECKED_PAIRS = 4  # scored again from the exported files
MAX_SCORE_ERROR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}  # of the largest


class RMTrainer(BaseTrainer[PreferencePair, PairBatch]):
    """The loss on the difference of the two scores of a pair."""

    def __init__(
        self,
        strategy: DeepSpeedStrategy,
        engine: TrainEngine,
        *,
        loss_kind: str = "sigmoid",
        with_margin: bool = False,
        aux_loss_coef: float = 0.0,
        **loop: Unpack[LoopParts],
    ) -> None:
        super().__init__(strategy, engine, **loop)
        self.loss_kind = loss_kind
        self.with_margin = with_margin
        self.aux_loss_coef = aux_loss_coef

    def counts(self, samples: Sequence[PreferencePair]) -> dict[str, float]:
        """Pairs."""
        return {"num_pairs": float(len(samples))}

    def collate(self, samples: Sequence[PreferencePair]) -> PairBatch:
        """One row of both sides of all pairs."""
        return PairBatch.of(samples)

    def empty_sample(self) -> PreferencePair:
        """Two answers of one token."""
        return empty_pair()

    def compute_loss(
        self, batch: PairBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Sum of the pairs' losses / pairs of the step, plus the router loss of experts."""
        terms = self._terms(batch)
        chosen_B, rejected_B = by_side(terms.scores)
        losses_B = pairwise_losses(
            chosen_B,
            rejected_B,
            kind=self.loss_kind,
            margin_B=batch.margins if self.with_margin else None,
        )
        metrics = Metrics()
        means = {
            "loss": losses_B,
            "acc": chosen_B > rejected_B,
            "chosen_reward": chosen_B,
            "reject_reward": rejected_B,
        }
        for name, values_B in means.items():
            metrics.add(name, values_B.float().mean().item(), weight=len(losses_B))
        loss_sum = losses_B.sum()
        if terms.aux_loss is not None:
            aux_loss = terms.aux_loss.mean()  # a pair's is that of its two sides
            metrics.add("aux_loss", aux_loss.item(), weight=len(losses_B))
            loss_sum = loss_sum + self.aux_loss_coef * aux_loss * len(losses_B)
        return loss_sum / denominators["num_pairs"], metrics

    def _terms(self, batch: PairBatch) -> RewardTerms:
        return cast(RewardTerms, self.engine(batch.packed))

    @torch.no_grad()
    def reward_scale(self, samples: SampleSet[PreferencePair]) -> tuple[float, float]:
        """Mean and standard deviation of the scores of both sides of all pairs, over all ranks."""
        total = squares = 0.0
        for scores in self._scores(samples):
            total += scores.double().sum().item()
            squares += scores.double().square().sum().item()
        sums = self.strategy.all_reduce_sum({"total": total, "squares": squares})
        mean = sums["total"] / (2 * len(samples))
        return mean, math.sqrt(max(sums["squares"] / (2 * len(samples)) - mean**2, 1e-12))

    def _scores(self, samples: SampleSet[PreferencePair]) -> Iterator[Tensor]:
        """Scores of this rank's share, a micro-batch at a time."""
        self.engine.eval()
        share = self.share_of(range(len(samples)), samples.lengths.tolist())
        for index in range(share.num_micro_batches):
            rows = share.micro_batches[index] if index < len(share.micro_batches) else []
            pairs = [samples[row] for row in rows] or [self.empty_sample()]
            terms = self._terms(self.collate(pairs).to(self.engine.device))
            if rows:
                yield terms.scores


class RMRecipe(Recipe[RMConfig]):
    """train_rm."""

    name = "rm"
    scale = (0.0, 1.0)  # mean and standard deviation of scores, of the step below
    scaled_step = -1

    def make_samples(
        self, config: RMConfig, rows: Dataset, tokenizer: Tokenizer, progress: Progress | None
    ) -> PreferenceDataset:
        """Pairs, with margins when they are asked for."""
        return PreferenceDataset(rows, tokenizer, rm_format(config), progress=progress)

    def load_model(self, config: RMConfig, model_path: str) -> RewardLearner:
        """The backbone with a fresh head, or a reward model to go on with."""
        model = load_sequence_model(
            model_path, value_head_prefix=config.ds.value_head_prefix, **load_options(config)
        )
        reward_model = RewardLearner(
            add_lora(model, config.ds.lora), with_aux_loss=config.model.aux_loss_coef > 0
        )
        if config.model.gradient_checkpointing_enable:
            reward_model.gradient_checkpointing_enable(
                config.model.gradient_checkpointing_reentrant
            )
        return reward_model

    def make_trainer(self, run: SupervisedRun[RMConfig]) -> RMTrainer:
        """The loss on pairs."""
        model = run.config.model
        self.trainer = RMTrainer(
            run.strategy,
            run.engine,
            loss_kind=model.loss_type,
            with_margin=model.margin_loss_enable,
            aux_loss_coef=model.aux_loss_coef,
            **run.loop,
        )
        return self.trainer

    def export(self, run: SupervisedRun[RMConfig], path: Path) -> None:
        """The model with its scale in its config; read back and compared before it counts."""
        samples = run.inputs.eval_samples or run.inputs.samples
        if self.scaled_step != self.trainer.global_step:  # a checkpoint's export may be the last
            self.scale = self.trainer.reward_scale(samples)
            self.scaled_step = self.trainer.global_step
        mean, std = self.scale
        hf_model = run.model.model
        unwrap_peft(hf_model).config.update({"mean": mean, "std": std})
        pairs = [samples[index] for index in range(min(NUM_CHECKED_PAIRS, len(samples)))]
        batch = self.trainer.collate(pairs).to(run.engine.device)
        with torch.no_grad():
            expected = run.engine(batch.packed).scores.cpu()
        export_hf(run.engine, hf_model, run.inputs.tokenizer, path)
        problems: list[str] = []
        if run.strategy.is_main:
            # Putting an adapter on draws random numbers, which are those of a run that goes on.
            with collectives.noting(problems), torch.random.fork_rng():
                check_export(run, path, batch, expected)
        if problems := collectives.gather_problems(problems):
            raise CheckpointError("; ".join(problems))


def check_export(
    run: SupervisedRun[RMConfig], path: Path, batch: PairBatch, expected: Tensor
) -> None:
    """Raise CheckpointError unless the model at `path` gives these pairs the `expected` scores."""
    hf_model = run.model.model
    options = load_options(run.config)
    dtype = next(unwrap_peft(hf_model).parameters()).dtype
    options["dtype"] = dtype
    options["use_liger_kernel"] = False
    if is_adapted(hf_model):
        head = unwrap_peft(hf_model).config.value_head_prefix
        base = load_sequence_model(run.inputs.model_path, value_head_prefix=head, **options)
        model = load_adapter(base, path)
    else:
        model = load_sequence_model(path, allow_fresh_head=False, **options)
    with torch.no_grad():
        model = model if options.get("load_in_4bit") else model.to(run.engine.device)
        found = RewardModel(model.eval())(batch.packed).cpu()
    error = (found - expected).abs().max().item() / max(expected.abs().max().item(), 1e-6)
    if not error <= MAX_SCORE_ERROR[dtype]:
        raise CheckpointError(
            f"The reward model saved at {path} gives other scores than the one that was trained "
            f"(off by {error:.1e}). Do not use it; this is a bug."
        )


def run_rm(config: RMConfig) -> None:
    """Train as `config` says and leave the model in `config.ckpt.output_dir`."""
    run_supervised(RMRecipe(), config)
