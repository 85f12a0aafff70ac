"""The policy: log-probs and entropy of target tokens from any causal language model, packed.

Logits of a whole batch never exist: the LM head is applied in chunks, only at positions that
predict a target. Exports use `Actor.model`, the plain Hugging Face model; the actor adds no entry
to a state dict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.algorithms.tokens import chunked_logprobs
from openrlhf.errors import ConfigError
from openrlhf.models.packing import PACKED_ATTENTION, PackedRow
from openrlhf.models.router_loss import (
    experts_per_token,
    load_balancing_losses,
    refuse_reentrant,
)
from openrlhf.utils.packable import is_padded
from openrlhf.utils.packing import PackedBatch

# Config attributes of heads that change logits in a way this module does not know.
UNKNOWN_HEAD_ATTRIBUTES = ("logits_mup_width_multiplier",)


class TokenStats(NamedTuple):
    """What the policy says about the target tokens of a batch."""

    logprobs: Tensor  # (N,) fp32
    entropy: Tensor | None = None  # (N,) fp32, of the temperature-scaled distribution
    aux_loss: Tensor | None = None  # (B,) router loss of each sequence, of a mixture of experts


@dataclass(frozen=True)
class LogitTransform:
    """What a model family does to its logits after the LM head: scale, then soft cap."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> LogitTransform:
        """Read the family's convention from its config; an unknown one is a ConfigError."""
        family = config.model_type
        unknown = [n for n in UNKNOWN_HEAD_ATTRIBUTES if getattr(config, n, None) is not None]
        if unknown:
            raise ConfigError(
                f"Model type {family!r} changes its logits by {unknown[0]}: not supported yet."
            )
        softcap = getattr(config, "final_logit_softcapping", None)
        if softcap is None:
            softcap = getattr(config, "logits_soft_cap", None)
        scaling = getattr(config, "logits_scaling", None)  # a property in some families
        if scaling is not None:
            if family.startswith("granite") or family == "minicpm3":
                return cls(1.0 / scaling, softcap)
            if family != "hyperclovax":
                raise ConfigError(
                    f"Model type {family!r} has logits_scaling of unknown meaning: not supported."
                )
            return cls(scaling, softcap)
        for name in ("logit_scale", "lm_head_multiplier"):
            if getattr(config, name, None):
                return cls(float(getattr(config, name)), softcap)
        return cls(softcap=softcap)


class ChunkedHead(nn.Module):
    """The LM head as log-probs in chunks; registers its Parameter so that ZeRO-3 gathers it."""

    def __init__(self, lm_head: nn.Module, transform: LogitTransform) -> None:
        super().__init__()
        self.weight = lm_head.weight
        self.register_parameter("bias", getattr(lm_head, "bias", None))
        self.transform = transform

    def forward(
        self, hidden_NH: Tensor, targets_N: Tensor, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, ...]:
        """Log-probs of the targets, (N,) fp32, and when asked the entropy, (N,) fp32."""
        logprobs_N, entropy_N = chunked_logprobs(
            hidden_NH,
            self.weight,
            targets_N,
            bias_V=self.bias,
            temperature=temperature,
            softcap=self.transform.softcap,
            logit_scale=self.transform.scale,
            with_entropy=with_entropy,
        )
        return (logprobs_N,) if entropy_N is None else (logprobs_N, entropy_N)

    def _save_to_state_dict(self, *args: object, **kwargs: object) -> None:
        """The parameters are the model's; they are saved there, once."""

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        """Loading into the model's parameters loads these."""


def without_head(model: PreTrainedModel) -> nn.Module:
    """The part of a model that computes its hidden states."""
    base = model.base_model
    return base if base is not model else model.get_submodule("model")


