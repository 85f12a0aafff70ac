"""The vocabulary of a run is the policy's; a model of another one reads samples by way of their
texts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import RewardError
from openrlhf.models.loading import load_config
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.tokenizer import TextEncoder, Tokenizer, load_tokenizer


def load_policy_tokenizer(config: PPOConfig) -> Tokenizer:
    """The run's tokenizer: the policy's, as the flags change it."""
    path = config.actor.model_name_or_path
    assert path is not None, "checked by the configuration"
    return load_tokenizer(
        path,
        chat_template=config.data.tokenizer_chat_template,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.trust_remote_code,
    )


def other_tokenizer(config: PPOConfig, path: str, own: Tokenizer) -> Tokenizer | None:
    """The tokenizer of the model at `path`; None where it has every token that the policy can
    sample, of its tokenizer `own`, under the same id: then it reads the samples as they are.
    """
    policy = config.actor.model_name_or_path
    if policy is None or path == policy:
        return None
    facts = load_config(policy, trust_remote_code=config.trust_remote_code)
    num_logits = facts.get_text_config().vocab_size
    other = load_tokenizer(
        path,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.trust_remote_code,
    )
    others = other.get_vocab()
    is_same = all(
        others.get(token) == token_id
        for token, token_id in own.get_vocab().items()
        if token_id < num_logits
    )
    return None if is_same else other


class TextReader:
    """Reads samples as a reward server would: prompt and response as one text."""

    def __init__(self, policy: Tokenizer, own: Tokenizer, *, max_len: int | None) -> None:
        """`own` is the tokenizer of the model that reads, and `max_len` the most tokens of it."""
        self.policy = policy
        self.own = own
        self.max_len = max_len
        self._encoder = TextEncoder(own)

    def read(self, experience: Experience) -> Experience:
        """The same B samples with the model's own tokens and no sampled ones among them; raises
        RewardError for a text that is too long.
        """
        samples = experience.token_ids.split(experience.seq_lengths.tolist())
        texts = self.policy.batch_decode(list(samples), skip_special_tokens=False)
        encoded: Any = self.own(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        rows = [self._encoder.with_leading_ids(ids) for ids in encoded["input_ids"]]
        longest = max(map(len, rows), default=0)
        if self.max_len is not None and longest > self.max_len:
            raise RewardError(
                f"a sample has {longest} tokens of the reward model {self.own.name_or_path}, which "
                f"reads {self.max_len}. Make --generate_max_len smaller."
            )
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
