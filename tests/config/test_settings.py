"""Every setting of every command, as users know it: its names, type and default.

`python -m tests.config.test_settings` writes settings.txt anew: a changed line is a change that
users see.
"""

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf.commands.rl_inputs import planned_updates
from openrlhf.config.base import CommandConfig, Option, OwnFunction, is_given, value_at, walk
from openrlhf.config.cli import Reading, flag_table, parse_config
from openrlhf.config.evaluation import EvaluateConfig
from openrlhf.config.generation import RewardSourceConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.serving import (
    BatchInferenceConfig,
)
from openrlhf.config.supervised import (
    SMOOTHED_LOSSES,
    DPOConfig,
    KDConfig,
    SFTConfig,
)
from openrlhf.errors import ConfigError
from openrlhf.trainer.ppo_utils.demands import ClusterView, role_demands
from tests.helpers.configs import COMMANDS

SETTINGS = Path(__file__).with_name("settings.txt")
TIME = re.compile(r"\d{8}-\d{6}|\d{4}T\d\d:\d\d|\d{4}T\d{6}")


def defaults(config_class: type[CommandConfig]) -> CommandConfig:
    return Reading(config_class).build()


def described(config_class: type[CommandConfig]) -> Iterator[str]:
    """One line a setting: path, type and default, other names."""
    config = defaults(config_class)
    for option in walk(config_class):
        default = TIME.sub("TIME", repr(value_at(config, option.path)))
        kind = str(option.field.annotation).replace(str(OwnFunction), "OwnFunction")
        kind = kind.replace("typing.", "").removeprefix("<class '")
        others = sorted(f"--{name}" for name in dict(option.names) if name != option.path)
        line = f"--{option.path}: {kind.removesuffix(chr(39) + '>')} = {default}"
        yield " ".join([line, *others])


