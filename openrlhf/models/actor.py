"""The policy: log-probs and entropy of target tokens from any causal language model, packed.

Logits of a whole batch never exist: the LM head is applied in chunks, only at positions that
predict a target. Exports use `Actor.model`, the plain Hugging Face model; the actor adds no entry
to a state dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.algorithms.tokens import VocabShard, chunked_logprobs
from openrlhf.errors import ConfigError
from openrlhf.models.context_attention import ReadStates, SharedRow
from openrlhf.models.packing import PACKED_ATTENTION, PackedRow
from openrlhf.models.router_loss import (
    experts_per_token,
    load_balancing_losses,
    refuse_reentrant,
)
from openrlhf.utils.context_parallel import ContextGroup, RowSlice
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
    """The LM head as log-probs in chunks; registers its Parameter so that ZeRO-3 gathers it.

    With a `shard`, the parameters are this rank's rows of the head.
    """

    can_be_split = True
    shard: VocabShard | None = None

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
            shard=self.shard,
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
    router_logits: Sequence[Tensor] | None = None  # (T, E) of each layer


def model_states(model: nn.Module, batch: PackedBatch, *, with_router: bool = False) -> States:
    """Last hidden states, and on request the router logits of a mixture of experts."""
    model = unwrap_peft(model)
    if is_padded(model):
        return padded_states(model, batch, with_router=with_router)
    return row_states(
        model, PackedRow.of(batch), batch.token_ids, batch.position_ids, with_router=with_router
    )


def row_states(
    model: PreTrainedModel,
    row: PackedRow,
    token_ids_T: Tensor,
    position_ids_T: Tensor,
    *,
    with_router: bool,
) -> States:
    """Run a model over a packed row, or over this rank's slice of one."""
    is_packed_attention = model.config._attn_implementation == PACKED_ATTENTION
    output = without_head(model)(
        input_ids=token_ids_T[None],
        position_ids=position_ids_T[None],
        use_cache=False,
        **({"output_router_logits": True} if with_router else {}),
        **(row.kwargs() if is_packed_attention else row.flash_kwargs()),
    )
    if is_packed_attention and not row.layers_seen:
        raise ConfigError(
            f"{type(model).__name__} does not hand sequence boundaries to its attention: "
            "it cannot be trained packed."
        )
    return States(output.last_hidden_state[0], output.router_logits if with_router else None)


def padded_states(model: PreTrainedModel, batch: PackedBatch, *, with_router: bool) -> States:
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
        **({"output_router_logits": True} if with_router else {}),
    )
    hidden_TH = output.last_hidden_state[is_token_BL]
    if not with_router:
        return States(hidden_TH)
    return States(hidden_TH, [logits[is_token_BL.flatten()] for logits in output.router_logits])


def shared_states(
    model: PreTrainedModel, batch: PackedBatch, context: ContextGroup, *, with_router: bool
) -> tuple[RowSlice, States]:
    """Hidden states of this rank's slice of a row, and router logits of all of it."""
    row = SharedRow.share(batch, context)
    hidden_SH, logits = row_states(model, row, *row.slice_of(batch), with_router=with_router)
    own = row.own
    if logits is not None:
        index_S = own.positions_S.to(hidden_SH.device)
        rows = [own.spread(logits_SE, index_S, own.padded_length) for logits_SE in logits]
        logits = [logits_PE[: own.num_tokens] for logits_PE in rows]
    return own, States(hidden_SH, logits)


def enable_gradient_checkpointing(model: nn.Module, *, use_reentrant: bool) -> None:
    """Recompute each layer's activations in the backward pass."""
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    embeddings = unwrap_peft(model).get_input_embeddings()
    if use_reentrant and not embeddings.weight.requires_grad:
        # The reentrant variant drops the graph of a layer whose input needs no gradient (LoRA).
        unwrap_peft(model).enable_input_require_grads()


class PackedModel(nn.Module):
    """A Hugging Face model read at chosen places of packed rows.

    With `top_k`, the experts a token is sent to, it gives router losses too. The ranks of `context`
    share every row: the strategy that prepares the model sets it.
    """

    context: ContextGroup | None = None

    def __init__(self, model: nn.Module, *, with_aux_loss: bool = False) -> None:
        super().__init__()
        self.model = model
        self.top_k = experts_per_token(unwrap_peft(model)) if with_aux_loss else None

    def states_at(self, batch: PackedBatch, positions_N: Tensor) -> ReadStates:
        """Last hidden states of these row positions, and router losses (B,) when asked for."""
        with_router = self.top_k is not None
        own = None
        if self.context is None:
            states = model_states(self.model, batch, with_router=with_router)
        else:
            own, states = shared_states(
                unwrap_peft(self.model), batch, self.context, with_router=with_router
            )
        aux_loss = None
        if self.top_k is not None:
            assert states.router_logits is not None
            aux_loss = load_balancing_losses(
                states.router_logits, batch.seq_lengths, top_k=self.top_k
            )
        if own is None:
            return ReadStates(states.hidden_TH.index_select(0, positions_N), aux_loss)
        return ReadStates.of_slice(own, states.hidden_TH, positions_N, aux_loss)

    def gradient_checkpointing_enable(self, use_reentrant: bool = False) -> None:
        """Trade compute for activation memory."""
        if self.top_k is not None:
            refuse_reentrant(use_reentrant=use_reentrant)
        enable_gradient_checkpointing(self.model, use_reentrant=use_reentrant)


class Actor(PackedModel):
    """A causal language model seen as a policy over packed batches."""

    def __init__(self, model: nn.Module, *, with_aux_loss: bool = False) -> None:
        super().__init__(model, with_aux_loss=with_aux_loss)
        causal_lm = unwrap_peft(model)
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
        states = self.states_at(batch, batch.predict_index)
        stats = self.head(
            states.hidden_nH,
            states.select(batch.targets),
            temperature=temperature,
            with_entropy=with_entropy,
        )
        return TokenStats(*map(states.spread, stats), aux_loss=states.aux_loss)

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return self.head.weight.device
