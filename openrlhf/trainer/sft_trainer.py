"""Supervised fine-tuning and continued pre-training: token mean of -log p over the whole step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import Unpack

from openrlhf.algorithms.language_loss import sft_loss
from openrlhf.config.supervised import SFTConfig
from openrlhf.datasets.command_data import sft_format
from openrlhf.datasets.sft_dataset import SFTDataset, SFTExample
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.models.actor import Actor
from openrlhf.trainer.base_trainer import BaseTrainer, LoopParts
from openrlhf.trainer.supervised_run import (
    Progress,
    Recipe,
    SupervisedRun,
    load_actor,
    run_supervised,
)
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tokenizer import Tokenizer

if TYPE_CHECKING:
    from datasets import Dataset


class SFTTrainer(BaseTrainer[SFTExample, PackedBatch]):
    """The language-model loss on the tokens a row marks."""

    def __init__(
        self,
        strategy: DeepSpeedStrategy,
        engine: TrainEngine,
        *,
        aux_loss_coef: float = 0.0,
        **loop: Unpack[LoopParts],
    ) -> None:
        super().__init__(strategy, engine, **loop)
        self.aux_loss_coef = aux_loss_coef

    def counts(self, samples: Sequence[SFTExample]) -> dict[str, float]:
        """Tokens that are learned."""
        return {"num_tokens": float(sum(int(sample.loss_mask.sum()) for sample in samples))}

    def collate(self, samples: Sequence[SFTExample]) -> PackedBatch:
        """One row of all sequences."""
        return PackedBatch.from_sequences(
            [sample.token_ids for sample in samples], [sample.loss_mask for sample in samples]
        )

    def empty_sample(self) -> SFTExample:
        """Two tokens, the second learned."""
        return SFTExample(torch.zeros(2, dtype=torch.int64), torch.tensor([False, True]))

    def compute_loss(
        self, batch: PackedBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """-sum log p / tokens of the step, plus the router losses of a mixture of experts, which
        count as many times as their sequence has targets.
        """
        stats = self.engine(batch)
        num_tokens, total = len(stats.logprobs), denominators["num_tokens"]
        loss = sft_loss(stats.logprobs, num_tokens_global=total)
        metrics = Metrics()
        metrics.add("gpt_loss", loss.item() * total / num_tokens, weight=num_tokens)
        if self.aux_loss_coef and stats.aux_loss is not None:
            aux_sum = (stats.aux_loss * batch.num_targets).sum()
            metrics.add("aux_loss", aux_sum.item() / num_tokens, weight=num_tokens)
            loss = loss + self.aux_loss_coef * aux_sum / total
        return loss, metrics

    def summarise(self, values: dict[str, float]) -> dict[str, float]:
        """Perplexity; infinite where the loss is beyond what a float's exponential can hold."""
        loss = values["gpt_loss"]
        return {"ppl": math.exp(loss) if loss < 700 else math.inf}


class SFTRecipe(Recipe[SFTConfig]):
    """train_sft."""

    name = "sft"

    def make_samples(
        self,
        config: SFTConfig,
        rows: Dataset,
        tokenizer: Tokenizer,
        progress: Progress | None,
    ) -> SFTDataset:
        """Dialogues, prompts with answers, or plain text."""
        return SFTDataset(rows, tokenizer, sft_format(config), progress=progress)

    def load_model(self, config: SFTConfig, model_path: str) -> Actor:
        """The causal language model as a policy."""
        return load_actor(config, model_path)

    def make_trainer(self, run: SupervisedRun[SFTConfig]) -> SFTTrainer:
        """The language-model loss."""
        coef = run.config.model.aux_loss_coef
        return SFTTrainer(run.strategy, run.engine, aux_loss_coef=coef, **run.loop)


def run_sft(config: SFTConfig) -> None:
    """Train as `config` says and leave the model in `config.ckpt.output_dir`."""
    run_supervised(SFTRecipe(), config)