def unwrap_peft(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside a PEFT wrapper (adapters included), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class States(NamedTuple):
    """What a model without its head says about a packed batch."""

    hidden_TH: Tensor
    aux_loss: Tensor | None = None  # (B,) router loss of each sequence


def model_states(model: nn.Module, batch: PackedBatch, *, top_k: int | None = None) -> States:
    """Last hidden states, and router losses of a model that sends each token to `top_k` experts.

    Without `top_k` they are not computed.
    """
    model = unwrap_peft(model)
    if is_padded(model):
        return padded_states(model, batch, top_k=top_k)
    row = PackedRow.of(batch)
    is_packed_attention = model.config._attn_implementation == PACKED_ATTENTION
    output = without_head(model)(
        input_ids=batch.token_ids[None],
        position_ids=batch.position_ids[None],
        use_cache=False,
        **({} if top_k is None else {"output_router_logits": True}),
        **(row.kwargs() if is_packed_attention else row.flash_kwargs()),
    )
    if is_packed_attention and not row.layers_seen:
        raise ConfigError(
            f"{type(model).__name__} does not hand sequence boundaries to its attention: "
            "it cannot be trained packed."
        )
    hidden_TH = output.last_hidden_state[0]
    if top_k is None:
        return States(hidden_TH)
    losses_B = load_balancing_losses(output.router_logits, batch.seq_lengths, top_k=top_k)
    return States(hidden_TH, losses_B)


def padded_states(
    model: PreTrainedModel, batch: PackedBatch, *, top_k: int | None = None
) -> States:
    """The same from rows of one sequence each: L columns, padded on the right.

    In one forward, whatever the batch: ranks of ZeRO-3 must make equally many.
    """
    tokens_BL = pad_sequence(batch.token_ids.split(batch.seq_lengths), batch_first=True)
    lengths_B = torch.tensor(batch.seq_lengths, device=tokens_BL.device)
    is_token_BL = torch.arange(tokens_BL.size(1), device=tokens_BL.device) < lengths_B[:, None]
    output = without_head(model)(
        input_ids=tokens_BL,
        attention_mask=is_token_BL.long(),
        use_cache=False,
        **({} if top_k is None else {"output_router_logits": True}),
    )
    hidden_TH = output.last_hidden_state[is_token_BL]
    if top_k is None:
        return States(hidden_TH)
    router_logits = [logits[is_token_BL.flatten()] for logits in output.router_logits]
    return States(hidden_TH, load_balancing_losses(router_logits, batch.seq_lengths, top_k=top_k))


def hidden_states(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Last hidden states of a packed batch from the model without its head -> (T, H)."""
    return model_states(model, batch).hidden_TH


def enable_gradient_checkpointing(model: nn.Module, *, use_reentrant: bool) -> None:
    """Recompute each layer's activations in the backward pass."""
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    embeddings = unwrap_peft(model).get_input_embeddings()
    if use_reentrant and not embeddings.weight.requires_grad:
        # The reentrant variant drops the graph of a layer whose input needs no gradient (LoRA).
        unwrap_peft(model).enable_input_require_grads()


class Actor(nn.Module):
    """A causal language model seen as a policy over packed batches.

    `with_aux_loss` adds the router losses of a mixture of experts, see `States`.
    """

    def __init__(self, model: nn.Module, *, with_aux_loss: bool = False) -> None:
        super().__init__()
        self.model = model
        causal_lm = unwrap_peft(model)
        self.top_k = experts_per_token(causal_lm) if with_aux_loss else None
        lm_head = causal_lm.get_output_embeddings()
        if type(lm_head) is not nn.Linear:
            raise ConfigError(
                f"The head of {type(causal_lm).__name__} is {type(lm_head)}, not torch's Linear: "
                "leave lm_head out of the LoRA target modules, or use a causal language model."
            )
        self.head = ChunkedHead(lm_head, LogitTransform.of(causal_lm.config.get_text_config()))

    def forward(
        self, batch: PackedBatch, temperature: float = 1.0, with_entropy: bool = False
    ) -> TokenStats:
        """Log-probs (and entropy) of the N targets at the sampling temperature."""
        assert self.head.weight is unwrap_peft(self.model).get_output_embeddings().weight, (
            "the LM head was replaced after the actor was built"
        )
        hidden_NH, aux_loss = self.states_at(batch, batch.predict_index)
        stats = self.head(
            hidden_NH, batch.targets, temperature=temperature, with_entropy=with_entropy
        )
        return TokenStats(*stats, aux_loss=aux_loss)

    def states_at(self, batch: PackedBatch, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Last hidden states of these row positions, and router losses (B,) when asked for."""
        hidden_TH, aux_loss = model_states(self.model, batch, top_k=self.top_k)
        return hidden_TH.index_select(0, positions), aux_loss

    def gradient_checkpointing_enable(self, use_reentrant: bool = False) -> None:
        """Trade compute for activation memory."""
        if self.top_k is not None:
            refuse_reentrant(use_reentrant=use_reentrant)
        enable_gradient_checkpointing(self.model, use_reentrant=use_reentrant)

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return self.head.weight.device
