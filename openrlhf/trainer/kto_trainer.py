"""KTO: single responses, good or bad, against a reference model and a reference point.

The reference point comes from the whole global batch before any of its losses: each prompt is put
before the response of the next row, in the order of the batch, so that neither ranks nor
micro-batches change it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from openrlhf.algorithms.preference_loss import kto_kl_sum, kto_losses, kto_reference_point
from openrlhf.algorithms.tokens import segment_sum
from openrlhf.config.supervised import KTOConfig
from openrlhf.datasets.unpaired_preference_dataset import UnpairedExample, UnpairedPreferenceDataset
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import hf_model_of
from openrlhf.models.support import num_positions
from openrlhf.trainer.base_trainer import Inputs, Samples, add_means
from openrlhf.trainer.preference import PreferenceBatch, ReferencedTrainer, evaluating
from openrlhf.utils.console import warn_once
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import PackedBatch


class KTOTrainer(ReferencedTrainer[UnpairedExample]):
    """The loss on single responses."""

    name = "kto"
    data_set = UnpairedPreferenceDataset
    keeps_reference = True  # for mismatched pairs

    def __init__(self, config: KTOConfig, inputs: Inputs, strategy: DeepSpeedStrategy) -> None:
        super().__init__(config, inputs, strategy)
        max_len = config.data.max_len
        # Rows are held against the model's positions; a long prompt with a long response is not.
        limit = num_positions(hf_model_of(self.model).config) or max_len
        self.max_len = min(max_len, limit)  # tokens of a mismatched pair
        self.reference = self.load_reference(inputs.model_path)

    def counts(self, batch: PreferenceBatch) -> dict[str, float]:
        """Return the number of responses."""
        return {"num_samples": float(len(batch))}

    def collate(self, samples: Sequence[UnpairedExample]) -> PreferenceBatch:
        packed = PackedBatch.from_sequences(
            [sample.token_ids for sample in samples], [sample.loss_mask for sample in samples]
        )
        is_desirable = torch.tensor([sample.is_desirable for sample in samples])
        return PreferenceBatch.of(samples, packed, is_desirable)

    def prepare(self, rows: Sequence[int], samples: Samples[UnpairedExample]) -> dict[str, float]:
        """Return the reference point of the batch."""
        pairs = mismatched_pairs(rows, samples, max_len=self.max_len)
        return {"reference_point": self.reference_point(pairs)}

    @torch.no_grad()
    def reference_point(self, pairs: Sequence[UnpairedExample]) -> float:
        """Return the KL estimate of policy and reference on mismatched pairs, over all ranks."""
        if not pairs:
            return 0.0
        lengths = [len(pair.token_ids) for pair in pairs]
        kl_sum = 0.0
        with evaluating(self.engine):
            for part, batch in self.own_batches(pairs, range(len(pairs)), lengths):
                own = kto_kl_sum(*self._logprobs(batch.to(self.engine.device))[:2])
                kl_sum += own.item() if part else 0.0
        total = self.strategy.all_reduce_sum({"kl_sum": kl_sum})["kl_sum"]
        return kto_reference_point(torch.tensor(total), len(pairs)).item()

    def compute_loss(
        self, batch: PreferenceBatch, denominators: Mapping[str, float]
    ) -> tuple[Tensor, Metrics]:
        """Return the sum of the responses' losses / responses of the step, plus the router loss of
        experts.
        """
        policy_B, ref_B, aux_loss_B = self._logprobs(batch)
        reference_point, model = denominators["reference_point"], self.config.model
        losses_B, rewards_B = kto_losses(
            policy_B,
            ref_B,
            is_desirable_B=batch.labels,
            reference_point=torch.tensor(reference_point, device=policy_B.device),
            beta=model.beta,
            desirable_weight=model.desirable_loss_weight,
            undesirable_weight=model.undesirable_loss_weight,
        )
        num_samples, metrics = len(losses_B), Metrics()
        means = {
            "kto_loss": losses_B,
            "chosen_reward": rewards_B[batch.labels],
            "reject_reward": rewards_B[~batch.labels],
        }
        add_means(metrics, means)
        metrics.add("kl", reference_point, weight=num_samples)
        ones_B = torch.ones_like(losses_B)
        loss_sum = self.add_router_loss(losses_B.sum(), aux_loss_B, ones_B, metrics)
        metrics.add("loss", loss_sum.double() / num_samples, weight=num_samples)
        return loss_sum / denominators["num_samples"], metrics

    def _logprobs(self, batch: PreferenceBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probs of whole responses, (B,), of policy and reference, and the router
        losses.
        """
        ref_B = self.reference_sums(batch)
        assert ref_B is not None, "KTO has a reference"
        stats = self.engine(batch.packed)
        return segment_sum(stats.logprobs, batch.packed.num_targets), ref_B, stats.aux_loss


def mismatched_pairs(
    rows: Sequence[int], samples: Samples[UnpairedExample], *, max_len: int
) -> list[UnpairedExample]:
    """Return each prompt of a batch with the response of the next row that has another prompt (the
    first row is next to the last), cut as the rows of the data are; none of a prompt that is alone,
    or leaves no room for the response.
    """
    examples = [samples[row] for row in rows]
    asked = [example.token_ids[: example.prompt_length] for example in examples]
    pairs = []
    for index, prompt in enumerate(examples):
        following = (*range(index + 1, len(rows)), *range(index))
        found = (k for k in following if not torch.equal(asked[k], asked[index]))
        if (k := next(found, None)) is None:
            continue
        other = examples[k]
        first = slice(prompt.prompt_length)
        last = slice(other.prompt_length, None)
        token_ids = torch.cat([prompt.token_ids[first], other.token_ids[last]])[:max_len]
        mask = torch.cat([prompt.loss_mask[first], other.loss_mask[last]])[:max_len]
        if mask.any():
            pairs.append(UnpairedExample(token_ids, mask, other.is_desirable))
    if not pairs:
        warn_once(
            f"a batch of {len(rows)} row(s) has no two prompts to tell the KL from, so its "
            "reference point is 0. Type another --train_batch_size, or mix the rows."
        )
    return pairs