def settings() -> str:
    parts = [f"{name}\n" + "\n".join(described(c)) for name, c in COMMANDS.items()]
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_settings_have_the_names_and_defaults_that_users_know(command, monkeypatch):
    for name in ("OPENRLHF_ASYNC_QUEUE_SIZE", "OPENRLHF_ASYNC_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    known = dict(part.split("\n", 1) for part in SETTINGS.read_text().strip().split("\n\n"))
    remedy = "if the change is meant: python -m tests.config.test_settings writes the file anew"
    assert list(described(COMMANDS[command])) == known[command].splitlines(), remedy


BOUNDS = {"gt": ("above", 0), "ge": ("at least", -1), "lt": ("below", 0), "le": ("at most", 1)}


def said_of(config_class: type[CommandConfig], option: Option, word: object) -> list[str]:
    reading = Reading(config_class)
    reading.take_all([f"--{option.path}", str(word)])
    reading.build()
    return reading.problems


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_value_is_one_line_with_flag_value_and_remedy(command):
    for option in walk(COMMANDS[command]):
        if str in (*option.kinds, *option.members):
            continue  # any text will do
        [line] = said_of(COMMANDS[command], option, "nonsense")
        assert re.fullmatch(rf"--{option.path} (must be|takes) .*: nonsense\. Type .*\.", line)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_value_out_of_range_is_one_line_that_names_the_bound(command):
    for option in walk(COMMANDS[command]):
        kind = int if option.is_whole else float
        for bound in option.field.metadata:
            for name, (words, step) in BOUNDS.items():
                if (limit := getattr(bound, name, None)) is not None:
                    limit, typed = kind(limit), math.ceil(limit) + step
                    assert said_of(COMMANDS[command], option, typed) == [
                        f"--{option.path} must be {words} {limit}: {typed}. Type a value {words} "
                        f"{limit}."
                    ]


def tree(config_class, line=""):
    reading = Reading(config_class)
    reading.take_all(line.split())
    config = reading.build()
    assert reading.problems == []
    return config


PPO_TREES = [
    # Switches, and names that translate what follows them.
    ("--packing_samples", "ds.packing_samples", True),
    ("--packing_samples False", "ds.packing_samples", False),
    ("--bf16", "ds.param_dtype", "bf16"),
    ("--bf16 false", "ds.param_dtype", "auto"),
    ("--flash_attn", "ds.attn_implementation", "flash_attention_2"),
    ("--flash_attn=0", "ds.attn_implementation", "sdpa"),
    ("--actor.loss_agg_mode token-mean", "algo.loss_aggregation", "token_mean"),
    ("--report_to none", "logger.wandb.key", None),
    ("--report_to wandb tensorboard", "logger.wandb.key", "true"),
    ("--report_to trackio mlflow", "logger.trackio", True),
    ("--report_to trackio mlflow", "logger.mlflow", True),
    ("--output_dir o --report_to all", "logger.tensorboard_dir", "o/tensorboard"),
    ("--use_wandb abc --report_to wandb", "logger.wandb.key", "abc"),
    ("--use_wandb 0", "logger.wandb.key", None),
    ("--use_wandb yes", "logger.wandb.key", "true"),
    ("--save_best off", "ckpt.best_metric_key", "none"),
    ("--push_to_hub False", "ckpt.push_to_hub", None),
    ("--hub_model_id my-model", "ckpt.push_to_hub", "my-model"),
    ("--eval_dataset false", "eval.dataset", None),
    # Numbers: negative, scientific, lists.
    ("--train-batch-size 16", "train.batch_size", 16),
    ("--actor.adam.weight-decay=0.5", "actor.adam.weight_decay", 0.5),
    ("--freezing_actor_steps -1", "critic.freezing_steps", -1),
    ("--reward_clip_range -10 10", "reward.clip_range", (-10, 10)),
    ("--max_samples 1e5", "data.max_samples", 100_000),
    ("--reward_weights 0.25,0.75", "reward.weights", (0.25, 0.75)),
    ("--vllm_is_truncated_threshold 2", "algo.advantage.is_correction_threshold", (0, 2)),
    ("--init_kl_coef -1", "algo.kl.init_coef", 0),
    # Flat names of 0.9.2 to 0.10.1.
    ("--param_dtype bf16", "ds.param_dtype", "bf16"),
    ("--max_new_tokens 99", "rollout.max_new_tokens", 99),
    ("--best_metric_key none", "ckpt.best_metric_key", "none"),
    ("--vllm_enable_is_correction", "algo.advantage.is_correction_enable", True),
    ("--vllm_is_correction_type icepop", "algo.advantage.is_correction_type", "icepop"),
    ("--use_icepop", "algo.advantage.is_correction_type", "icepop"),
    ("--ds.experts_implementation deepgemm", "ds.experts_implementation", "deepgemm"),
    # Which of two wins: the last, and one name of one setting.
    ("--seed 1 --seed 4", "train.seed", 4),
    ("--actor.max_norm 3 --max_norm 2", "actor.max_norm", 3),
    ("--actor.max_norm 3 --max_norm 2", "critic.max_norm", 2),
    # What follows from the rest.
    ("", "rollout.n_samples_per_prompt", 1),
    ("--advantage_estimator reinforce", "rollout.n_samples_per_prompt", 1),
    ("--advantage_estimator rloo", "rollout.n_samples_per_prompt", 8),
    ("--advantage_estimator group_norm", "rollout.n_samples_per_prompt", 8),
    ("--advantage_estimator own.py:shape", "rollout.n_samples_per_prompt", 8),
    ("--max_len 2048 --generate_max_len 1500", "data.prompt_max_len", 548),
    ("--max_len 512", "rollout.max_new_tokens", 256),
    ("--max_len 512 --prompt_max_len 100", "rollout.max_new_tokens", 412),
    ("--max_len 4096", "data.prompt_max_len", 3072),
    ("--gradient_checkpointing", "critic.gradient_checkpointing_enable", True),
    ("--actor_num_nodes 2 --colocate_all_models", "reward.num_nodes", 2),
    ("--ref_num_gpus_per_node 2 --colocate_actor_ref", "actor.num_gpus_per_node", 2),
]  # fmt: skip


OTHER_TREES = [
    (SFTConfig, "--local-rank 1", "local_rank", 1),
    (DPOConfig, "--ipo", "model.loss_type", "ipo"),
    (DPOConfig, "--loss_type exo_pair", "model.label_smoothing", 1e-3),
    (DPOConfig, "--loss_type exo_pair --label_smoothing 0.1", "model.label_smoothing", 0.1),
    (KDConfig, "--kd_on_policy", "kd.coef", 1),
    (KDConfig, "--kd_on_policy --kd_coef 0.5", "kd.coef", 0.5),
    (KDConfig, "", "kd.divergence", "forward"),
    (KDConfig, "--kd_on_policy", "kd.divergence", "reverse"),
    (KDConfig, "--kd_on_policy --kd_divergence jsd", "kd.divergence", "jsd"),
    (KDConfig, "--kd_on_policy --max_len 300", "kd.max_new_tokens", 150),
    (KDConfig, "", "kd.max_new_tokens", 512),
    # eval and infer take each other's words.
    (EvaluateConfig, "--dataset d", "data.prompt_dataset", "d"),
    (EvaluateConfig, "--max_new_tokens 99", "rollout.max_new_tokens", 99),
    (EvaluateConfig, "--best_of_n 2", "rollout.n_samples_per_prompt", 2),
    (EvaluateConfig, "--output_path o", "ckpt.output_dir", "o"),
    (EvaluateConfig, "--greedy_sampling", "rollout.greedy_sampling", True),
    (BatchInferenceConfig, "--vllm_tensor_parallel_size 2", "vllm.tensor_parallel_size", 2),
    (BatchInferenceConfig, "--max_completion_length 9", "rollout.max_new_tokens", 9),
    (BatchInferenceConfig, "--prompt_split test", "data.dataset_split", "test"),
    (BatchInferenceConfig, "--eval_dataset d", "data.dataset", "d"),
    (BatchInferenceConfig, "--generate_max_len 99", "rollout.max_new_tokens", 99),
    (BatchInferenceConfig, "--eval_n_samples_per_prompt 2", "rollout.best_of_n", 2),
    (BatchInferenceConfig, "--eval_temperature 0.5", "rollout.temperature", 0.5),
    (BatchInferenceConfig, "--save_path o.jsonl", "output_path", "o.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config_class", "line", "path", "expected"),
    [*((PPOConfig, *case) for case in PPO_TREES), *OTHER_TREES],
)
def test_words_become_values(config_class, line, path, expected):
    assert value_at(tree(config_class, line), path) == expected


def test_greedy_sampling_is_a_temperature_of_0():
    for config_class in (EvaluateConfig, BatchInferenceConfig):
        for line, temperature in (("", None), ("--greedy_sampling", 0), ("--temperature 0", 0)):
            rollout = tree(config_class, line).rollout
            expected = rollout.temperature if temperature is None else temperature
            assert rollout.token_choice["temperature"] == expected


def test_a_default_that_follows_does_not_count_as_given():
    config = tree(PPOConfig, "--rollout_batch_size 16 --advantage_estimator rloo")
    assert is_given(config, "rollout.batch_size")
    assert not is_given(config, "rollout.n_samples_per_prompt")


def test_the_choices_are_those_of_the_formulas():
    from openrlhf.algorithms.distillation import DIVERGENCES
    from openrlhf.algorithms.preference_loss import PREFERENCE_LOSSES

    def choices(config_class, flag):
        return set(flag_table(config_class)[flag][0][0].choices)

    assert choices(DPOConfig, "loss_type") == PREFERENCE_LOSSES.keys()
    assert set(SMOOTHED_LOSSES) <= PREFERENCE_LOSSES.keys()
    assert choices(KDConfig, "kd_divergence") == DIVERGENCES.keys()
    losses = choices(DPOConfig, "loss_type")
    free = {loss for loss in losses if not tree(DPOConfig, f"--loss_type {loss}").has_reference}
    assert free == {"simpo", "orpo", "cpo"}


def test_default_run_folders_differ_by_command_and_time(monkeypatch):
    assert re.fullmatch(r"./ckpt/sft-\d{8}-\d{6}", defaults(SFTConfig).ckpt.output_dir)
    assert defaults(PPOConfig).ckpt.output_dir.startswith("./ckpt/ppo-")
    given = parse_config(
        SFTConfig, ["--pretrain", "a/b", "--dataset", "a/b", "--save_path", "./ckpt"]
    )
    assert given.config.ckpt.output_dir == "./ckpt"
    monkeypatch.setenv("LOCAL_RANK", "1")  # ranks of one launcher, a moment apart
    first = defaults(SFTConfig).ckpt.output_dir
    time.sleep(1.1)
    assert defaults(SFTConfig).ckpt.output_dir == first


NEEDS = "--pretrain m --prompt_data d --remote_rm_url r.py "


def parse(line):
    return parse_config(PPOConfig, (NEEDS + line).split())


def test_a_queue_size_of_the_environment_is_checked_alike(monkeypatch):
    monkeypatch.setenv("OPENRLHF_ASYNC_QUEUE_SIZE", "3")
    assert parse("--async_train").config.train.async_queue_size == 3
    assert parse("--async_train --async_queue_size 2").config.train.async_queue_size == 2
    monkeypatch.setenv("OPENRLHF_ASYNC_QUEUE_SIZE", "0")
    with pytest.raises(ConfigError, match="OPENRLHF_ASYNC_QUEUE_SIZE must be above 0: 0"):
        parse("--async_train")


def test_colocation_is_of_the_trained_models_alone():
    config = parse(
        "--colocate_all_models --async_train --actor_num_gpus_per_node 4 "
        "--vllm_num_engines 2 --vllm_tensor_parallel_size 2"
    ).config
    cluster = ClusterView(num_gpus=8, num_cpus=64, max_gpus_per_node=8)
    pools = {demand.role: demand.pool for demand in role_demands(config, cluster)}
    assert pools["vllm"] not in (pools["actor"], pools["critic"], pools["ref"])
    assert pools["actor"] == pools["critic"] == pools["ref"]


@pytest.mark.parametrize(
    ("line", "take_turns"),
    [
        ("--colocate_all_models --async_train", True),
        ("--colocate_critic_reward --advantage_estimator gae --async_train", True),
        ("--colocate_critic_reward --advantage_estimator rloo --async_train", False),
        ("--async_train", False),
    ],
)
def test_reward_models_on_devices_of_what_is_trained_take_turns_with_it(line, take_turns):
    assert parse(f"{line}").config.rewards_take_turns == take_turns


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        (None, "none"),
        (" ", "none"),
        ("callable:short", "callable"),
        ("a.py, b.py:f", "functions"),
        ("http://h:1/r", "servers"),
        ("exec:./a.py", "servers"),
    ],
)
def test_an_address_is_of_one_kind_of_reward_source(address, kind):
    assert RewardSourceConfig(remote_url=address).kind == kind


def test_steps_run_over_the_ends_of_episodes():
    line = "--rollout_batch_size 4 --train_batch_size 4 --micro_train_batch_size 2 --num_episodes 3"
    config = parse(f"{line} --micro_rollout_batch_size 2 --async_train").config
    assert planned_updates(config, num_prompts=6) == [1] * 5  # 4 + 4 + 4 + 4 + 2 prompts
    synchronous = parse(f"{line} --micro_rollout_batch_size 2").config
    assert len(planned_updates(synchronous, num_prompts=6)) == 6
    filtered = parse(f"{line} --dynamic_filtering --n_samples_per_prompt 2").config
    assert planned_updates(filtered, num_prompts=3) == [2, 2, 1]  # 4 + 4 + 1 prompts


if __name__ == "__main__":
    SETTINGS.write_text(settings())
