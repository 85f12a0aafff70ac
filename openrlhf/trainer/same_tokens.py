"""Two models that are compared token by token must mean the same by a token."""

from __future__ import annotations

from operator import itemgetter

from openrlhf.errors import ConfigError
from openrlhf.models.loading import load_config
from openrlhf.utils.tokenizer import Tokenizer, load_tokenizer


def check_same_tokens(own: Tokenizer, path: str, flag: str, *, remote_code: bool = False) -> None:
    """Raise ConfigError unless the model at `path`, named by `flag`, has the tokens of `own`.

    It may have more logits than the other model: those beyond the tokens are padding.
    """
    check_has_logits(own, path, flag, remote_code=remote_code)
    tokens = own.get_vocab()
    others = load_tokenizer(path, trust_remote_code=remote_code).get_vocab()
    remedy = f"Choose a {flag} of the same family, with the same vocabulary."
    if len(tokens) != len(others):
        raise ConfigError(
            f"{flag} {path} has {len(others)} tokens, --pretrain {len(tokens)}. {remedy}"
        )
    for token, token_id in sorted(tokens.items(), key=itemgetter(1)):
        if others.get(token) != token_id:
            raise ConfigError(
                f"{flag} {path} and --pretrain differ in vocabulary: token {token!r} is "
                f"{others.get(token, 'nothing')} there, {token_id} here. {remedy}"
            )


def check_has_logits(own: Tokenizer, path: str, flag: str, *, remote_code: bool = False) -> None:
    """Raise ConfigError unless the model at `path` has a logit for every token.

    Tokens added to the vocabulary are not counted: some families add ones that no model has.
    """
    num_logits = load_config(path, trust_remote_code=remote_code).get_text_config().vocab_size
    if num_logits < own.vocab_size:
        raise ConfigError(
            f"{flag} {path} has {num_logits} logits for {own.vocab_size} tokens. "
            "Use the model's own tokenizer, or a model of the same family."
        )
