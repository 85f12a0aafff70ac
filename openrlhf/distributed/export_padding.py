"""The token that texts are padded with before a reward model scores them.

Transformers reads a score at the last token that is not the config's pad id. Where that id also
ends texts, or the tokenizer pads with another, padded batches and whole texts get the scores of
other tokens than were trained. An exported model therefore names a pad id that ends no text.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from openrlhf.distributed.weights import base_model_of
from openrlhf.utils.logging import warn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

NEW_PAD = "<|pad|>"
_PADS_TEXT = re.compile(r"(?!.*(image|vision|video|audio)).*pad", re.IGNORECASE)


@contextmanager
def scorable_padding(
    hf_model: nn.Module, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[PreTrainedTokenizerBase | None]:
    """A block in which a model with a scalar head has a config, and answers a tokenizer, whose pad
    id ends no text; any other model is left as it is.

    Where no such id is to be had the config has none: transformers then scores single texts only.
    """
    config = base_model_of(hf_model).config
    if "value_head_prefix" not in config.to_dict():
        yield tokenizer
        return
    if tokenizer is not None:
        tokenizer = padded_apart(tokenizer, config)
    parts = {id(part): part for part in (config, config.get_text_config())}.values()
    before = [part.pad_token_id for part in parts]
    pad_id = config.get_text_config().pad_token_id if tokenizer is None else tokenizer.pad_token_id
    for part in parts:
        part.pad_token_id = None if pad_id in end_ids(config, tokenizer) else pad_id
    try:
        yield tokenizer
    finally:
        for part, own in zip(parts, before, strict=True):
            part.pad_token_id = own


def padded_apart(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig
) -> PreTrainedTokenizerBase:
    """The tokenizer with a pad token that ends no text: its own if it can be, else one it has and
    texts do not end with, else a new one where the model has an embedding to spare.
    """
    ends = end_ids(config, tokenizer)
    if tokenizer.pad_token_id not in (None, *ends):
        return tokenizer
    tokenizer, room = copy.deepcopy(tokenizer), config.get_text_config().vocab_size
    vocabulary = tokenizer.get_vocab()
    special = [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), NEW_PAD]
    named = [token for token in special if _PADS_TEXT.match(token)]
    for token in (tokenizer.unk_token, *named, tokenizer.bos_token):
        if vocabulary.get(token, room) < room and vocabulary[token] not in ends:
            tokenizer.pad_token = token
            return tokenizer
    if len(tokenizer) < room:
        tokenizer.add_special_tokens({"pad_token": NEW_PAD})
        return tokenizer
    warn(
        f"the tokenizer has no pad token but {tokenizer.pad_token}, which ends texts: Transformers "
        "scores single texts with this model, and refuses batches."
    )
    return tokenizer


def end_ids(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Ids that config and tokenizer name as ends."""
    named = config.get_text_config().eos_token_id
    ends = list(named) if isinstance(named, (list, tuple)) else [named]
    if tokenizer is not None:
        ends.append(tokenizer.eos_token_id)
    return {token_id for token_id in ends if token_id is not None}
