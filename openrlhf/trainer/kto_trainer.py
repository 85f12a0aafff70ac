"""KTO: single answers, good or bad, against a reference model and a reference point.

The reference point comes from the whole global batch before any of its losses: each prompt is put
before the response of the next row, in the order of the batch, so that neither ranks nor
micro-batches change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import Unpack

from openrlhf.algorithms.preference_loss import (
    KTOOptions,
    kto_kl_sum,
    kto_losses,
    kto_reference_point,
)
from openrlhf.algorithms.tokens import segment_sum
from openrlhf.config.preference import KTOConfig
from openrlhf.datasets.command_data import kto_format
from openrlhf.datasets.unpaired_preference_dataset import (
    UnpairedExample,
    UnpairedPreferenceDataset,
)
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.models.actor import Actor
from openrlhf.models.sizes import num_positions
from openrlhf.trainer.base_trainer import LoopParts, SampleSet
from openrlhf.trainer.labelled_batch import (
    LabelledBatch,
    MismatchedPairs,
    ReferencedAnswers,
    empty_answer,
    mismatched_pairs,
)
from openrlhf.trainer.reference import Reference, ReferencedTrainer, evaluating, make_reference
from openrlhf.trainer.supervised_run import (
    Progress,
    Recipe,
    SupervisedRun,
    hf_part,
    load_actor,
    run_supervised,
)
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.tokenizer import Tokenizer

if TYPE_CHECKING:
    from datasets import Dataset


class KTOTrainer(ReferencedTrainer[UnpairedExample, LabelledBatch]):
    """The loss on single answers."""

    def __init__(
        self,
        strategy: DeepSpeedStrategy,
        engine: TrainEngine,
        *,
        reference: Reference,
        options: KTOOptions,
        max_len: int,  # tokens of a mismatched pair
        precompute: bool = False,  # ask the reference once, before the first step
        aux_loss_coef: float = 0.0,
        **loop: Unpack[LoopParts],
    ) -> None:
        super().__init__(strategy, engine, **loop)
        self.reference: Reference | None = reference
        self.precompute = precompute
        self.options = options
        self.max_len = max_len
        self.aux_loss_coef = aux_loss_coef

    def counts(self, samples: Sequence[UnpairedExample]) -> dict[str, float]:
        """Answers."""
        return {"num_samples": float(len(samples))}

    def collate(self, samples: Sequence[UnpairedExample]) -> LabelledBatch:
        """One row of all answers."""
        return LabelledBatch.of(samples)

    def empty_sample(self) -> UnpairedExample:
        """A prompt and a response of one token each."""
        return empty_answer(is_referenced=self.reference is None)

    def keep_answers(self, ask: Reference) -> None:
        """Keep the reference's log-probs of every answer, and of the mismatched pairs of every
        batch that is left.
        """
        self.samples = self._referenced(self.samples, ask, self.batches_left())
        if self.eval_samples is not None:
            batches = self.eval_batches(len(self.eval_samples))
            self.eval_samples = self._referenced(self.eval_samples, ask, batches)

    def _referenced(
        self, samples: SampleSet[UnpairedExample], ask: Reference, batches: Iterable[list[int]]
    ) -> ReferencedAnswers:
        # Asked batch by batch: how sequences are packed decides their last bits, and a run that
        # goes on starts at another batch.
        pairs = MismatchedPairs(samples, batches, max_len=self.max_len)
        sums = self.ask_all(pairs, ask, pairs.spans.values()).flatten().tolist()
        pair_sums = {rows: [sums[i] for i in span] for rows, span in pairs.spans.items()}
        return ReferencedAnswers(samples, self.ask_all(samples, ask), pair_sums)

    def prepare(self, rows: Sequence[int], samples: SampleSet[UnpairedExample]) -> dict[str, float]:
        """The reference point of the batch."""
        pairs = mismatched_pairs(rows, samples, max_len=self.max_len)
        return {"reference_point": self.reference_point(pairs)}

    @torch.no_grad()
    def reference_point(self, pairs: Sequence[UnpairedExample]) -> float:
        """How far the policy is from the reference on mismatched pairs, over all ranks."""
        if not pairs:
            return 0.0
        share = self.share_of(range(len(pairs)), [len(pair.token_ids) for pair in pairs])
        kl_sum = 0.0
        with evaluating(self.engine):
            for index in range(share.num_micro_batches):
                part = share.micro_batches[index] if index < len(share.micro_batches) else []
                batch = self.collate([pairs[i] for i in part] or [self.empty_sample()])
                own = kto_kl_sum(*self._logprobs(batch.to(self.engine.device))[:2])
                kl_sum += own.item() if part else 0.0
        total = self.strategy.all_reduce_sum({"kl_sum": kl_sum})["kl_sum"]
        return kto_reference_point(torch.tensor(total), len(pairs)).item()

    def compute_loss(
        self, batch: LabelledBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Sum of the answers' losses / answers of the step, plus the router loss of experts."""
        policy_B, ref_B, aux_loss = self._logprobs(batch)
        reference_point = denominators["reference_point"]
        losses_B, rewards_B = kto_losses(
            policy_B,
            ref_B,
            is_desirable_B=batch.is_desirable,
            reference_point=torch.tensor(reference_point, device=policy_B.device),
            options=self.options,
        )
        num_samples, total = len(losses_B), denominators["num_samples"]
        metrics = self._metrics(losses_B.detach(), rewards_B, batch.is_desirable)
        metrics.add("kl", reference_point, weight=num_samples)
        loss_sum = losses_B.sum()
        if self.aux_loss_coef and aux_loss is not None:
            metrics.add("aux_loss", aux_loss.mean().item(), weight=num_samples)
            loss_sum = loss_sum + self.aux_loss_coef * aux_loss.sum()
        metrics.add("loss", loss_sum.item() / num_samples, weight=num_samples)
        return loss_sum / total, metrics

    def summarise(self, values: dict[str, float]) -> dict[str, float]:
        """How much better wanted answers are rewarded than unwanted ones, where there are both."""
        if not {"chosen_reward", "reject_reward"} <= values.keys():
            return {}
        return {"reward_margin": values["chosen_reward"] - values["reject_reward"]}

    def _logprobs(self, batch: LabelledBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs of whole responses, (B,), of policy and reference, and the router loss."""
        num_targets_B = batch.packed.num_targets
        ref_B = batch.ref_sums
        if ref_B is None:
            assert self.reference is not None, "nothing was computed before training"
            ref_B = self.reference(batch.packed)
        stats = self.engine(batch.packed)
        return segment_sum(stats.logprobs, num_targets_B), ref_B, stats.aux_loss

    @staticmethod
    def _metrics(losses_B: Tensor, rewards_B: Tensor, is_desirable_B: Tensor) -> Metrics:
        metrics = Metrics()
        metrics.add("kto_loss", losses_B.mean().item(), weight=len(losses_B))
        parts = {"chosen_reward": is_desirable_B, "reject_reward": ~is_desirable_B}
        for name, mask_B in parts.items():
            if mask_B.any():
                metrics.add(name, rewards_B[mask_B].mean().item(), weight=int(mask_B.sum()))
        return metrics


class KTORecipe(Recipe[KTOConfig]):
    """train_kto."""

    name = "kto"

    def make_samples(
        self,
        config: KTOConfig,
        rows: Dataset,
        tokenizer: Tokenizer,
        progress: Progress | None,
    ) -> UnpairedPreferenceDataset:
        """Prompts with an answer and its label."""
        return UnpairedPreferenceDataset(rows, tokenizer, kto_format(config), progress=progress)

    def load_model(self, config: KTOConfig, model_path: str) -> Actor:
        """The causal language model as a policy."""
        return load_actor(config, model_path, has_dropout=False)

    def make_trainer(self, run: SupervisedRun[KTOConfig]) -> KTOTrainer:
        """The loss, and the frozen model that the policy starts from."""
        model, max_len = run.config.model, run.config.data.max_len
        # Rows are held against the model's positions; a long prompt with a long response is not.
        limit = num_positions(hf_part(run.model).config) or max_len
        return KTOTrainer(
            run.strategy,
            run.engine,
            reference=make_reference(run, run.inputs.model_path, offload=run.config.ref.offload),
            options=KTOOptions(
                beta=model.beta,
                desirable_weight=model.desirable_loss_weight,
                undesirable_weight=model.undesirable_loss_weight,
            ),
            max_len=min(max_len, limit),
            precompute=run.config.ref.precompute_log_probs,
            aux_loss_coef=model.aux_loss_coef,
            **run.loop,
        )


def run_kto(config: KTOConfig) -> None:
    """Train as `config` says and leave the model in `config.ckpt.output_dir`."""
    run_supervised(KTORecipe(), config)
