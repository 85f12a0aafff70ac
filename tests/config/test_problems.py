"""Contradictions and typos are refused, all together, with the flag, the value and the remedy."""

from __future__ import annotations

import pytest

from openrlhf.config.base import Caution
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.errors import ConfigError

PPO_NEEDS = "--pretrain m --prompt_data d --remote_rm_url r.py "
SFT_NEEDS = "--pretrain m --dataset d "


def problems(config_class, line):
    with pytest.raises(ConfigError) as caught:
        parse_config(config_class, line.split())
    return caught.value.problems


def notices(line):
    return list(parse_config(PPOConfig, (PPO_NEEDS + line).split()).notices)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--advantage_estimator rloo --n_samples_per_prompt 1",
            "--advantage_estimator rloo compares the samples of a prompt, and "
            "--n_samples_per_prompt is 1. Type --n_samples_per_prompt 8 (or any number above 1).",
        ),
        (
            "--advantage_estimator dr_grpo --gamma 0.9",
            "--advantage_estimator dr_grpo needs --gamma 1: 0.9. Type --gamma 1.",
        ),
        (
            "--rollout_batch_size 16 --n_samples_per_prompt 4 --train_batch_size 128",
            "--train_batch_size 128 is more than the 64 samples of a step (--rollout_batch_size 16 "
            "x --n_samples_per_prompt 4). Type --train_batch_size 64 or --rollout_batch_size 32.",
        ),
        (
            "--rollout_batch_size 128 --micro_rollout_batch_size 256",
            "--micro_rollout_batch_size 256 is more than the 128 samples of a step. Type "
            "--micro_rollout_batch_size 128.",
        ),
        (
            "--colocate_all_models --actor_num_gpus_per_node 8 --ref_num_gpus_per_node 4",
            "--ref_num_gpus_per_node 4 differs from --actor_num_gpus_per_node 8, and the two "
            "models share their GPUs. Type --ref_num_gpus_per_node 8.",
        ),
        (
            "--eps_clip_low_high 1.5 0.2",
            "--eps_clip_low_high needs a low between 0 and 1 and a high above 0: 1.5 0.2. Type "
            "--eps_clip_low_high 0.2 0.27.",
        ),
        (
            "--reward_clip_range 10 -10",
            "--reward_clip_range needs low < high: 10.0 -10.0. Type --reward_clip_range -10.0 "
            "10.0.",
        ),
        (
            "--max_len 512 --prompt_max_len 300 --generate_max_len 300",
            "--max_len 512 is less than --prompt_max_len 300 + --generate_max_len 300. Type "
            "--max_len 600.",
        ),
        (
            "--overlong_buffer_len 2000",
            "--overlong_buffer_len must be above 0 and at most --generate_max_len 1024: 2000.0. "
            "Type --overlong_buffer_len 256.",
        ),
        (
            "--reward_pretrain a",
            "--reward_pretrain a and --remote_rm_url r.py both give rewards. Leave one out "
            "(--critic_pretrain names the model that a critic starts from).",
        ),
        (
            "--reward_failure ignore",
            "--reward_failure is unknown: ignore. Type fail, drop_group, retry or 'retry(5)'.",
        ),
        (
            "--lr_scheduler cosin",
            "--lr_scheduler is not a known schedule: cosin. Type --lr_scheduler cosine.",
        ),
        (
            "--aux_loss_coef 0.1 --gradient_checkpointing --gradient_checkpointing_use_reentrant",
            "--aux_loss_coef with --gradient_checkpointing_use_reentrant: the router loss would "
            "have no gradient. Type --gradient_checkpointing alone.",
        ),
        (
            "--advantage_estimator grpo",
            "--advantage_estimator must be one of gae, reinforce, flash_reinforce, rloo, "
            "reinforce_baseline, group_norm, dr_grpo: grpo. Type group_norm.",
        ),
        (
            "--report_to slack",
            "--report_to is unknown: slack. Type one of wandb, all, tensorboard, none.",
        ),
        ("--rollout_batchsize 4", "--rollout_batchsize is not a known name. Did you mean "
         "--rollout_batch_size?"),
        (
            "--policy_loss_type PPO",
            "--policy_loss_type cannot be PPO: it is not known. Type ppo, or module:name or "
            "file.py:name of a function.",
        ),
        (
            "--vllm_is_truncated_threshold 5 2",
            "--vllm_is_truncated_threshold cannot be 5 2: the first must be smaller and not "
            "negative. Type 0.5 5.0.",
        ),
        (
            "--dynamic_filtering",
            "--dynamic_filtering keeps prompts whose samples score differently, and "
            "--n_samples_per_prompt is 1. Type --n_samples_per_prompt 8.",
        ),
        (
            "--enable_vllm_is_correction --is_correction_level off",
            "--is_correction_level off and --enable_vllm_is_correction: leave one out.",
        ),
        (
            "--is_correction_level seq --is_correction_mode clip",
            "--is_correction_mode clip holds ratios of tokens in a band, and --is_correction_level "
            "seq is something else. Type --is_correction_mode mask.",
        ),
        (
            "--is_correction_level seq --is_correction_gating tv",
            "--is_correction_gating tv is at most 1, and --is_correction_threshold 5 lets "
            "everything pass. Type --is_correction_threshold 0.1.",
        ),
        ("--gamma 1 -bf16 true", "-bf16 has one dash. Type --bf16."),
    ],
)  # fmt: skip
def test_one_problem_is_one_line_with_flag_value_and_remedy(line, expected):
    assert problems(PPOConfig, PPO_NEEDS + line) == [expected]


