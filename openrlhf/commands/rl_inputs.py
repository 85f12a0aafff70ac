"""The inputs of an RL run before anything heavy starts: tokenizer, prompts, rewards, arithmetic.
Its models are looked at too: they must have the parts that are used and mean the same by a token.

Everything a user can get wrong in data, paths and reward code is found here, before a model is
loaded.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.config.base import Caution
from openrlhf.config.generation import GenerationRunConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.datasets.command_data import EVALUATION, PRETRAIN, TRAINING, DataSet, ppo_data
from openrlhf.datasets.prompts_dataset import PromptDataset
from openrlhf.datasets.tokenized import news, repeats
from openrlhf.distributed.topology import Topology
from openrlhf.engines.base import SamplingSettings
from openrlhf.engines.vllm_cpu import check_head_size
from openrlhf.engines.vllm_engine import check_vllm_is_installed
from openrlhf.errors import ConfigError, Gathered
from openrlhf.models.loading import (
    check_engine_reads_pictures,
    check_value_model,
    image_processor_of,
    load_config,
    read_configs,
    refuse_pictures,
)
from openrlhf.models.support import check_engine_split, num_positions
from openrlhf.models.value_head import reward_mean_and_std
from openrlhf.rewards.base import TRUNCATED_COLUMN, RewardSource
from openrlhf.rewards.remote import RemoteReward
from openrlhf.rewards.workers import FunctionPool
from openrlhf.rollout.agents.worker import load_agent
from openrlhf.rollout.evaluation import pass_rate_names
from openrlhf.trainer.ppo_inputs import RunInputs
from openrlhf.trainer.ppo_utils.update_plan import num_updates_per_rollout
from openrlhf.utils.adapter_folder import base_of_adapter, refuse_adapter
from openrlhf.utils.console import say_notices
from openrlhf.utils.own_functions import ESTIMATOR, POLICY_LOSS, check_function
from openrlhf.utils.run_folder import LOGS
from openrlhf.utils.tokenizer import (
    Tokenizer,
    TokenTexts,
    check_stop_ids,
    eos_token_ids,
    load_tokenizer,
    tokenizer_of,
    unused_sampling,
)
from openrlhf.utils.worker_process import ending_children

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INSTEAD_OF_VLLM = "--vllm_num_engines 0: then the policy generates itself"


def prepare_inputs(
    config: PPOConfig, *, has_engines: bool, reward_source: RewardSource | None = None
) -> RunInputs:
    """Return the result of `gather_inputs` and make the run folder; raise ConfigError or DataError
    with all problems.
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
    """Load and check the inputs of training; note all problems, and return what could be read, None
    without a policy, a tokenizer or prompts. Parameters are those of `read_inputs` and
    `with_rewards`.
    """
    for formula, name in (
        (ESTIMATOR, config.algo.advantage.estimator),
        (POLICY_LOSS, config.actor.policy_loss_type),
    ):
        with gathered:
            check_function(formula, name)
    inputs = read_inputs(config, ppo_data(config), gathered, has_engines=has_engines)
    if inputs is not None:
        held_out = config.eval
        inputs = replace(
            inputs,
            eval_sampling=replace(
                inputs.sampling,
                num_samples=held_out.n_samples_per_prompt,
                temperature=held_out.temperature,
            ),
            updates=planned_updates(config, len(inputs.prompts)),
        )
        say_notices(schedule_notices(config, inputs.updates))
        with gathered:
            inputs = replace(inputs, pass_rate=pass_rate(config, inputs.eval_prompts))
    return with_rewards(config, inputs, gathered, reward_source)


def read_inputs(
    config: GenerationRunConfig,
    data_sets: Iterable[DataSet],
    gathered: Gathered,
    *,
    has_engines: bool,
) -> RunInputs | None:
    """Load and check tokenizer, models and data sets; note their problems, and return what could be
    read, without a source of rewards.

    `has_engines`: vLLM generates, and must be installed; else the policy itself does.
    """
    if has_engines:
        with gathered:
            check_vllm_is_installed(instead=INSTEAD_OF_VLLM)
    if agent_path := config.train.agent_func_path:
        with gathered, ending_children():  # those of the file start again in each worker
            load_agent(agent_path)
    policy = check_models(config, gathered, has_engines=has_engines)
    tokenizer = None
    with gathered:
        tokenizer = tokenizer_of(config, config.policy_path)
        check_tokens(config, tokenizer)
    image_processor = None
    with gathered:
        image_processor = image_processor_of(config, config.policy_path, policy)
    made: dict[str, Any] = {}
    for data_set in data_sets:
        rows = data_set.read(gathered)
        if rows is not None and tokenizer is not None:
            made[data_set.about] = data_set.tokenise(gathered, rows, tokenizer, image_processor)
    texts, prompts = made.get(PRETRAIN), made.get(TRAINING)
    if texts is not None and policy is not None:
        size, positions = policy.get_text_config().vocab_size, num_positions(policy)
        with gathered.about(PRETRAIN):
            texts.check_fits(config.policy_path, num_embeddings=size, num_positions=positions)
    if policy is None or tokenizer is None or prompts is None:
        return None
    sampling = sampling_of(config, tokenizer)
    return RunInputs(
        run_dir=Path(config.ckpt.output_dir),
        tokenizer=tokenizer,
        token_texts=TokenTexts(tokenizer),
        prompts=prompts,
        eval_prompts=made.get(EVALUATION),
        texts=texts,
        sampling=sampling,
        eval_sampling=sampling,
        vocab_size=policy.get_text_config().vocab_size,
        image_processor=image_processor,
    )


