"""The policy: log-probs and entropy of target tokens from any causal language model, packed.

Logits of a whole batch never exist: the LM head is applied in chunks, only at positions that
predict a target. Exports use `Actor.model`, the plain Hugging Face model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from openrlhf.algorithms.tokens import VocabShard, chunked_logprobs
from openrlhf.errors import ConfigError
from openrlhf.models.packing import PackedRow, ReadStates, SharedRow
from openrlhf.models.support import num_experts_per_token
from openrlhf.models.vision import vision_inputs
from openrlhf.utils.context_parallel import ContextGroup
from openrlhf.utils.images import BANNED_LOGIT, is_vision, placeholders_of
from openrlhf.utils.packing import PackedBatch, base_model_of, is_padded


class TokenStats(NamedTuple):
    """Output of the policy for the target tokens of a batch.

    Example: `TokenStats(logprobs=tensor([-0.1, -2.3]), is_top=tensor([True, False]))`
    """

    logprobs: Tensor  # (N,) fp32
    is_top: Tensor  # (N,) bool: no token is likelier than the target
    entropy: Tensor | None = None  # (N,) fp32, of the temperature-scaled distribution
    aux_loss: Tensor | None = None  # (B,) router loss of each sequence, of a mixture of experts


class ChunkedHead(nn.Module):
    """An LM head that is read in chunks of tokens, by one of the functions below and of the other
    modules. A module of its own, so that ZeRO-3 gathers its parameters while it is read.

    With a `shard`, the parameters are this rank's rows of the head.
    """

    shard: VocabShard | None = None

    def __init__(self, lm_head: nn.Module, config: PretrainedConfig) -> None:
        super().__init__()
        self.weight = lm_head.weight
        self.scale, self.softcap = logit_transform(config.get_text_config())
        if banned := placeholders_of(config):
            # No engine samples them, for a sampled one has no pixels: so log-probs leave them out.
            bias_V = torch.zeros(len(lm_head.weight), device=lm_head.weight.device)
            bias_V[[*banned]] = BANNED_LOGIT
            self.register_buffer("bias", bias_V, persistent=False)
        else:
            self.register_parameter("bias", getattr(lm_head, "bias", None))

    def forward(self, read: Callable[..., tuple[Tensor, ...]], *args: object) -> tuple[Tensor, ...]:
        """Return the result of `read` for the head, last hidden states and other arguments."""
        return read(self, *args)


def logit_transform(config: PretrainedConfig) -> tuple[float, float | None]:
    """Return scale and soft cap of a family's logits, which follow its LM head in this order.

    A family that means something else by these fields is found when its model is loaded.
    """
    caps = ("final_logit_softcapping", "logits_soft_cap")
    softcap = next(filter(None, (getattr(config, name, None) for name in caps)), None)
    # HyperCLOVA X multiplies by what Granite divides by.
    own = ("logits_scaling",) if config.model_type == "hyperclovax" else ()
    for name in ("logit_scale", "lm_head_multiplier", *own):
        if getattr(config, name, None):
            return float(getattr(config, name)), softcap
    return 1.0 / (getattr(config, "logits_scaling", None) or 1.0), softcap


def token_stats(
    head: ChunkedHead, hidden_NH: Tensor, targets_N: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, ...]:
    """Return log-probs of the targets, (N,) fp32, whether each is the likeliest token, (N,) bool,
    and when asked the entropy, (N,) fp32.
    """
    logprobs_N, entropy_N, is_top_N = chunked_logprobs(
        hidden_NH,
        head.weight,
        targets_N,
        bias_V=head.bias,
        temperature=temperature,
        softcap=head.softcap,
        logit_scale=head.scale,
        with_entropy=with_entropy,
        shard=head.shard,
    )
    stats = (logprobs_N, is_top_N)
    return stats if entropy_N is None else (*stats, entropy_N)


def without_head(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that computes its hidden states."""
    base = model.base_model
    return base if base is not model else model.get_submodule("model")


def padded_states(
    model: PreTrainedModel, batch: PackedBatch, options: Mapping[str, bool]
) -> tuple[Tensor, Sequence[Tensor]]:
    """Run a model over rows of one sequence each, L columns, padded on the right; return what a
    packed row would: hidden states (T, H), and router logits (T, E) of each layer.

    In one forward, whatever the batch: ranks of ZeRO-3 must make equally many.
    """
    tokens_BL = pad_sequence(batch.token_ids.split(batch.seq_lengths), batch_first=True)
    lengths_B = torch.tensor(batch.seq_lengths, device=tokens_BL.device)
    is_token_BL = torch.arange(tokens_BL.size(1), device=tokens_BL.device) < lengths_B[:, None]
    output = without_head(model)(input_ids=tokens_BL, attention_mask=is_token_BL.long(), **options)
    logits = getattr(output, "router_logits", None) or ()
    is_token_T = is_token_BL.flatten()
    return output.last_hidden_state[is_token_BL], [each[is_token_T] for each in logits]


