"""Whether a policy says what the model under it says: told by a few tokens, when it is loaded.

Log-probs are computed from last hidden states and the LM head, in chunks. A family that does more
between the two, or lets a token see those to its right, would be trained on other numbers than it
is used with, without an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor
from openrlhf.models.packing import PACKED_ATTENTION
from openrlhf.utils.packable import is_padded
from openrlhf.utils.packing import PackedBatch

logger = logging.getLogger(__name__)

NUM_TOKENS = 8
STRIDE = 7919  # a prime: tokens from all over a vocabulary
# How far log-probs may lie from the model's own, on average: rounding, of 16 bits too.
MAX_ERROR_FP32, MAX_ERROR_HALF = 0.01, 0.25
# And before another last token: experts compute with others then, and round otherwise.
MAX_AHEAD_FP32, MAX_AHEAD_HALF = 1e-4, 0.1
MAX_WEIGHTS_ELSEWHERE = 4_000_000_000  # of a model on a CPU that will not run there: it would wait


def check_own_logits(model: PreTrainedModel, *, runs_on: str) -> None:
    """Compare with `model(...).logits`; raises ConfigError.

    Parameters that ZeRO-3 has split, kernels that only work where the model will be (`runs_on`, a
    type of device), and a large model that is not there yet cannot be looked at: no check.
    """
    weights = list(model.parameters())
    if any(hasattr(weight, "ds_id") or weight.is_meta for weight in weights):
        return
    is_elsewhere = model.device.type != runs_on
    if is_elsewhere and sum(weight.numel() for weight in weights) > MAX_WEIGHTS_ELSEWHERE:
        return
    actor = Actor(model)
    try:
        ahead, error = _errors(actor, model)
    except ConfigError:
        raise
    except Exception as reason:
        if not is_elsewhere:
            raise
        logger.warning("%s was not compared with its own logits: %s", type(model).__name__, reason)
        return
    is_fp32 = weights[0].dtype == torch.float32
    name = type(model).__name__
    if not ahead <= (MAX_AHEAD_FP32 if is_fp32 else MAX_AHEAD_HALF):
        raise ConfigError(f"{name}: its tokens see those to their right. Use a causal model.")
    if not error <= (MAX_ERROR_FP32 if is_fp32 else MAX_ERROR_HALF):
        raise ConfigError(
            f"{name} computes its logits in a way of its own: log-probs from its last hidden "
            f"states and its head are {error:.2g} off. Use another family."
        )


@torch.no_grad()
def _errors(actor: Actor, model: PreTrainedModel) -> tuple[float, float]:
    """Mean difference that another last token makes before it, and of the actor from the model."""
    num_known = model.config.get_text_config().vocab_size
    tokens_BT = (torch.arange(1, NUM_TOKENS + 1) * STRIDE % num_known).repeat(2, 1)
    tokens_BT[1, -1] = (tokens_BT[1, -1] + 1) % num_known
    is_target_T = torch.arange(NUM_TOKENS) > 0
    batch = PackedBatch.from_sequences(list(tokens_BT), [is_target_T] * 2).to(model.device)
    tokens_BT = tokens_BT.to(model.device)
    with _plainly(model):
        said_BTV: Tensor = model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]
        hidden_NH = actor.states_at(batch, batch.predict_index).hidden_nH
        if hidden_NH.size(1) != model.get_output_embeddings().in_features:
            return 0.0, math.inf  # a projection stands between the two
        ours_N, *_ = actor.head(hidden_NH, batch.targets, temperature=1.0, with_entropy=False)
    said_BTV = said_BTV.float().log_softmax(-1)
    theirs_N = said_BTV.gather(-1, tokens_BT[:, 1:, None]).flatten()
    ahead = (said_BTV[0] - said_BTV[1]).abs().mean()
    return ahead.item(), (theirs_N - ours_N).abs().mean().item()


@contextmanager
def _plainly(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout, and with an attention that any device has."""
    was_training, attention = model.training, model.config._attn_implementation
    is_packed = not is_padded(model)
    model.eval()
    if is_packed:
        model.set_attn_implementation(PACKED_ATTENTION)
    try:
        yield
    finally:
        model.train(was_training)
        if is_packed:
            model.set_attn_implementation(attention)
