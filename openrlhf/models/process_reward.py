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
from torch import Tensor, nn

from openrlhf.algorithms.language_loss import PRMTerms, prm_losses
from openrlhf.models.actor import Actor, ChunkedHead
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
        """Every token of the batch, (T,) int64."""
        return self.packed.token_ids

    @cached_property
    def num_markers(self) -> Tensor:
        """Number of markers of each text, (B,) int64."""
        owner_M = torch.bucketize(self.marker_index, self.packed.cu_seqlens[1:].long(), right=True)
        return owner_M.bincount(minlength=len(self.packed.seq_lengths))


class MarkerTerms(NamedTuple):
    """What is known at the M markers of a batch."""

    losses: Tensor  # (M,) fp32
    is_correct: Tensor  # (M,) bool
    aux_loss: Tensor | None = None  # (B,) router loss of each sequence, of a mixture of experts


class MarkerHead(ChunkedHead):
    """The LM head as verdicts, at the marker's own position."""

    can_be_split = False

    def forward(
        self, hidden_MH: Tensor, labels_M: Tensor, reward_tokens_R: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Losses (M,) fp32, and whether the likeliest token is the labelled one, (M,) bool."""
        if reward_tokens_R is None:
            return self._among_all(hidden_MH, labels_M)
        columns_R = torch.arange(len(reward_tokens_R), device=labels_M.device)
        logits_MR = self._logits(hidden_MH, reward_tokens_R)
        return tuple(prm_losses(logits_MR, labels_M, reward_tokens_R=columns_R))

    def _among_all(self, hidden_MH: Tensor, labels_M: Tensor) -> tuple[Tensor, ...]:
        (logprobs_M,) = super().forward(hidden_MH, labels_M, temperature=1.0, with_entropy=False)
        return tuple(PRMTerms(-logprobs_M, self._likeliest(hidden_MH) == labels_M))

    @torch.no_grad()
    def _likeliest(self, hidden_MH: Tensor) -> Tensor:
        """The likeliest token at each marker, (M,); scale and cap keep the order of logits."""
        chunks = hidden_MH.split(CHUNK_MARKERS)
        likeliest = [F.linear(chunk, self.weight, self.bias).argmax(-1) for chunk in chunks]
        return torch.cat(likeliest)

    def _logits(self, hidden_MH: Tensor, tokens_R: Tensor) -> Tensor:
        """Logits of some of the tokens, (M, R) fp32."""
        bias_R = None if self.bias is None else self.bias[tokens_R]
        raw_MR = F.linear(hidden_MH, self.weight[tokens_R], bias_R)
        logits_MR = raw_MR.float() * self.transform.scale
        softcap = self.transform.softcap
        return logits_MR if softcap is None else softcap * (logits_MR / softcap).tanh()


class StepJudge(Actor):
    """A causal language model seen as a judge of steps."""

    def __init__(self, model: nn.Module, *, with_aux_loss: bool = False) -> None:
        super().__init__(model, with_aux_loss=with_aux_loss)
        self.head = MarkerHead(self.head, self.head.transform)

    def forward(self, batch: MarkedBatch) -> MarkerTerms:
        """Loss and verdict at every marker."""
        states = self.states_at(batch.packed, batch.marker_index)
        verdicts = self.head(states.hidden_nH, states.select(batch.labels), batch.reward_tokens)
        return MarkerTerms(*map(states.spread, verdicts), aux_loss=states.aux_loss)