def load_balancing_losses(
    router_logits: Sequence[Tensor], seq_lengths: Sequence[int], *, top_k: int
) -> Tensor:
    """Return E * sum over experts of (choices of it per token) * (its mean router probability),
    (B,): of each sequence, for a loss over several would be another one for every cut of a step.

    `router_logits` holds (T, E) of each layer; the layers of a sequence count as one long row of
    its tokens. A loss is `top_k` when all experts are used evenly, and more otherwise (arXiv
    2101.03961, equations 4 to 6; for each sequence, 2412.19437, equations 17 to 20). Only the
    probabilities have a gradient.
    """
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


class PackedModel(nn.Module):
    """A Hugging Face model read at chosen places of packed rows.

    With `top_k`, the experts a token is sent to, it gives router losses too. The ranks of `context`
    share every row: the strategy that prepares the model sets it.
    """

    context: ContextGroup | None = None

    def __init__(self, model: nn.Module, *, with_aux_loss: bool = False) -> None:
        super().__init__()
        self.model = model
        config = base_model_of(model).config
        self.top_k = num_experts_per_token(config) if with_aux_loss else None

    def states_at(self, batch: PackedBatch, positions_N: Tensor) -> ReadStates:
        """Return hidden states of these row positions, and router losses (B,) when asked for."""
        model, own = base_model_of(self.model), None
        options = {"use_cache": False}
        if self.top_k is not None:
            options["output_router_logits"] = True
        if is_padded(model):
            hidden_TH, router = padded_states(model, batch, options)
        else:
            sees: dict[str, Tensor] = {}
            if is_vision(model.config):
                batch, sees = vision_inputs(model, batch)
            row = PackedRow(batch.seq_lengths, batch.cu_seqlens)
            token_ids, position_ids = batch.token_ids, batch.position_ids
            if self.context is not None:
                row = SharedRow.share(batch, self.context)
                own, (token_ids, position_ids) = row.own, row.slice_of(batch)
            output = without_head(model)(
                input_ids=token_ids[None],
                **{"position_ids": position_ids[None], **options, **sees},
                **row.kwargs(model.config._attn_implementation),
            )
            hidden_TH = output.last_hidden_state[0]
            router = getattr(output, "router_logits", None) or ()
        if own is not None:  # router logits of the whole row
            index_S = own.positions_S.to(hidden_TH.device)
            rows = [own.spread(logits_SE, index_S, own.padded_length) for logits_SE in router]
            router = [logits_PE[: own.num_tokens] for logits_PE in rows]
        aux_loss = None
        if self.top_k is not None:
            aux_loss = load_balancing_losses(router, batch.seq_lengths, top_k=self.top_k)
        if own is None:
            return ReadStates(hidden_TH.index_select(0, positions_N), aux_loss)
        here_n, index_n = own.find(positions_N)
        if not len(index_n):
            index_n = index_n.new_zeros(1)
        return ReadStates(hidden_TH[index_n], aux_loss, own, here_n, len(positions_N))

    def gradient_checkpointing_enable(self, use_reentrant: bool = False) -> None:
        """Recompute each layer's activations in the backward pass. Raise ConfigError for reentrant
        passes over layers that read the keys of others.
        """
        config = base_model_of(self.model).config.get_text_config()
        if use_reentrant and getattr(config, "num_kv_shared_layers", 0):
            raise ConfigError(
                f"--gradient_checkpointing_use_reentrant: layers of {config.model_type} share keys "
                "and values, and gradients would be wrong. Leave it out."
            )
        self.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
        model = base_model_of(self.model)
        if use_reentrant and not model.get_input_embeddings().weight.requires_grad:
            # It drops the graph of a layer whose input needs no gradient (LoRA).
            model.enable_input_require_grads()


class Actor(PackedModel):
    """A causal language model seen as a policy over packed batches."""

    reads_whole_head = False

    def __init__(self, model: nn.Module, *, with_aux_loss: bool = False) -> None:
        super().__init__(model, with_aux_loss=with_aux_loss)
        causal_lm = base_model_of(model)
        lm_head = causal_lm.get_output_embeddings()
        if type(lm_head) is not nn.Linear:
            raise ConfigError(
                f"The head of {type(causal_lm).__name__} is {type(lm_head)}, not torch's Linear: "
                "leave lm_head out of the LoRA target modules, or use a causal language model."
            )
        self.head = ChunkedHead(lm_head, causal_lm.config)

    def forward(
        self, batch: PackedBatch, temperature: float = 1.0, with_entropy: bool = False
    ) -> TokenStats:
        """Return log-probs (and entropy) of the N targets at the sampling temperature."""
        states = self.states_at(batch, batch.predict_index)
        targets_n = states.select(batch.targets)
        stats = self.head(token_stats, states.hidden_nH, targets_n, temperature, with_entropy)
        return TokenStats(*map(states.spread, stats), aux_loss=states.aux_loss)
