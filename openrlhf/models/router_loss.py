"""The load-balancing loss of a mixture of experts, over the tokens of one packed row.

Router logits are what transformers records for every family that has experts; no family is known
by name here. Suffixes: T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from openrlhf.errors import ConfigError


def load_balancing_loss(router_logits: Sequence[Tensor], *, top_k: int) -> Tensor:
    """E * sum over experts of (choices of it per token) * (its mean router probability), ().

    `router_logits` holds (T, E) of each layer; the layers count as one long row of tokens. The loss
    is `top_k` when all experts are used evenly, and more otherwise (arXiv 2101.03961, equations 4
    to 6). Only the probabilities have a gradient.
    """
    assert router_logits, "no layer has a router"
    num_experts = router_logits[0].size(-1)
    num_rows = sum(logits_TE.size(0) for logits_TE in router_logits)
    layers = [logits_TE.float().softmax(-1) for logits_TE in router_logits]
    mean_E = sum(probs_TE.sum(0) for probs_TE in layers) / num_rows
    chosen = [probs_TE.topk(top_k, dim=-1).indices.flatten() for probs_TE in layers]
    share_E = sum(experts.bincount(minlength=num_experts) for experts in chosen) / num_rows
    return num_experts * (share_E * mean_E).sum()


def experts_per_token(model: PreTrainedModel) -> int:
    """How many experts a token is sent to; a model without experts is a ConfigError."""
    records = model.base_model._can_record_outputs or {}
    top_k = model.config.get_text_config().to_dict().get("num_experts_per_tok")
    if "router_logits" not in records or not top_k:
        raise ConfigError(
            f"--aux_loss_coef is set, and {type(model).__name__} has no experts. Leave it out."
        )
    return int(top_k)


def refuse_reentrant(*, use_reentrant: bool) -> None:
    """The reentrant variant runs layers without a graph, so the router loss would train nothing."""
    if use_reentrant:
        raise ConfigError(
            "--aux_loss_coef with --gradient_checkpointing_use_reentrant: the router loss would "
            "have no gradient. Use --gradient_checkpointing alone."
        )