def sampling_of(config: GenerationRunConfig, tokenizer: Tokenizer) -> SamplingSettings:
    """Return the settings that the samples of a run are drawn with."""
    rollout, trust = config.rollout, config.trust_remote_code
    return SamplingSettings(
        num_samples=rollout.n_samples_per_prompt,
        **rollout.token_choice,  # type: ignore[arg-type]
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=eos_token_ids(config.policy_path, tokenizer, trust_remote_code=trust),
    ).stopping_at(rollout.stop, rollout.stop_token_ids)


def with_rewards(
    config: GenerationRunConfig,
    inputs: RunInputs | None,
    gathered: Gathered,
    reward_source: RewardSource | None,
) -> RunInputs | None:
    """Return inputs with the source of rewards: `reward_source`, which is open already, else that
    of the config. Note what is wrong with it, and print what was noticed of the data.
    """
    log_dir = None  # a refused run leaves no folder
    if not gathered.problems:
        log_dir = Path(config.ckpt.output_dir) / LOGS
    source = reward_source
    with gathered:
        source = source or open_reward_source(config, log_dir=log_dir)
    if inputs is None:
        if source is not None:
            source.close()
        return None
    prompts, held_out = inputs.prompts, inputs.eval_prompts
    for data in filter(None, (prompts, held_out)):
        if source is not None:
            with gathered:
                source.check([TRUNCATED_COLUMN, *data[0].columns])
    say_notices(
        [
            *unused_sampling(config.policy_path, config.rollout.token_choice),
            *prompts.notices,
            # An agent may put its texts into the template itself, as a server for agents does.
            *(prompts.template_notices if config.train.agent_func_path is None else ()),
        ]
    )
    for more, about in ((held_out, "evaluation: "), (inputs.texts, "--pretrain_data: ")):
        if more is not None:
            told = [*news(more.notices, prompts.notices), *repeats(more, prompts)]
            say_notices(told, about=about)
    return replace(inputs, reward_source=source)


def planned_updates(config: PPOConfig, num_prompts: int) -> list[int]:
    """Return the number of updates of every step, for `num_prompts` prompts an episode: a step has
    fewer at the end of an episode, or only at the very end where generation runs ahead or prompts
    are replaced. There are fewer steps where more are replaced.
    """
    size, num_episodes = config.rollout.batch_size, config.train.num_episodes
    if config.train.async_enable or config.algo.dynamic_filtering_enable:
        num_prompts, num_episodes = num_prompts * num_episodes, 1
    sizes = [min(size, num_prompts - start) for start in range(0, num_prompts, size)]
    samples, train = config.rollout.n_samples_per_prompt, config.train
    return [
        num_updates_per_rollout(n * samples, train.batch_size, train.max_epochs)
        for n in sizes * num_episodes
    ]


def schedule_notices(config: PPOConfig, updates: Sequence[int]) -> Iterator[str]:
    """Yield lines about steps that train no policy, and rates of learning that are not reached."""
    num_frozen, num_steps = config.critic.freezing_steps, len(updates)
    if config.has_critic and num_frozen >= num_steps:
        yield Caution(
            f"--freezing_actor_steps {num_frozen} of {num_steps} steps: the policy is not trained."
        )
    if config.algo.dynamic_filtering_enable and "constant" not in config.actor.lr_scheduler:
        yield (
            f"--dynamic_filtering: at most {num_steps} steps, over which the learning rate falls. "
            "A run that replaces prompts has fewer, and ends at a higher rate."
        )


