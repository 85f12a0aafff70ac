"""The inputs of an RL run before anything heavy starts: tokenizer, prompts, rewards, arithmetic.
Its models are looked at too: they must have the parts that are used and mean the same by a token.

Everything a user can get wrong in data, paths and reward code is found here, before a model is
loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.command_data import EVALUATION, PRETRAIN, TRAINING, ppo_data
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.datasets.tokenized import news, repeats
from openrlhf.distributed.topology import Topology
from openrlhf.engines.base import SamplingSettings
from openrlhf.engines.vllm_cpu import check_head_size
from openrlhf.engines.vllm_engine import check_vllm_is_installed
from openrlhf.errors import ConfigError, Gathered
from openrlhf.models.loading import check_value_model, load_config, read_configs
from openrlhf.models.support import check_engine_split, num_positions
from openrlhf.models.value_head import reward_mean_and_std
from openrlhf.rewards.base import TRUNCATED_COLUMN, RewardSource
from openrlhf.rewards.remote import RemoteReward
from openrlhf.rewards.workers import FunctionPool
from openrlhf.rollout.agents.worker import load_agent
from openrlhf.trainer.ppo_utils.evaluation import pass_rate_names
from openrlhf.trainer.ppo_utils.replay_buffer import num_updates_per_rollout
from openrlhf.utils.adapter_folder import base_of_adapter, refuse_adapter
from openrlhf.utils.logging import notice, say_notices
from openrlhf.utils.own_functions import ESTIMATOR, POLICY_LOSS, check_function
from openrlhf.utils.tokenizer import (
    Tokenizer,
    TokenTexts,
    check_stop_ids,
    eos_token_ids,
    load_tokenizer,
    tokenizer_of,
    unused_sampling,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INSTEAD_OF_VLLM = "--vllm_num_engines 0: then the policy generates itself"


@dataclass(frozen=True)
class RunInputs:
    """Checked inputs of a run."""

    run_dir: Path
    tokenizer: Tokenizer
    token_texts: TokenTexts
    prompts: PromptDataset
    eval_prompts: PromptDataset | None
    texts: SFTDataset | None  # pre-training text that is mixed in
    reward_source: RewardSource | None  # a function file or servers; None: local models
    sampling: SamplingSettings
    eval_sampling: SamplingSettings
    updates: list[int]  # optimizer steps of every rollout batch
    pass_rate: str | None  # by which evaluations are compared; None: there are none
    vocab_size: int


def prepare_inputs(
    config: PPOConfig, *, has_engines: bool, reward_source: RewardSource | None = None
) -> RunInputs:
    """Return what `gather_inputs` does and make the run folder; raise ConfigError or DataError with
    all problems.
    """
    gathered = Gathered()
    inputs = gather_inputs(config, gathered, has_engines=has_engines, reward_source=reward_source)
    if gathered.problems and inputs is not None and inputs.reward_source is not None:
        inputs.reward_source.close()
    gathered.raise_if_any()
    assert inputs is not None, "or else problems were raised"
    inputs.run_dir.mkdir(parents=True, exist_ok=True)
    return inputs


def gather_inputs(
    config: PPOConfig,
    gathered: Gathered,
    *,
    has_engines: bool,
    reward_source: RewardSource | None = None,
) -> RunInputs | None:
    """Load and check tokenizer, prompts and reward source; note the problems of all, and return
    what could be read, None without a policy, a tokenizer or prompts.

    `has_engines`: vLLM generates, and must be installed; else the policy itself does. Without a
    `reward_source` that is open already, that of the config is opened.
    """
    run_dir = Path(config.ckpt.output_dir)
    _check_code(config, gathered, has_engines=has_engines)
    policy = check_models(config, gathered, has_engines=has_engines)
    tokenizer = gathered.attempt(lambda: tokenizer_of(config, config.policy_path))
    if tokenizer is not None:
        gathered.attempt(lambda: check_tokens(config, tokenizer))
    prompts, eval_prompts, texts = _data(config, tokenizer, policy, gathered)
    compared = gathered.attempt(lambda: pass_rate(config, eval_prompts))
    log_dir = None if gathered.problems else run_dir / "logs"  # a refused run leaves no folder
    open_source = partial(open_reward_source, config, log_dir=log_dir)
    source = reward_source or gathered.attempt(open_source)
    for data in filter(None, (prompts, eval_prompts)):
        if source is not None:
            gathered.attempt(partial(source.check, [TRUNCATED_COLUMN, *data[0].columns]))
    if policy is None or tokenizer is None or prompts is None:
        if source is not None:
            source.close()
        return None
    rollout, held_out, trust = config.rollout, config.eval, config.trust_remote_code
    say_notices([*unused_sampling(config.policy_path, rollout.token_choice), *prompts.notices])
    for data, about in ((eval_prompts, "evaluation: "), (texts, "--pretrain_data: ")):
        if data is not None:
            told = [*news(data.notices, prompts.notices), *repeats(data, prompts)]
            say_notices(told, about=about)
    sampling = SamplingSettings(
        num_samples=rollout.n_samples_per_prompt,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        **rollout.token_choice,  # type: ignore[arg-type]
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=eos_token_ids(config.policy_path, tokenizer, trust_remote_code=trust),
    ).stopping_at(rollout.stop, rollout.stop_token_ids)
    num_samples, temperature = held_out.n_samples_per_prompt, held_out.temperature
    return RunInputs(
        run_dir=run_dir,
        tokenizer=tokenizer,
        token_texts=TokenTexts(tokenizer),
        prompts=prompts,
        eval_prompts=eval_prompts,
        texts=texts,
        reward_source=source,
        sampling=sampling,
        eval_sampling=replace(sampling, num_samples=num_samples, temperature=temperature),
        updates=planned_updates(config, len(prompts)),
        pass_rate=compared,
        vocab_size=policy.get_text_config().vocab_size,
    )


def _check_code(config: PPOConfig, gathered: Gathered, *, has_engines: bool) -> None:
    """Note what is wrong with the user's formulas and agent, and that vLLM is missing."""
    for formula, name in (
        (ESTIMATOR, config.algo.advantage.estimator),
        (POLICY_LOSS, config.actor.policy_loss_type),
    ):
        gathered.attempt(partial(check_function, formula, name))
    if has_engines:
        gathered.attempt(lambda: check_vllm_is_installed(instead=INSTEAD_OF_VLLM))
    if agent_path := config.train.agent_func_path:
        gathered.attempt(lambda: load_agent(agent_path))


