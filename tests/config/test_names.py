"""Every old name, new name and Hugging Face name of a flag sets the same fields."""

from __future__ import annotations

from typing import get_args

import pytest

from openrlhf.config.base import is_given
from openrlhf.config.cli import build, parse_config
from openrlhf.config.flags import flag_table, read_all
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import (
    SMOOTHED_LOSSES,
    DPOConfig,
    KDConfig,
    PreferenceLossName,
    RMConfig,
    SFTConfig,
)
from tests.config.test_settings import CONFIGS

PPO_NEEDS = ["--pretrain", "m", "--prompt_data", "d", "--remote_rm_url", "r.py"]


def tree(config_class, argv):
    reading = read_all(config_class, argv)
    config, wrong = build(config_class, reading.values)
    assert not reading.problems
    assert not wrong
    return config


def test_names_that_set_several_fields_are_these_and_no_others():
    several = {
        name: {target.option.path for target in targets}
        for name, targets in flag_table(PPOConfig).items()
        if len(targets) > 1
    }

    def both(leaf):
        return {f"actor.{leaf}", f"critic.{leaf}"}

    assert several == {
        "optim": both("optim"),
        "adam_betas": both("adam.betas"),
        "l2": both("adam.weight_decay"),
        "max_norm": both("max_norm"),
        "lr_scheduler": both("lr_scheduler"),
        "lr_warmup_ratio": both("lr_warmup_ratio"),
        "min_lr_ratio": both("min_lr_ratio"),
        "gradient_checkpointing": both("gradient_checkpointing_enable"),
        "gradient_checkpointing_use_reentrant": both("gradient_checkpointing_reentrant"),
        "ref_reward_offload": {"ref.offload", "reward.offload"},
        "report_to": {"logger.wandb.key", "logger.tensorboard_dir"},
    }
    for config_class in set(CONFIGS) - {PPOConfig}:
        table = flag_table(config_class)
        expected = ["report_to"] if "report_to" in table else []
        assert [name for name, targets in table.items() if len(targets) > 1] == expected


def test_switches_stand_alone_or_take_true_and_false():
    for words, expected in (([], True), (["true"], True), (["False"], False), (["0"], False)):
        assert tree(SFTConfig, ["--packing_samples", *words]).ds.packing_samples is expected
    assert tree(SFTConfig, ["--bf16"]).ds.param_dtype == "bf16"
    assert tree(SFTConfig, ["--bf16", "false"]).ds.param_dtype == "auto"
    assert tree(SFTConfig, ["--ds.param_dtype", "fp32"]).ds.param_dtype == "fp32"
    assert tree(SFTConfig, ["--muon.no_nesterov"]).muon.nesterov is False
    assert tree(PPOConfig, ["--critic.muon.no_nesterov"]).critic.muon.nesterov is False


def test_dashes_and_underscores_are_the_same_and_launchers_set_the_local_rank():
    assert tree(SFTConfig, ["--train-batch-size", "16"]).train.batch_size == 16
    assert tree(SFTConfig, ["--adam.weight-decay=0.5"]).adam.weight_decay == 0.5
    assert tree(SFTConfig, ["--local_rank=3"]).local_rank == 3
    assert tree(SFTConfig, ["--local-rank", "1"]).local_rank == 1


def test_numbers_may_be_negative_scientific_or_in_lists():
    config = tree(
        PPOConfig,
        [
            *("--freezing_actor_steps", "-1"),
            *("--reward_clip_range", "-10", "10"),
            *("--max_samples", "1e5"),
            *("--actor_learning_rate", "5e-7"),
            *("--reward_weights", "0.25,0.75"),
            *("--zero_stage", "3"),
        ],
    )
    assert config.critic.freezing_steps == -1
    assert config.reward.clip_range == (-10, 10)
    assert config.data.max_samples == 100_000
    assert config.actor.adam.lr == 5e-7
    assert config.reward.weights == (0.25, 0.75)
    assert config.ds.zero_stage == 3


def test_the_last_of_two_values_wins():
    config = tree(
        PPOConfig, ["--max_norm", "2", "--actor.max_norm", "3", "--seed", "1", "--seed", "4"]
    )
    assert (config.actor.max_norm, config.critic.max_norm, config.train.seed) == (3, 2, 4)


def test_a_name_of_one_setting_wins_over_one_of_several_wherever_it_stands():
    config = tree(PPOConfig, ["--actor.max_norm", "3", "--max_norm", "2"])
    assert (config.actor.max_norm, config.critic.max_norm) == (3, 2)
    key = tree(SFTConfig, ["--use_wandb", "abc", "--report_to", "wandb"]).logger.wandb.key
    assert key == "abc"


def test_report_to_names_the_sinks():
    def report(*words):
        return tree(SFTConfig, ["--output_dir", "o", "--report_to", *words]).logger

    assert (report("wandb").wandb.key, report("wandb").tensorboard_dir) == ("true", None)
    assert report("tensorboard").tensorboard_dir == "o/tensorboard"
    assert (report("none").wandb.key, report("none").tensorboard_dir) == (None, None)
    assert report("all").wandb.key == "true"
    assert report("all").tensorboard_dir == "o/tensorboard"