def check_runs_without_ray(config: PPOConfig) -> None:
    """Raise ConfigError for what needs processes of its own."""
    if (num_ranks := Topology.from_env(local_rank=config.local_rank).world_size) > 1:
        raise ConfigError(
            f"openrlhf ppo-local was started as {num_ranks} processes, and trains in one. Type "
            f"openrlhf ppo --actor_num_gpus_per_node {num_ranks} for several ranks."
        )
    needs = {
        "--async_train": config.train.async_enable,
        "--vllm_num_engines above 1": (config.vllm.num_engines or 0) > 1,
        "--ring_attn_size": config.ds.ring_attn_size > 1,
        "--ds_tensor_parallel_size": config.ds.tensor_parallel_size > 1,
    }
    if used := ", ".join(flag for flag, is_used in needs.items() if is_used):
        raise ConfigError(
            f"{used} needs processes of their own. Type openrlhf ppo, or leave {used} out."
        )


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


def open_reward_source(config: GenerationRunConfig, *, log_dir: Path | None) -> RewardSource | None:
    """Return the source of the functions or servers of a run, None of any other reward; raise
    ConfigError.
    """
    reward, batch_size = config.reward, config.rollout.micro_batch_size
    match reward.kind:
        case "none":
            return None
        case "callable":
            raise ConfigError(
                f"--remote_rm_url {reward.remote_url} is a function of a Python program. Type a "
                ".py file with it, or pass the function: ppo(config, reward=...)."
            )
        case "servers":
            return RemoteReward(
                reward.remote_url,
                batch_size=batch_size,
                timeout_s=reward.timeout_s,
                try_timeout_s=reward.try_timeout_s,
            )
        case "functions":
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
    config: GenerationRunConfig, gathered: Gathered, *, has_engines: bool
) -> "PretrainedConfig | None":
    """Note what forbids to use a model; return the policy's config, if it can be read."""
    path, reads_experts = config.policy_path, config.trains and config.actor.aux_loss_coef > 0
    found = read_configs(config.named_models, config, gathered, has_router_loss=reads_experts)
    for name, model_config in found.items():
        if name in config.reward.model_paths:
            with gathered:
                _check_head(config, name, model_config)
        with gathered:
            _check_positions(config, name, model_config)
    if path in found:
        with gathered:
            size = found[path].get_text_config().vocab_size
            check_stop_ids(config.rollout.stop_token_ids, size)
    if path in found and (config.critic_source is not None or config.reward.model_paths):
        with gathered:
            refuse_pictures(found[path], path)
    if path in found and has_engines:
        with gathered:
            check_engine_reads_pictures(found[path], path, instead=INSTEAD_OF_VLLM)
        with gathered:
            refuse_adapter(path, "--pretrain")
        with gathered:
            check_engine_split(found[path], path, config.vllm.tensor_parallel_size)
        if find_spec("vllm"):
            with gathered:
                check_head_size(found[path], path, instead=INSTEAD_OF_VLLM)
    return found.get(path)


def check_tokens(config: GenerationRunConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a critic or a reward model of another vocabulary than the policy's."""
    for path in config.reward.model_paths:
        if not _reads_tokens_of(config, path, tokenizer):
            raise ConfigError(
                f"--reward_pretrain {path} has another vocabulary than --pretrain. Start openrlhf "
                "serve-rm with it, which reads texts, and type --remote_rm_url with its address."
            )
    source = config.critic_source
    if source is not None and not _reads_tokens_of(config, source, tokenizer):
        raise ConfigError(
            f"The critic would start from {source}, which has another vocabulary than --pretrain. "
            f"Type --critic_pretrain {config.policy_path}, or a model of its family."
        )


def _reads_tokens_of(config: GenerationRunConfig, path: str, own: Tokenizer) -> bool:
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


def _check_head(config: GenerationRunConfig, path: str, model_config: "PretrainedConfig") -> None:
    """Refuse a reward model without a value head, or without a scale to normalise by."""
    if base_of_adapter(path) is None:  # both are known when it is merged
        check_value_model(model_config, f"--reward_pretrain {path}")
        if config.reward.normalize_enable:
            reward_mean_and_std(model_config)


def _check_positions(
    config: GenerationRunConfig, name: str, model_config: "PretrainedConfig"
) -> None:
    """Refuse lengths of prompt and response that a model cannot read as a whole."""
    limit = num_positions(model_config)
    prompt, response = config.data.prompt_max_len, config.rollout.max_new_tokens
    if limit is not None and prompt + response > limit:
        remedy = f"{limit - response} or a smaller --generate_max_len"
        if response >= limit:  # no prompt is short enough
            remedy = f"{limit // 2} --generate_max_len {limit - limit // 2}"
        raise ConfigError(
            f"--prompt_max_len {prompt} + --generate_max_len {response} is more than the "
            f"{limit} positions of the model {name}. Type --prompt_max_len {remedy}."
        )