def planned_updates(config: PPOConfig, num_prompts: int) -> list[int]:
    """Return the number of updates of every step, for `num_prompts` prompts an episode: a step has
    fewer at the end of an episode, or only at the very end where generation runs ahead.
    """
    size, num_episodes = config.rollout.batch_size, config.train.num_episodes
    if config.train.async_enable:
        num_prompts, num_episodes = num_prompts * num_episodes, 1
    sizes = [min(size, num_prompts - start) for start in range(0, num_prompts, size)]
    samples, train = config.rollout.n_samples_per_prompt, config.train
    return [
        num_updates_per_rollout(n * samples, train.batch_size, train.max_epochs)
        for n in sizes * num_episodes
    ]


def check_runs_without_ray(config: PPOConfig) -> None:
    """Raise ConfigError for what needs processes of its own."""
    if (num_ranks := Topology.from_env(local_rank=config.local_rank).world_size) > 1:
        raise ConfigError(
            f"train_ppo was started as {num_ranks} processes, and trains in one. Use train_ppo_ray "
            f"--actor_num_gpus_per_node {num_ranks} for several ranks."
        )
    needs = {
        "--async_train": config.train.async_enable,
        "--vllm_num_engines above 1": (config.vllm.num_engines or 0) > 1,
        "--ring_attn_size": config.ds.ring_attn_size > 1,
        "--ds_tensor_parallel_size": config.ds.tensor_parallel_size > 1,
    }
    if used := ", ".join(flag for flag, is_used in needs.items() if is_used):
        raise ConfigError(
            f"{used} needs processes of their own. Use train_ppo_ray, or leave {used} out."
        )


def say_dropped(failed: Mapping[int, str], prompts: PromptDataset) -> None:
    """Print how many prompts were dropped, and where and why the first of them was."""
    if failed:
        row, reason = next(iter(failed.items()))
        place = prompts.row_place(row)
        notice(f"dropped {len(failed)} prompt(s) without rewards; {place}: {reason}")


def pass_rate(config: PPOConfig, eval_prompts: PromptDataset | None) -> str | None:
    """Return the metric by which evaluations are compared, pass@1 of the first data source without
    a name; None without evaluation. Raise ConfigError for a name that no evaluation logs.
    """
    if eval_prompts is None:
        return None
    key, sources = config.ckpt.best_metric_key, [prompt.datasource for prompt in eval_prompts]
    names = pass_rate_names(dict.fromkeys(sources), (config.eval.n_samples_per_prompt, 1))
    wanted = names[1] if key in ("auto", "none", "first") else key
    found = [name for name in names if wanted in (name, name.removeprefix("eval/"))]
    if not found:
        raise ConfigError(
            f"--save_best {key} is no pass rate of the evaluation. Type one of "
            f"{', '.join(names)}, or none."
        )
    return found[0]


