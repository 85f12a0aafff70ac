"""Direct preference optimisation and its relatives: pairs against a frozen reference, or alone.

Both answers of a pair run in one packed forward. `loss` in the log is the preference loss, a mean
over pairs; `nll_loss` is a mean over the tokens of better answers, with a weight of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor
from typing_extensions import Unpack

from openrlhf.algorithms.preference_loss import (
    PairLogps,
    PreferenceLoss,
    PreferenceOptions,
    preference_loss,
)
from openrlhf.algorithms.tokens import segment_sum
from openrlhf.config.preference import DPOConfig
from openrlhf.datasets.reward_dataset import PreferenceDataset, PreferenceFormat, PreferencePair
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import TrainEngine
from openrlhf.models.actor import Actor, TokenStats
from openrlhf.trainer.base_trainer import LoopParts
from openrlhf.trainer.pair_batch import PairBatch, ReferencedPairs, by_side, empty_pair
from openrlhf.trainer.reference import Reference, ReferencedTrainer, make_reference
from openrlhf.trainer.same_tokens import check_same_tokens
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


@dataclass(frozen=True)
class AddedLosses:
    """Weights of what is added to the preference loss."""

    nll_coef: float = 0.0  # language-model loss of better answers
    aux_coef: float = 0.0  # router loss of a mixture of experts


class DPOTrainer(ReferencedTrainer[PreferencePair, PairBatch]):
    """A preference loss; `reference` is None for losses that look at the policy alone."""

    def __init__(
        self,
        strategy: DeepSpeedStrategy,
        engine: TrainEngine,
        *,
        loss: PreferenceLoss,
        reference: Reference | None = None,
        precompute: bool = False,  # ask the reference once, before the first step
        added: AddedLosses | None = None,
        **loop: Unpack[LoopParts],
    ) -> None:
        super().__init__(strategy, engine, **loop)
        assert (reference is not None) or not loss.needs_reference, "the loss needs a reference"
        self.loss = loss
        self.reference = reference if loss.needs_reference else None
        self.precompute = precompute
        self.added = added or AddedLosses()

    def counts(self, samples: Sequence[PreferencePair]) -> dict[str, float]:
        """Pairs, and tokens of better answers."""
        num_tokens = sum(int(sample.chosen_mask.sum()) for sample in samples)
        return {"num_pairs": float(len(samples)), "num_chosen_tokens": float(num_tokens)}

    def collate(self, samples: Sequence[PreferencePair]) -> PairBatch:
        """One row of both sides of all pairs."""
        return PairBatch.of(samples)

    def empty_sample(self) -> PreferencePair:
        """Two answers of one token."""
        is_referenced = self.loss.needs_reference and self.reference is None
        return empty_pair(is_referenced=is_referenced)

    def keep_answers(self, ask: Reference) -> None:
        """Keep the reference's log-probs of both sides of every pair."""
        self.samples = ReferencedPairs(self.samples, self.ask_all(self.samples, ask))
        if self.eval_samples is not None:
            self.eval_samples = ReferencedPairs(
                self.eval_samples, self.ask_all(self.eval_samples, ask)
            )

    def compute_loss(
        self, batch: PairBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Sum of the pairs' losses / pairs of the step, plus what else is added to it."""
        ref_sums = self._reference_sums(batch)
        stats = cast(TokenStats, self.engine(batch.packed))
        sums, lengths = response_sums(batch.packed, stats.logprobs), batch.packed.num_targets
        pairs = PairLogps(
            *by_side(sums),
            *by_side(lengths),
            *((None, None) if ref_sums is None else by_side(ref_sums)),
        )
        terms = self.loss(pairs)
        metrics = Metrics()
        losses = {
            "loss": terms.losses_B,
            "chosen_reward": terms.chosen_reward_B,
            "reject_reward": terms.rejected_reward_B,
            "acc": (terms.chosen_reward_B > terms.rejected_reward_B).float(),
            "chosen_logps": pairs.chosen_B,
            "reject_logps": pairs.rejected_B,
        }
        for name, values_B in losses.items():
            metrics.add(name, values_B.detach().mean().item(), weight=len(batch))
        loss = terms.losses_B.sum() / denominators["num_pairs"]
        if self.added.nll_coef:
            loss = loss + self.added.nll_coef * self._nll_loss(pairs, denominators, metrics)
        if self.added.aux_coef and stats.aux_loss is not None:
            aux_loss = stats.aux_loss.mean()  # a pair's is that of its two sides
            metrics.add("aux_loss", aux_loss.item(), weight=len(batch))
            share = len(batch) / denominators["num_pairs"]
            loss = loss + self.added.aux_coef * aux_loss * share
        return loss, metrics

    def summarise(self, values: dict[str, float]) -> dict[str, float]:
        """How much better the chosen side is rewarded."""
        return {"reward_margin": values["chosen_reward"] - values["reject_reward"]}

    @staticmethod
    def _nll_loss(pairs: PairLogps, denominators: Mapping[str, float], metrics: Metrics) -> Tensor:
        """-sum log p of the better answers / their tokens in the step."""
        nll_sum, num_tokens = -pairs.chosen_B.sum(), int(pairs.chosen_lengths_B.sum())
        metrics.add("nll_loss", nll_sum.item() / max(num_tokens, 1), weight=num_tokens)
        return nll_sum / max(denominators["num_chosen_tokens"], 1.0)

    def _reference_sums(self, batch: PairBatch) -> Tensor | None:
        """(2B,) log-prob sums of the reference; None where the loss has none."""
        if batch.ref_sums is not None or self.reference is None:
            return batch.ref_sums
        return self.reference(batch.packed)


def response_sums(batch: PackedBatch, logprobs: Tensor) -> Tensor:
    """Log-probs of target tokens, (N,), summed over each sequence, (B,)."""
    return segment_sum(logprobs, batch.num_targets)


class DPORecipe(Recipe[DPOConfig]):
    """train_dpo."""

    name = "dpo"

    def make_samples(
        self,
        config: DPOConfig,
        rows: Dataset,
        tokenizer: Tokenizer,
        progress: Progress | None,
    ) -> PreferenceDataset:
        """A better and a worse answer to each prompt."""
        form = PreferenceFormat.of(config.data)
        return PreferenceDataset(rows, tokenizer, form, progress=progress)

    def check(self, config: DPOConfig, tokenizer: Tokenizer) -> None:
        """Another reference has the policy's tokens."""
        path = config.ref.model_name_or_path
        if config.has_reference and path:
            check_same_tokens(
                tokenizer, path, "--ref_pretrain", remote_code=config.trust_remote_code
            )

    def other_models(self, config: DPOConfig) -> Sequence[str]:
        """The reference, where it is another model."""
        path = config.ref.model_name_or_path
        return (path,) if config.has_reference and path else ()

    def load_model(self, config: DPOConfig, model_path: str) -> Actor:
        """The causal language model as a policy."""
        return load_actor(config, model_path, has_dropout=False)

    def make_trainer(self, run: SupervisedRun[DPOConfig]) -> DPOTrainer:
        """The loss that was named, and its reference."""
        config, model = run.config, run.config.model
        path = config.ref.model_name_or_path or run.inputs.model_path
        reference = None
        if config.has_reference:
            reference = make_reference(run, path, offload=config.ref.offload)
        return DPOTrainer(
            run.strategy,
            run.engine,
            loss=loss_of(config),
            reference=reference,
            precompute=config.ref.precompute_log_probs,
            added=AddedLosses(model.nll_loss_coef, model.aux_loss_coef),
            **run.loop,
        )


def run_dpo(config: DPOConfig) -> None:
    """Train as `config` says and leave the model in `config.ckpt.output_dir`."""
    run_supervised(DPORecipe(), config)


def loss_of(config: DPOConfig) -> PreferenceLoss:
    """The named loss with its numbers."""
    model = config.model
    options = PreferenceOptions(
        beta=model.beta,
        label_smoothing=model.label_smoothing,
        ipo_length_average=model.ipo_length_average,
        simpo_gamma=model.simpo_gamma,
    )
    return preference_loss(model.loss_type, options)
