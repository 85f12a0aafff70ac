"""A process reward model: cross-entropy of each step's label at the step's own marker.

A mean over the markers of the whole step; markers are what is counted, however texts are split over
micro-batches and ranks. The LM head sees hidden states at markers alone; with reward tokens only
their rows of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf.algorithms.language_loss import prm_losses
from openrlhf.config.supervised import PRMConfig
from openrlhf.datasets.process_reward_dataset import (
    ProcessExample,
    ProcessRewardDataset,
    single_token_id,
)
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.models.actor import Actor, ChunkedHead, token_stats
from openrlhf.trainer.base_trainer import BaseTrainer, Inputs, add_means, load_actor
from openrlhf.utils.metrics import Metrics
from openrlhf.utils.packing import Batch, PackedBatch

CHUNK_MARKERS = 256  # whose logits over the whole vocabulary exist at the same time


@dataclass(frozen=True)
class MarkedBatch(Batch):
    """Packed texts and the labels of their M markers.

    Example: texts of 5 and 4 tokens, each with a marker at its end: `marker_index` [4, 8], `labels`
    [10, 12].
    """

    packed: PackedBatch
    marker_index: Tensor  # (M,) int64, positions in the packed row
    # (M,) int64 token ids, or indices among the reward tokens where there are some; or float32
    # shares of the first of two reward tokens
    labels: Tensor
    reward_tokens: Tensor | None = None  # (R,) int64, what a label may be; None: any token

    @property
    def token_ids(self) -> Tensor:
        """Return every token of the batch, (T,) int64."""
        return self.packed.token_ids

    @cached_property
    def num_markers(self) -> Tensor:
        """Return the number of markers of each text, (B,) int64."""
        owner_M = torch.bucketize(self.marker_index, self.packed.cu_seqlens[1:].long(), right=True)
        return owner_M.bincount(minlength=len(self.packed.seq_lengths))


def judge_markers(
    head: ChunkedHead, hidden_MH: Tensor, labels_M: Tensor, reward_tokens_R: Tensor | None
) -> tuple[Tensor, ...]:
    """Return losses, (M,) fp32, and whether the likeliest token is the labelled one, (M,) bool."""
    if reward_tokens_R is None:
        logprobs_M, _ = token_stats(head, hidden_MH, labels_M, 1.0, False)  # noqa: FBT003
        return -logprobs_M, _likeliest(head, hidden_MH) == labels_M
    bias_R = None if head.bias is None else head.bias[reward_tokens_R]
    raw_MR = F.linear(hidden_MH, head.weight[reward_tokens_R], bias_R)
    logits_MR = raw_MR.float() * head.scale
    if head.softcap is not None:
        logits_MR = head.softcap * (logits_MR / head.softcap).tanh()
    return prm_losses(logits_MR, labels_M)


@torch.no_grad()
def _likeliest(head: ChunkedHead, hidden_MH: Tensor) -> Tensor:
    """Return the likeliest token at each marker, (M,); scale and cap keep the order of logits."""
    chunks = hidden_MH.split(CHUNK_MARKERS)
    return torch.cat([F.linear(chunk, head.weight, head.bias).argmax(-1) for chunk in chunks])


class StepJudge(Actor):
    """A causal language model seen as a judge of steps."""

    reads_whole_head = True

    def forward(self, batch: MarkedBatch) -> tuple[Tensor | None, ...]:
        """Return the loss and the verdict at every marker, (M,), and of a mixture of experts the
        router loss of each sequence, (B,).
        """
        states = self.states_at(batch.packed, batch.marker_index)
        labels_m = states.select(batch.labels)
        verdicts = self.head(judge_markers, states.hidden_nH, labels_m, batch.reward_tokens)
        return *map(states.spread, verdicts), states.aux_loss


class PRMTrainer(BaseTrainer[ProcessExample, MarkedBatch]):
    """The loss at step markers; labels are among `reward_tokens`, or any token when there are
    none.
    """

    name = "prm"
    data_set = ProcessRewardDataset
    judged_by = ("acc", "loss")

    def __init__(self, config: PRMConfig, inputs: Inputs, strategy: DeepSpeedStrategy) -> None:
        super().__init__(config, inputs, strategy)
        texts = config.model.reward_tokens or ()
        ids = [single_token_id(inputs.tokenizer, text, flag="--reward_tokens") for text in texts]
        self.reward_tokens = torch.tensor(ids) if ids else None
        self.indices = {token_id: index for index, token_id in enumerate(ids)}

    @classmethod
    def row_format(cls, config: PRMConfig) -> dict[str, Any]:
        model = config.model
        tokens = model.reward_tokens or ()
        return {"placeholder_token": model.placeholder_token, "reward_tokens": tokens}

    @classmethod
    def load_model(cls, config: PRMConfig, model_path: str) -> StepJudge:
        model = load_actor(config, model_path).model
        return StepJudge(model, with_aux_loss=config.model.aux_loss_coef > 0)

    def counts(self, batch: MarkedBatch) -> dict[str, float]:
        """Return the number of markers."""
        return {"num_markers": float(len(batch.labels))}

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
        losses_M, is_correct_M, aux_loss_B = self.engine(batch)
        num_markers, metrics = len(losses_M), Metrics()
        add_means(metrics, {"prm_loss": losses_M, "acc": is_correct_M})
        loss_sum = self.add_router_loss(losses_M.sum(), aux_loss_B, batch.num_markers, metrics)
        metrics.add("loss", loss_sum.double() / num_markers, weight=num_markers)
        return loss_sum / denominators["num_markers"], metrics

    def _labels(self, sample: ProcessExample) -> Tensor:
        """Return labels as the model takes them; with two reward tokens all are shares of the
        first, so that rows of either kind fit in one batch.
        """
        if sample.is_soft or not self.indices:
            return sample.labels
        indices = torch.tensor([self.indices[int(label)] for label in sample.labels])
        return 1.0 - indices.float() if len(self.indices) == 2 else indices
