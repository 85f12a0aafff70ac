"""A causal language model that judges the steps of a text, from logits at the step markers alone.

Only the hidden states at markers reach the LM head; with reward tokens only their rows of it. Knows
no data set: what a label is, was decided before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf.algorithms.language_loss import prm_losses
from openrlhf.models.actor import Actor, ChunkedHead, token_stats
from openrlhf.utils.packing import Batch, PackedBatch

CHUNK_MARKERS = 256  # whose logits over the whole vocabulary exist at the same time


@dataclass(frozen=True)
class MarkedBatch(Batch):
    """Packed texts and the labels of their M markers."""

    packed: PackedBatch
    marker_index: Tensor  # (M,) int64, places in the packed row
    # (M,) int64 token ids, or places among the reward tokens where there are some; or float32
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


class MarkerTerms(NamedTuple):
    """What is known at the M markers of a batch."""

    losses: Tensor  # (M,) fp32
    is_correct: Tensor  # (M,) bool
    aux_loss: Tensor | None = None  # (B,) router loss of each sequence, of a mixture of experts


def judge_markers(
    head: ChunkedHead, hidden_MH: Tensor, labels_M: Tensor, reward_tokens_R: Tensor | None
) -> tuple[Tensor, ...]:
    """Return losses, (M,) fp32, and whether the likeliest token is the labelled one, (M,) bool."""
    if reward_tokens_R is None:
        (logprobs_M,) = token_stats(head, hidden_MH, labels_M, 1.0, False)  # noqa: FBT003
        return -logprobs_M, _likeliest(head, hidden_MH) == labels_M
    bias_R = None if head.bias is None else head.bias[reward_tokens_R]
    raw_MR = F.linear(hidden_MH, head.weight[reward_tokens_R], bias_R)
    logits_MR = raw_MR.float() * head.scale
    if head.softcap is not None:
        logits_MR = head.softcap * (logits_MR / head.softcap).tanh()
    columns_R = torch.arange(len(reward_tokens_R), device=labels_M.device)
    return tuple(prm_losses(logits_MR, labels_M, reward_tokens_R=columns_R))


@torch.no_grad()
def _likeliest(head: ChunkedHead, hidden_MH: Tensor) -> Tensor:
    """Return the likeliest token at each marker, (M,); scale and cap keep the order of logits."""
    chunks = hidden_MH.split(CHUNK_MARKERS)
    return torch.cat([F.linear(chunk, head.weight, head.bias).argmax(-1) for chunk in chunks])


class StepJudge(Actor):
    """A causal language model seen as a judge of steps."""

    reads_whole_head = True

    def forward(self, batch: MarkedBatch) -> MarkerTerms:
        """Return the loss and verdict at every marker."""
        states = self.states_at(batch.packed, batch.marker_index)
        labels_m = states.select(batch.labels)
        verdicts = self.head(judge_markers, states.hidden_nH, labels_m, batch.reward_tokens)
        return MarkerTerms(*map(states.spread, verdicts), aux_loss=states.aux_loss)
