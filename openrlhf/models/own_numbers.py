"""Whether rows as they are read here give a model's own numbers: those of each sequence alone, with
the attention and the head that transformers gives the family.

A family whose layers drop the boundaries of a row, whose windows stand in a mask that packed rows
do not have, or which does more behind its head, would be trained on other numbers than it is used
with.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.errors import ConfigError
from openrlhf.models.actor import Actor, PackedModel, token_stats, without_head
from openrlhf.models.packing import PACKED_ATTENTION
from openrlhf.models.vision import blank_picture
from openrlhf.utils.images import BANNED_LOGIT, Images, is_vision, placeholders_of
from openrlhf.utils.packing import PackedBatch, attention_of
from openrlhf.utils.vision_families import family_of, tower_of

LENGTHS = (13, 8)  # of the sequences that are compared
STRIDE = 7919  # a prime: tokens from all over a vocabulary
WINDOW = 4  # of sliding attention meanwhile, so that it is seen
MAX_ERROR = (0.01, 0.25)  # on average, in fp32 and in half precision
MAX_WEIGHTS_ON_CPU = 4_000_000_000  # of a model that computes with all of its layers there


@torch.no_grad()
def check_own_numbers(model: PreTrainedModel, *, scores: bool = False) -> None:
    """Raise ConfigError unless log-probs of a language model's rows, or last hidden states of one
    that `scores`, are its own. Models that read pictures see one in each sequence. Of a very large
    model on a CPU the first layers are compared.
    """
    share = 1.0
    if model.device.type == "cpu":
        share = min(MAX_WEIGHTS_ON_CPU / model.num_parameters(), 1.0)
    with _first_layers(model, share), _small_windows(model):
        (_check_states if scores else _check_logprobs)(model)


def _check_states(model: PreTrainedModel) -> None:
    batch, inputs = _sequences(model)
    with _own_attention(model):
        own = [without_head(model)(use_cache=False, **each).last_hidden_state[0] for each in inputs]
    own_TH = torch.cat(own).float()
    places_T = torch.arange(len(own_TH), device=own_TH.device)
    found_TH = PackedModel(model).states_at(batch, places_T).hidden_nH.float()
    error = ((found_TH - own_TH).abs().mean() / own_TH.abs().mean()).item()
    if not error <= _max_error(model):
        raise ConfigError(
            f"{type(model).__name__} reads rows of several sequences in a way of its own: its last "
            f"hidden states are {error:.2g} of their size off. Use another family."
        )


def _check_logprobs(model: PreTrainedModel) -> None:
    batch, inputs = _sequences(model)
    with _own_attention(model):
        own = [model(use_cache=False, **each).logits[0, 1:-1] for each in inputs]
    own_NV = torch.cat(own).float()
    own_NV[:, [*placeholders_of(model.config)]] += BANNED_LOGIT
    own_N = own_NV.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    actor = Actor(model)
    hidden_NH, error = actor.states_at(batch, batch.predict_index).hidden_nH, math.inf
    if hidden_NH.size(1) == model.get_output_embeddings().in_features:  # no projection between
        found_N, *_ = actor.head(token_stats, hidden_NH, batch.targets, 1.0, False)  # noqa: FBT003
        error = (own_N - found_N).abs().mean().item()
    if not error <= _max_error(model):
        raise ConfigError(
            f"{type(model).__name__} computes its logits in a way of its own: log-probs from its "
            f"last hidden states and its head are {error:.2g} off. Use another family."
        )


def _max_error(model: PreTrainedModel) -> float:
    return MAX_ERROR[next(model.parameters()).dtype != torch.float32]


def _sequences(model: PreTrainedModel) -> tuple[PackedBatch, list[dict[str, Tensor]]]:
    """Return sequences as one batch, and what the model itself takes of each."""
    config, size = model.config, model.config.get_text_config().vocab_size
    ids = [torch.arange(k + 1, k + length + 1) * STRIDE % size for k, length in enumerate(LENGTHS)]
    inputs = [{"input_ids": ids_T[None]} for ids_T in ids]
    batch = PackedBatch.from_sequences(ids, [torch.arange(len(ids_T)) > 1 for ids_T in ids])
    if is_vision(config):
        blank, pictures = blank_picture(config), []
        for each in inputs:
            each["input_ids"][:, 1] = config.image_token_id
            pixels = torch.linspace(-1, 1, blank.pixels.numel()).view_as(blank.pixels)
            pictures.append(Images(pixels, blank.grid))
            each |= family_of(config).inputs(pixels, blank.grid, each["input_ids"])
        token_ids = torch.cat([each["input_ids"][0] for each in inputs])
        batch = replace(batch, token_ids=token_ids, images=Images.concat(pictures))
    moved = [{name: tensor.to(model.device) for name, tensor in each.items()} for each in inputs]
    return batch.to(model.device), moved


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Give the model, but not its tower, the attention that every family defines."""
    attention = attention_of(model.config)
    own = {part: "eager" if kind == PACKED_ATTENTION else kind for part, kind in attention.items()}
    if own == attention:
        yield
        return
    model.set_attn_implementation(own)
    try:
        yield
    finally:
        model.set_attn_implementation(attention)


@contextmanager
def _small_windows(model: PreTrainedModel) -> Iterator[None]:
    """Narrow sliding attention to less than the sequences; not windows as wide as any sequence."""
    text = model.config.get_text_config()
    widest = getattr(text, "max_position_embeddings", None) or math.inf
    parts: list[Any] = [model.config, text, *model.modules()]
    held = []
    for part in parts:
        window = vars(part).get("sliding_window")
        if type(window) is int and WINDOW < window < widest:
            held.append((part, window))
            part.sliding_window = WINDOW
    try:
        yield
    finally:
        for part, window in held:
            part.sliding_window = window


@contextmanager
def _first_layers(model: PreTrainedModel, share: float) -> Iterator[None]:
    """Leave the model its first layers: this share of them, two or more."""
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    held = []
    for name, layers in list(model.named_modules()) if share < 1 else ():
        *path, last = name.split(".")
        is_list = isinstance(layers, nn.ModuleList) and len(layers) == num_layers
        if is_list and not any(part in path for part in tower_of(model.config)):
            parent = model.get_submodule(".".join(path))
            held.append((parent, last, layers))
            setattr(parent, last, layers[: max(int(num_layers * share), 2)])
    try:
        yield
    finally:
        for parent, last, layers in held:
            setattr(parent, last, layers)
