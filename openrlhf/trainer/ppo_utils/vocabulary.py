"""The vocabulary of a run is the policy's; the other models read its tokens as they are."""

from openrlhf.config.ppo import PPOConfig
from openrlhf.models.loading import load_config
from openrlhf.utils.tokenizer import Tokenizer, load_tokenizer, tokenizer_of


def load_policy_tokenizer(config: PPOConfig) -> Tokenizer:
    """Load the run's tokenizer: the policy's, as the flags change it."""
    return tokenizer_of(config, config.policy_path)


def reads_tokens_of(config: PPOConfig, path: str, own: Tokenizer) -> bool:
    """Return True if all tokens that the policy can sample, those of `own`, have the same ids in
    the model at `path`.

    A token that only the policy knows may have an embedding there that no other token has.
    """
    policy, trust = config.policy_path, config.trust_remote_code
    if path == policy:
        return True
    sizes = [
        load_config(name, trust_remote_code=trust).get_text_config().vocab_size
        for name in (policy, path)
    ]
    others = load_tokenizer(path, trust_remote_code=trust).get_vocab()
    taken = set(others.values())

    def is_same(token: str, token_id: int) -> bool:
        has_place = token_id < sizes[1] and token_id not in taken
        return others[token] == token_id if token in others else has_place

    return all(is_same(token, i) for token, i in own.get_vocab().items() if i < sizes[0])
