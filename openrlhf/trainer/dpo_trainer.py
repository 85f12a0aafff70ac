"""Direct preference optimisation and its relatives: pairs against a frozen reference, or alone.

Both responses of a pair run in one packed forward. `loss` in the log is the preference loss, a mean
over pairs; `nll_loss` is a mean over the tokens of better responses, with a weight of its own.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from openrlhf.algorithms.preference_loss import PreferenceOptions, preference_loss
from openrlhf.config.supervised import DPOConfig
from openrlhf.datasets.reward_dataset import PreferenceDataset, PreferencePair
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.models.actor import TokenStats
from openrlhf.trainer.base_trainer import Inputs, add_means, check_same_tokens
from openrlhf.trainer.preference import (
    PreferenceBatch,
    ReferencedTrainer,
    by_side,
    half_pairs,
    pack_pairs,
    pair_logps,
    pair_metrics,
)
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.own_functions import PREFERENCE_LOSS, check_function, find_function
from openrlhf.utils.tokenizer import Tokenizer


class DPOTrainer(ReferencedTrainer[PreferencePair]):
    """A preference loss; `reference` is None for losses of the policy alone."""

    name = "dpo"
    data_set = PreferenceDataset
    reads_pictures = True
    judged_by = ("acc", "loss", "reward_margin")

    def __init__(self, config: DPOConfig, inputs: Inputs, strategy: DeepSpeedStrategy) -> None:
        super().__init__(config, inputs, strategy)
        model = config.model
        self.loss = find_function(PREFERENCE_LOSS, model.loss_type)
        self.options = PreferenceOptions(
            beta=model.beta,
            label_smoothing=model.label_smoothing,
            ipo_length_average=model.ipo_length_average,
            simpo_gamma=model.simpo_gamma,
        )
        self.nll_coef = model.nll_loss_coef  # of the language-model loss of better responses
        if config.has_reference:
            self.reference = self.load_reference(config.ref.model_name_or_path or inputs.model_path)

    @classmethod
    def check(cls, config: DPOConfig, tokenizer: Tokenizer) -> None:
        """Raise ConfigError unless the user's own loss works, and another reference has the
        policy's tokens.
        """
        check_function(PREFERENCE_LOSS, config.model.loss_type)
        path = config.ref.model_name_or_path
        if config.has_reference and path:
            check_same_tokens(
                tokenizer, path, "--ref_pretrain", remote_code=config.trust_remote_code
            )

    @classmethod
    def other_models(cls, config: DPOConfig) -> dict[str, bool]:
        return super().other_models(config) if config.has_reference else {}

    def counts(self, batch: PreferenceBatch) -> dict[str, float]:
        """Return the numbers of pairs and of tokens of better responses."""
        num_tokens, _ = by_side(batch.packed.num_targets)
        return {"num_pairs": float(len(batch)), "num_chosen_tokens": float(num_tokens.sum())}

    def collate(self, samples: Sequence[PreferencePair]) -> PreferenceBatch:
        return pack_pairs(samples, self.inputs.image_processor)

    def compute_loss(
        self, batch: PreferenceBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Return the pairs' losses / pairs of the step, plus what else is added to them."""
        ref_sums = self.reference_sums(batch)
        stats: TokenStats = self.engine(batch.packed)
        pairs = pair_logps(batch, stats.logprobs, ref_sums)
        chosen_B, rejected_B = pairs.sums_2B
        losses_B, better_B, worse_B = preference_loss(self.loss, pairs, self.options)
        metrics = pair_metrics(losses_B, better_B, worse_B)
        add_means(metrics, {"chosen_logps": chosen_B, "reject_logps": rejected_B})
        halves_S = half_pairs(losses_B)
        loss_sum = self.add_router_loss(losses_B.sum(), stats.aux_loss, halves_S, metrics)
        loss = loss_sum / denominators["num_pairs"]
        if self.nll_coef:
            nll_sum, num_tokens = -chosen_B.sum(), int(pairs.lengths_2B[0].sum())
            metrics.add("nll_loss", nll_sum.double() / max(num_tokens, 1), weight=num_tokens)
            loss = loss + self.nll_coef * nll_sum / max(denominators["num_chosen_tokens"], 1.0)
        return loss, metrics