def test_the_one_threshold_of_old_commands_is_the_upper_bound():
    config = tree(PPOConfig, ["--vllm_is_truncated_threshold", "2"])
    assert config.algo.advantage.is_correction_threshold == (0.0, 2.0)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--flash_attn"], "flash_attention_2"),
        (["--flash_attn", "true"], "flash_attention_2"),
        (["--flash_attn", "false"], "sdpa"),
        (["--flash_attn=0"], "sdpa"),
        ([], "flash_attention_2"),
    ],
)
def test_flash_attention_is_switched_off_by_its_flag(words, meant):
    assert tree(SFTConfig, words).ds.attn_implementation == meant


@pytest.mark.parametrize(("typed", "meant"), [("-1", 0.0), ("0", 0.0), ("0.5", 0.5)])
def test_a_kl_coefficient_that_is_not_above_0_means_none(typed, meant):
    assert tree(PPOConfig, ["--init_kl_coef", typed]).algo.kl.init_coef == meant


def test_dead_flags_are_accepted_with_a_notice():
    parsed = parse_config(PPOConfig, [*PPO_NEEDS, "--actor_init_on_gpu", "--perf"])
    assert [line for line in parsed.notices if "no effect" in line] == [
        "--actor_init_on_gpu has no effect; it is accepted for old commands.",
        "--perf has no effect; it is accepted for old commands.",
    ]
    sft = parse_config(SFTConfig, ["--pretrain", "m", "--dataset", "d", "--train_split", "train"])
    assert sft.notices == ("--train_split has no effect; it is accepted for old commands.",)


def test_a_default_that_follows_does_not_count_as_given():
    config = tree(PPOConfig, ["--rollout_batch_size", "16", "--advantage_estimator", "rloo"])
    assert config.rollout.n_samples_per_prompt == 8
    assert is_given(config, "rollout.batch_size")
    assert not is_given(config, "rollout.n_samples_per_prompt")


def test_unset_fields_of_preference_and_distillation_follow_the_rest():
    assert tree(DPOConfig, ["--ipo"]).model.loss_type == "ipo"
    assert tree(DPOConfig, ["--loss_type", "exo_pair"]).model.label_smoothing == 1e-3
    given = tree(DPOConfig, ["--loss_type", "exo_pair", "--label_smoothing", "0.1"])
    assert given.model.label_smoothing == 0.1
    assert tree(KDConfig, ["--kd_on_policy"]).kd.coef == 1
    assert tree(KDConfig, ["--kd_on_policy", "--kd_coef", "0.5"]).kd.coef == 0.5
    assert tree(KDConfig, ["--kd_on_policy", "--max_len", "300"]).kd.max_new_tokens == 150
    assert tree(KDConfig, []).kd.max_new_tokens == 512


def test_losses_without_a_reference_are_known():
    free = {
        loss
        for loss in get_args(PreferenceLossName)
        if not tree(DPOConfig, ["--loss_type", loss]).has_reference
    }
    assert free == {"simpo", "orpo", "cpo"}


def test_the_losses_are_those_of_the_formulas():
    from openrlhf.algorithms.distillation import DIVERGENCES
    from openrlhf.algorithms.preference_loss import PREFERENCE_LOSSES
    from openrlhf.algorithms.reward_loss import PAIRWISE_LOSSES

    assert set(get_args(PreferenceLossName)) == PREFERENCE_LOSSES.keys()
    smoothed = {name for name, loss in PREFERENCE_LOSSES.items() if loss.takes_label_smoothing}
    assert smoothed == set(SMOOTHED_LOSSES)

    def choices(config_class, flag):
        return set(get_args(flag_table(config_class)[flag][0].option.field.annotation))

    assert choices(RMConfig, "loss") == PAIRWISE_LOSSES.keys()
    assert choices(KDConfig, "kd_divergence") == DIVERGENCES.keys()


def test_unset_fields_follow_the_rest():
    alone = tree(PPOConfig, [])
    assert alone.rollout.n_samples_per_prompt == 1
    assert alone.vllm.num_engines is None
    assert alone.actor.num_gpus_per_node is None
    assert tree(PPOConfig, ["--advantage_estimator", "reinforce"]).num_rollout_samples == 1024
    for estimator in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo"):
        config = tree(PPOConfig, ["--advantage_estimator", estimator])
        assert config.rollout.n_samples_per_prompt == 8
    small = tree(PPOConfig, ["--rollout_batch_size", "2", "--train_batch_size", "2"])
    assert (small.train.micro_batch_size, small.rollout.micro_batch_size) == (2, 2)
    total = tree(PPOConfig, ["--data.max_len", "2048", "--rollout.max_new_tokens", "1500"])
    assert total.data.prompt_max_len == 548
    short = tree(PPOConfig, ["--data.max_len", "512"])
    assert (short.data.prompt_max_len, short.rollout.max_new_tokens) == (256, 256)
    rest = tree(PPOConfig, ["--max_len", "512", "--prompt_max_len", "100"])
    assert (rest.data.prompt_max_len, rest.rollout.max_new_tokens) == (100, 412)
    long = tree(PPOConfig, ["--max_len", "4096"])
    assert (long.data.prompt_max_len, long.rollout.max_new_tokens) == (3072, 1024)
    actor_only = tree(PPOConfig, ["--actor.gradient_checkpointing_enable"])
    assert actor_only.critic.gradient_checkpointing_enable is True
    shared = tree(PPOConfig, ["--actor_num_nodes", "2", "--colocate_all_models"])
    assert (shared.ref.num_nodes, shared.critic.num_nodes, shared.reward.num_nodes) == (2, 2, 2)
