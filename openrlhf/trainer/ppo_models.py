"""The models that an RL run names, looked at before any is loaded: whether they are there, have the
parts that are used, and mean the same by a token.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from openrlhf.config.base import Caution
from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.problems import Gathered
from openrlhf.engines.vllm_cpu import check_head_size
from openrlhf.errors import ConfigError
from openrlhf.models.families import (
    head_size,
    num_positions,
    refuse_shared_rows,
    refuse_split_layers,
    refuse_token_budget,
)
from openrlhf.models.loading import is_value_model, load_config
from openrlhf.models.router_loss import check_has_experts
from openrlhf.models.value_head import RewardScale
from openrlhf.trainer.ppo_utils.vocabulary import other_tokenizer
from openrlhf.utils.adapter_folder import base_of_adapter, refuse_adapter
from openrlhf.utils.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_models(config: PPOConfig, *, has_engines: bool) -> int:
    """Raise ConfigError for models that cannot be used; return the policy's vocabulary size."""
    path = config.actor.model_name_or_path
    assert path is not None, "checked by the configuration"
    gathered = Gathered()
    load = partial(load_config, trust_remote_code=config.trust_remote_code)
    critic = (config.critic_source or path,) if config.has_critic else ()
    readers = (path, *config.reward.model_paths, *critic)
    found = {name: gathered.attempt(partial(load, name)) for name in named_models(config)}
    for name, facts in found.items():
        if facts is None:
            continue
        if config.train.dynamic_batch_enable:
            gathered.attempt(partial(refuse_token_budget, facts, name))
        gathered.attempt(partial(refuse_shared_rows, facts, name, config.ds))
        gathered.attempt(partial(refuse_split_layers, facts, name, config.ds))
        if name in config.reward.model_paths:
            gathered.attempt(partial(_check_head, config, name))
        if name in readers:
            gathered.attempt(partial(_check_positions, config, name, facts))
    policy = found[path]
    if policy is not None and has_engines:
        instead = "--vllm_num_engines 0"
        gathered.attempt(partial(refuse_adapter, path, "--pretrain"))
        gathered.attempt(partial(check_head_size, head_size(policy), path, instead=instead))
    if policy is not None and config.actor.aux_loss_coef > 0:
        gathered.attempt(partial(check_has_experts, policy, path))
    gathered.raise_if_any()
    assert policy is not None, "or else problems were raised"
    return int(policy.get_text_config().vocab_size)


def named_models(config: PPOConfig) -> list[str]:
    """Paths of policy, critic and reward models, each once."""
    paths = (
        config.actor.model_name_or_path,
        config.critic.model_name_or_path,
        *config.reward.model_paths,
    )
    return list(dict.fromkeys(filter(None, paths)))


def check_tokens(config: PPOConfig, tokenizer: Tokenizer) -> list[str]:
    """Return cautions about reward models of another vocabulary; refuse such a critic."""
    source = config.critic_source
    if config.has_critic and source and other_tokenizer(config, source, tokenizer) is not None:
        raise ConfigError(
            f"The critic would start from {source}, which has another vocabulary than --pretrain. "
            f"Type --critic_pretrain {config.actor.model_name_or_path}, or a model of its family."
        )
    return [
        Caution(
            f"--reward_pretrain {path} has another vocabulary than --pretrain: it reads samples as "
            "text"
        )
        for path in config.reward.model_paths
        if other_tokenizer(config, path, tokenizer) is not None
    ]


def _check_head(config: PPOConfig, path: str) -> None:
    """Refuse a reward model without a value head, or without a scale to normalise by."""
    if base_of_adapter(path) is not None:  # both are known when it is merged
        return
    facts = load_config(path, trust_remote_code=config.trust_remote_code)
    if not is_value_model(facts):
        raise ConfigError(
            f"--reward_pretrain {path} has no value head. Give a reward model, such as train_rm "
            "makes."
        )
    if config.reward.normalize_enable:
        RewardScale.of(facts)


def _check_positions(config: PPOConfig, name: str, facts: PretrainedConfig) -> None:
    """Refuse lengths of prompt and response that a model cannot read as a whole."""
    limit = num_positions(facts)
    prompt, response = config.data.prompt_max_len, config.rollout.max_new_tokens
    if limit is not None and prompt + response > limit:
        remedy = f"{limit - response} or a smaller --generate_max_len"
        if response >= limit:  # no prompt is short enough
            remedy = f"{limit // 2} --generate_max_len {limit - limit // 2}"
        raise ConfigError(
            f"--prompt_max_len {prompt} + --generate_max_len {response} is more than the "
            f"{limit} positions of the model {name}. Type --prompt_max_len {remedy}."
        )
