"""The vocabulary of a run is the policy's; a model of another one reads samples by way of their
texts.
"""

from openrlhf.config.ppo import PPOConfig
from openrlhf.models.loading import load_config
from openrlhf.utils.tokenizer import Tokenizer, load_tokenizer


def load_policy_tokenizer(config: PPOConfig) -> Tokenizer:
    """Load the run's tokenizer: the policy's, as the flags change it."""
    return load_tokenizer(
        config.policy_path,
        chat_template=config.data.tokenizer_chat_template,
        trust_remote_code=config.trust_remote_code,
    )


def other_tokenizer(config: PPOConfig, path: str, own: Tokenizer) -> Tokenizer | None:
    """Return the tokenizer of the model at `path`; None if all tokens that the policy can sample,
    those of `own`, have the same ids there: then it reads the samples as they are.

    A token that only the policy knows may have an embedding there that no other token has.
    """
    policy = config.policy_path
    if path == policy:
        return None
    sizes = [
        load_config(name, trust_remote_code=config.trust_remote_code).get_text_config().vocab_size
        for name in (policy, path)
    ]
    other = load_tokenizer(path, trust_remote_code=config.trust_remote_code)
    others = other.get_vocab()
    taken = set(others.values())

    def is_same(token: str, token_id: int) -> bool:
        has_place = token_id < sizes[1] and token_id not in taken
        return others[token] == token_id if token in others else has_place

    sampled = [(token, i) for token, i in own.get_vocab().items() if i < sizes[0]]
    return None if all(is_same(token, token_id) for token, token_id in sampled) else other
