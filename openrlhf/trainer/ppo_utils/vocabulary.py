"""The vocabulary of a run is the policy's; a model of another one reads samples by way of their
texts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openrlhf.config.ppo import PPOConfig
from openrlhf.models.loading import load_config
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer, load_tokenizer


def load_policy_tokenizer(config: PPOConfig) -> Tokenizer:
    """Load the run's tokenizer: the policy's, as the flags change it."""
    path = config.actor.model_name_or_path
    assert path is not None, "checked by the configuration"
    return load_tokenizer(
        path,
        chat_template=config.data.tokenizer_chat_template,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.trust_remote_code,
    )


def other_tokenizer(config: PPOConfig, path: str, own: Tokenizer) -> Tokenizer | None:
    """Return the tokenizer of the model at `path`; None if all tokens that the policy can sample,
    those of `own`, have the same ids there: then it reads the samples as they are.

    A token that only the policy knows may have an embedding there that no other token has.
    """
    policy = config.actor.model_name_or_path
    if policy is None or path == policy:
        return None
    sizes = [
        load_config(name, trust_remote_code=config.trust_remote_code).get_text_config().vocab_size
        for name in (policy, path)
    ]
    other = load_tokenizer(
        path,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.trust_remote_code,
    )
    others = other.get_vocab()
    taken = set(others.values())

    def is_same(token: str, token_id: int) -> bool:
        has_place = token_id < sizes[1] and token_id not in taken
        return others[token] == token_id if token in others else has_place

    sampled = [(token, i) for token, i in own.get_vocab().items() if i < sizes[0]]
    return None if all(is_same(token, token_id) for token, token_id in sampled) else other


class TextReader:
    """Reads samples as a reward server would: prompt and response as one text."""

    def __init__(self, policy: Tokenizer, own: Tokenizer, *, max_len: int | None) -> None:
        """`own` is the tokenizer of the model that reads, and `max_len` the most tokens of it."""
        self.policy = policy
        self.own = own
        self.max_len = max_len
        self._encoder = TextEncoder(own)

    def read(self, experience: Experience) -> Experience:
        """Return the same B samples with the model's own tokens and no sampled ones among them; see
        `is_too_long` for what it cannot read.
        """
        samples = experience.token_ids.split(experience.seq_lengths.tolist())
        texts = self.policy.batch_decode(list(samples), skip_special_tokens=False)
        encoded: Any = self.own(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        rows = [self._encoder.with_leading_ids(ids) for ids in encoded["input_ids"]]
        token_ids = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        return replace(
            experience,
            seq_lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
            num_actions=torch.zeros(len(rows), dtype=torch.int64),
            token_ids=token_ids,
            action_mask=torch.zeros(len(token_ids), dtype=torch.bool),
            rollout_logprobs=experience.rollout_logprobs[:0],
            weight_versions=experience.weight_versions[:0],
        )

    def is_too_long(self, read: Experience) -> Tensor:
        """Return the samples of more tokens than the model reads, (B,) bool."""
        limit = torch.inf if self.max_len is None else self.max_len
        return read.seq_lengths > limit
