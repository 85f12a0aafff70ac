"""The load-balancing loss of a mixture of experts, of each sequence of one packed row.

A loss over the tokens of several sequences would be another one for every way to cut a step into
micro-batches, because it multiplies two of their means; losses of sequences just add up. Router
logits are what transformers records for every family that has experts; no family is known by name
here. Suffixes: B sequences, T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.errors import ConfigError


def load_balancing_losses(
    router_logits: Sequence[Tensor], seq_lengths: Sequence[int], *, top_k: int
) -> Tensor:
    """Return E * sum over experts of (choices of it per token) * (its mean router probability),
    (B,).

    `router_logits` holds (T, E) of each layer; the layers of a sequence count as one long row of
    its tokens. A loss is `top_k` when all experts are used evenly, and more otherwise (arXiv
    2101.03961, equations 4 to 6; for each sequence, 2412.19437, equations 17 to 20). Only the
    probabilities have a gradient.
    """
    assert router_logits, "no layer has a router"
    num_seqs, num_experts = len(seq_lengths), router_logits[0].size(-1)
    lengths_B = torch.tensor(seq_lengths, device=router_logits[0].device)
    owner_T = torch.arange(num_seqs, device=lengths_B.device).repeat_interleave(lengths_B)
    probs_sum_BE = router_logits[0].new_zeros(num_seqs, num_experts, dtype=torch.float32)
    choices_BE = torch.zeros_like(probs_sum_BE)
    for logits_TE in router_logits:
        probs_TE = logits_TE.float().softmax(-1)
        probs_sum_BE = probs_sum_BE.index_add(0, owner_T, probs_TE)
        cells = owner_T[:, None] * num_experts + probs_TE.topk(top_k, dim=-1).indices
        choices_BE += cells.flatten().bincount(minlength=choices_BE.numel()).view_as(choices_BE)
    num_rows_B1 = (len(router_logits) * lengths_B)[:, None]
    return num_experts * (choices_BE / num_rows_B1 * (probs_sum_BE / num_rows_B1)).sum(-1)


def check_has_experts(config: PretrainedConfig, path: str) -> None:
    """Raise ConfigError if the model at `path` sends no token to experts; reads no weights."""
    if not _num_experts_per_token(config):
        raise ConfigError(f"--aux_loss_coef is set, and {path} has no experts. Leave it out.")


def _num_experts_per_token(config: PretrainedConfig) -> int:
    return int(config.get_text_config().to_dict().get("num_experts_per_tok") or 0)


def experts_per_token(model: PreTrainedModel) -> int:
    """Return the experts a token is sent to; raise ConfigError if there are none."""
    records = model.base_model._can_record_outputs or {}
    top_k = _num_experts_per_token(model.config)
    if "router_logits" not in records or not top_k:
        raise ConfigError(
            f"--aux_loss_coef is set, and {type(model).__name__} has no experts. Leave it out."
        )
    return top_k


def refuse_reentrant(*, use_reentrant: bool) -> None:
    """Raise ConfigError: layers would run without a graph, and the router loss train nothing."""
    if use_reentrant:
        raise ConfigError(
            "--aux_loss_coef with --gradient_checkpointing_use_reentrant: the router loss would "
            "have no gradient. Use --gradient_checkpointing alone."
        )