def test_all_problems_are_listed_together():
    line = "--pretrian m --prompt_data d --train_batch_size x --gamma 0.5 --adam_betas 1 "
    assert problems(PPOConfig, line + "--advantage_estimator rloo --remote_rm_url r.py stray") == [
        "--pretrian is not a known name. Did you mean --pretrain?",
        "--remote_rm_url takes one value: r.py stray. Put quotes around a text with spaces.",
        "--train_batch_size must be a whole number: x. Type a whole number.",
        "--adam_betas takes 2 values: 1. Type them with spaces between.",
        "No policy model is named. Type --pretrain with a hub id or a path.",
        "There is no reward. Type --reward_pretrain with a model, --remote_rm_url with a .py "
        "file or a URL, or --agent_func_path.",
        "--advantage_estimator rloo needs --gamma 1: 0.5. Type --gamma 1.",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--bf16 --ds.param_dtype fp16",
            "--ds.param_dtype fp16 contradicts --bf16: both set ds.param_dtype. Leave one of them "
            "out.",
        ),
        (
            "--attn_implementation eager --flash_attn",
            "--flash_attn contradicts --attn_implementation eager: both set "
            "ds.attn_implementation. Leave one of them out.",
        ),
        (
            "--use_wandb abc --logger.wandb.key def",
            "--logger.wandb.key contradicts --use_wandb: both set logger.wandb.key. Leave one of "
            "them out.",
        ),
    ],
)
def test_two_names_of_one_setting_must_agree(line, expected):
    assert problems(SFTConfig, SFT_NEEDS + line) == [expected]


@pytest.mark.parametrize(
    "line",
    [
        "--bf16 --ds.param_dtype bf16",
        "--learning_rate 1e-6 --adam.lr 0.000001",
        "--bf16 false --ds.param_dtype fp16",
    ],
)
def test_two_names_of_one_setting_may_agree(line):
    parse_config(SFTConfig, (SFT_NEEDS + line).split())


def test_a_name_like_no_other_gets_no_suggestion():
    assert problems(SFTConfig, SFT_NEEDS + "--qqqq 1") == [
        "--qqqq is not a known name. --help lists all of them."
    ]


def test_an_agent_and_a_reward_model_both_give_rewards():
    line = "--pretrain m --prompt_data d --reward_pretrain r --agent_func_path a.py"
    assert problems(PPOConfig, line) == [
        "--agent_func_path a.py and --reward_pretrain r both give rewards. Leave one out."
    ]


def test_a_word_before_any_flag_is_named():
    assert problems(SFTConfig, "train " + SFT_NEEDS) == [
        "train stands before any flag. Type --NAME before a value."
    ]


@pytest.mark.parametrize(
    ("line", "is_caution"),
    [
        ("--trust_remote_code", True),
        ("--use_kl_loss", True),
        ("--kl_estimator k3", True),
        ("--use_wandb secret", True),
        ("--advantage_estimator rloo", False),
        ("--actor_init_on_gpu", False),
    ],
)
def test_a_notice_is_a_caution_only_where_something_is_at_stake(line, is_caution):
    assert [isinstance(notice, Caution) for notice in notices(line)] == [is_caution]