def _data(
    config: PPOConfig,
    tokenizer: Tokenizer | None,
    policy: "PretrainedConfig | None",
    gathered: Gathered,
) -> tuple[PromptDataset | None, PromptDataset | None, SFTDataset | None]:
    """Return prompts, prompts of the evaluation and pre-training text; note their problems. Without
    a tokenizer check files and columns alone.
    """
    made: dict[str, Any] = {}
    for data_set in ppo_data(config):
        rows = data_set.read(gathered)
        if rows is not None and tokenizer is not None:
            made[data_set.about] = data_set.tokenise(gathered, rows, tokenizer)
    texts = made.get(PRETRAIN)
    if texts is not None and policy is not None:
        size, positions = policy.get_text_config().vocab_size, num_positions(policy)
        check = partial(texts.check_fits, num_embeddings=size, num_positions=positions)
        gathered.attempt(partial(check, config.policy_path), about=PRETRAIN)
    return made.get(TRAINING), made.get(EVALUATION), texts


def open_reward_source(config: PPOConfig, *, log_dir: Path | None) -> RewardSource | None:
    """Return the source of the functions or servers of a run, None of any other reward; raise
    ConfigError.
    """
    reward, batch_size = config.reward, config.rollout.micro_batch_size
    if not reward.remote_url:
        return None
    if reward.is_callable:
        raise ConfigError(
            f"--remote_rm_url {reward.remote_url} is a function of a Python program. Type a .py "
            "file with it, or pass the function: ppo(config, reward=...)."
        )
    if not reward.functions:
        return RemoteReward(
            reward.remote_url,
            batch_size=batch_size,
            timeout_s=reward.timeout_s,
            try_timeout_s=reward.try_timeout_s,
        )
    return FunctionPool(
        ",".join(reward.functions),
        weights=reward.weights,
        batch_size=batch_size,
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        memory_gib=reward.memory_gib,
        log_dir=log_dir,
    )


def check_models(
    config: PPOConfig, gathered: Gathered, *, has_engines: bool
) -> "PretrainedConfig | None":
    """Note what forbids to use a model; return the policy's config, if it can be read."""
    path, reads_experts = config.policy_path, config.actor.aux_loss_coef > 0
    names = named_models(config)
    found = read_configs(names, config, gathered, has_router_loss=reads_experts)
    for name, facts in found.items():
        if name in config.reward.model_paths:
            gathered.attempt(partial(_check_head, config, name, facts))
        gathered.attempt(partial(_check_positions, config, name, facts))
    if path in found:
        size = found[path].get_text_config().vocab_size
        gathered.attempt(partial(check_stop_ids, config.rollout.stop_token_ids, size))
    if path in found and has_engines:
        gathered.attempt(partial(refuse_adapter, path, "--pretrain"))
        num_workers = config.vllm.tensor_parallel_size
        gathered.attempt(partial(check_engine_split, found[path], path, num_workers))
        if find_spec("vllm"):
            gathered.attempt(partial(check_head_size, found[path], path, instead=INSTEAD_OF_VLLM))
    return found.get(path)


def named_models(config: PPOConfig) -> list[str]:
    """Return the paths of policy, critic and reward models, each once."""
    critic = config.critic_source if config.has_critic else None
    paths = (config.policy_path, critic, *config.reward.model_paths)
    return list(dict.fromkeys(filter(None, paths)))


def check_tokens(config: PPOConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a critic or a reward model of another vocabulary than the policy's."""
    for path in config.reward.model_paths:
        if not _reads_tokens_of(config, path, tokenizer):
            raise ConfigError(
                f"--reward_pretrain {path} has another vocabulary than --pretrain. Start openrlhf "
                "serve-rm with it, which reads texts, and type --remote_rm_url with its address."
            )
    source = config.critic_source
    if config.has_critic and source and not _reads_tokens_of(config, source, tokenizer):
        raise ConfigError(
            f"The critic would start from {source}, which has another vocabulary than --pretrain. "
            f"Type --critic_pretrain {config.policy_path}, or a model of its family."
        )


def _reads_tokens_of(config: PPOConfig, path: str, own: Tokenizer) -> bool:
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


def _check_head(config: PPOConfig, path: str, facts: "PretrainedConfig") -> None:
    """Refuse a reward model without a value head, or without a scale to normalise by."""
    if base_of_adapter(path) is None:  # both are known when it is merged
        check_value_model(facts, f"--reward_pretrain {path}")
        if config.reward.normalize_enable:
            reward_mean_and_std(facts)


def _check_positions(config: PPOConfig, name: str, facts: "PretrainedConfig") -> None:
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
