"""Every setting is read by some code, or somebody who types it is told that it has no effect."""

from __future__ import annotations

import ast

import pytest

from openrlhf.config.base import value_at, walk
from openrlhf.config.cli import parse_config
from openrlhf.config.distillation import KDConfig
from openrlhf.config.flags import plain_flag
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.preference import DPOConfig, KTOConfig, RMConfig
from openrlhf.config.process import PRMConfig
from openrlhf.config.serving import BatchInferenceConfig, ChatConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.config.unimplemented import UNIMPLEMENTED
from tests.config.test_names import NAMES
from tests.source import modules

ROWS = "--pretrain m --dataset d"
NEEDS = {
    SFTConfig: ROWS,
    RMConfig: ROWS,
    DPOConfig: ROWS,
    KTOConfig: ROWS,
    PRMConfig: f"{ROWS} --placeholder_token <step>",
    KDConfig: f"{ROWS} --teacher_model t",
    ChatConfig: "--pretrain m",
    PPOConfig: "--pretrain m --prompt_data d --remote_rm_url r.py",
}
# Read inside the config alone: other leaves and properties follow from them.
READ_BY_CONFIG = {
    "model.ipo_enable",
    "rollout.greedy_sampling",
    "limits.max_body_mib",
    "algo.advantage.is_correction_enable",
    "algo.advantage.is_correction_type",
    "algo.advantage.is_correction_level",
    "algo.advantage.is_correction_mode",
    "algo.advantage.is_correction_clamp_survivors",
}
# Accepted with a line that says what happens instead, or with nothing to say: batches are packed.
ANNOUNCED = {
    "data.dataloader_num_workers": "2",
    "model.compute_fp32_loss_enable": "",
    "muon.nesterov": "false",
    "muon.ns_steps": "3",
}
HARMLESS = {"ds.packing_samples"}
# They refine what is refused as not yet implemented, by the name of what they refine.
REFINEMENTS = {
    "actor.ptx_coef": "data.pretrain_dataset",
    "data.pretrain_probs": "data.pretrain_dataset",
    "data.image_key": "data.max_images_per_prompt",
    "train.ema_beta": "train.enable_ema",
    "train.async_queue_size": "train.async_enable",
    "train.async_num_tasks": "train.async_enable",
    "algo.advantage.is_correction_type": "algo.advantage.is_correction_enable",
    "algo.advantage.is_correction_threshold": "algo.advantage.is_correction_enable",
    "algo.dynamic_filtering_range": "algo.dynamic_filtering_enable",
    "algo.dynamic_filtering_max_empty": "algo.dynamic_filtering_enable",
}


def names_read() -> set[str]:
    """Every attribute that code outside the config reads."""
    return {
        node.attr
        for module in modules()
        if not module.name.startswith("openrlhf.config.")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


NOT_CLIPPED = "with --optim muon, whose steps are orthogonal: nothing is clipped"
SHARED = "with --ring_attn_size, which has an attention of its own"
NOT_CORRECTED = "without --enable_vllm_is_correction"


def without_role(path: str) -> str:
    """`muon.lr` of `actor.muon.lr`: the settings of an optimizer are those of every model."""
    return path.removeprefix("actor.").removeprefix("critic.") if ".muon." in path else path


def test_every_leaf_is_read_or_known_to_have_no_effect():
    read = names_read()
    waiting = {later.path for later in UNIMPLEMENTED}
    refinements = {path for path, refined in REFINEMENTS.items() if refined in waiting}
    known = {*READ_BY_CONFIG, *ANNOUNCED, *HARMLESS, *refinements, *waiting}
    unread = {
        without_role(option.path)
        for config_class in NAMES
        for option in walk(config_class)
        if option.path.rpartition(".")[2] not in read
    }
    assert unread <= known, "no code reads these settings"


@pytest.mark.parametrize(
    ("config_class", "option"),
    [
        pytest.param(config_class, option, id=f"{config_class.__name__}-{option.path}")
        for config_class in NEEDS
        for option in walk(config_class)
        if without_role(option.path) in ANNOUNCED
    ],
)
def test_who_types_a_setting_without_effect_is_told(config_class, option):
    path, value = option.path, ANNOUNCED[without_role(option.path)]
    optim = ["--optim", "muon"] if "muon." in path else []
    words = [f"--{path}", *value.split(), *optim]
    parsed = parse_config(config_class, [*NEEDS[config_class].split(), *words])
    assert value_at(parsed.config, path) != option.field.get_default()
    said = " ".join(parsed.notices)
    assert plain_flag(option) in said
    assert "no effect" in said or "changes nothing" in said


@pytest.mark.parametrize(
    ("config_class", "line", "expected"),
    [
        (SFTConfig, "--train_max_tokens_per_gpu 99", "without --use_dynamic_batch"),
        (SFTConfig, "--micro_train_batch_size 3 --use_dynamic_batch", "with --use_dynamic_batch"),
        (SFTConfig, "--lora_alpha 8", "without --lora_rank"),
        (SFTConfig, "--ring_head_stride 2", "without --ring_attn_size"),
        (PPOConfig, "--cp_mode ulysses", "without --ring_attn_size"),
        (DPOConfig, "--attn_implementation sdpa --ring_attn_size 2", SHARED),
        (PRMConfig, "--target_modules q_proj", "without --lora_rank"),
        (KTOConfig, "--lora_dropout 0.5", "without --lora_rank"),
        (SFTConfig, "--muon.lr 0.1", "without --optim muon"),
        (SFTConfig, "--muon.ns_steps 3", "without --optim muon"),
        (DPOConfig, "--eval_split validation", "without --eval_dataset"),
        (DPOConfig, "--eval_steps 5", "without --eval_dataset"),
        (SFTConfig, "--save_hf_ckpt", "without --save_steps"),
        (SFTConfig, "--disable_ds_ckpt", "without --save_steps"),
        (SFTConfig, "--max_ckpt_num 9", "without --save_steps"),
        (RMConfig, "--wandb_project p", "without --use_wandb"),
        (SFTConfig, "--deepspeed_enable_sleep", "here: nothing but training needs the memory"),
        (SFTConfig, "--value_head_prefix v", "here: the model has no value head"),
        (SFTConfig, "--input_template {} --apply_chat_template", "with --apply_chat_template"),
        (SFTConfig, "--output_key o --pretrain_mode", "with --pretrain_mode"),
        (KDConfig, "--input_template {} --pretrain_mode", "with --pretrain_mode"),
        (
            DPOConfig,
            "--ref_offload --lora_rank 4 --ref_pretrain m",
            "with --lora_rank: the model without its adapter is the reference",
        ),
        (
            KTOConfig,
            "--ref_offload --lora_rank 4",
            "with --lora_rank: the model without its adapter is the reference",
        ),
        (
            DPOConfig,
            "--ref_offload --load_in_4bit --lora_rank 4 --ref_pretrain other",
            "with --load_in_4bit: packed weights stay on the device",
        ),
        (
            KDConfig,
            "--teacher_offload --load_in_4bit --lora_rank 4",
            "with --load_in_4bit: packed weights stay on the device",
        ),
        (ChatConfig, "--csft_prompt x", "without --enable_csft"),
        (ChatConfig, "--top_p 0.5 --greedy_sampling", "with --greedy_sampling"),
        (ChatConfig, "--top_p 0.5 --temperature 0", "with --temperature 0"),
        (ChatConfig, "--input_template {} --apply_chat_template", "with --apply_chat_template"),
        (PPOConfig, "--train_max_tokens_per_gpu 99", "without --use_dynamic_batch"),
        (PPOConfig, "--rollout_max_tokens_per_gpu 99", "without --use_dynamic_batch"),
        (PPOConfig, "--use_kl_loss --init_kl_coef 0", "with --init_kl_coef 0"),
        (
            PPOConfig,
            "--lambd 0.9 --advantage_estimator reinforce",
            "without --advantage_estimator gae",
        ),
        (
            PPOConfig,
            "--dual_clip 3 --policy_loss_type sapo",
            "with --policy_loss_type sapo, which has no clip range",
        ),
        (
            PPOConfig,
            "--eps_clip 0.3 --policy_loss_type sapo",
            "with --policy_loss_type sapo, which has no clip range",
        ),
        (
            PPOConfig,
            "--eps_clip_low_high 0.2 0.3 --policy_loss_type sapo",
            "with --policy_loss_type sapo, which has no clip range",
        ),
        (PPOConfig, "--dual_clip 3 --policy_loss_type cispo", "with --policy_loss_type cispo"),
        (PPOConfig, "--eps_clip 0.3 --eps_clip_low_high 0.2 0.3", "with --eps_clip_low_high"),
        (PPOConfig, "--sapo_tau 1 2", "without --policy_loss_type sapo"),
        (
            PPOConfig,
            "--vllm_gpu_memory_utilization 0.5 --vllm_num_engines 0",
            "with --vllm_num_engines 0",
        ),
        (PPOConfig, "--vllm_enable_sleep --vllm_num_engines 0", "with --vllm_num_engines 0"),
        (
            PPOConfig,
            "--vllm_enable_sleep --vllm_num_engines 0 --colocate_all_models",
            "with --vllm_num_engines 0",
        ),
        (
            PPOConfig,
            "--vllm_tensor_parallel_size 2 --vllm_num_engines 0",
            "with --vllm_num_engines 0",
        ),
        (PPOConfig, "--vllm_sync_backend gloo --vllm_num_engines 0", "with --vllm_num_engines 0"),
        (PPOConfig, "--enforce_eager --vllm_num_engines 0", "with --vllm_num_engines 0"),
        (PPOConfig, "--enable_prefix_caching --vllm_num_engines 0", "with --vllm_num_engines 0"),
        (PPOConfig, "--vllm_enable_sleep", "without --colocate_all_models"),
        (
            PPOConfig,
            "--vllm_enable_sleep --async_train --enable_vllm_is_correction",
            "without --colocate_all_models",
        ),
        (
            PPOConfig,
            "--vllm_enable_sleep --colocate_all_models --async_train --enable_vllm_is_correction",
            "with --async_train",
        ),
        (SFTConfig, "--muon.momentum 0.5", "without --optim muon"),
        (RMConfig, "--ckpt.best_metric_key eval/x_pass1", "here: only RL has pass rates"),
        (SFTConfig, "--min_lr_ratio 0.3 --lr_scheduler linear", "with --lr_scheduler linear"),
        (DPOConfig, "--lr_warmup_ratio 0.1 --lr_scheduler greedy", "with --lr_scheduler greedy"),
        (PPOConfig, "--actor.muon.lr 0.1", "without --optim muon"),
        (PPOConfig, "--critic.muon.momentum 0.5", "without --optim muon"),
        (PPOConfig, "--max_norm 0.5 --optim muon", NOT_CLIPPED),
        (PPOConfig, "--actor.max_norm 0.5 --optim muon", NOT_CLIPPED),
        (PPOConfig, "--critic.max_norm 0.5 --critic.optim muon", NOT_CLIPPED),
        (PPOConfig, "--max_norm 0.5 --optim muon --advantage_estimator reinforce", NOT_CLIPPED),
        (PPOConfig, "--min_lr_ratio 0.3 --lr_scheduler cosine", "with --lr_scheduler cosine"),
        (
            PPOConfig,
            "--critic.min_lr_ratio 0.3 --critic.lr_scheduler constant",
            "with --lr_scheduler constant",
        ),
        (
            PPOConfig,
            "--lr_warmup_ratio 0.1 --lr_scheduler constant",
            "with --lr_scheduler constant",
        ),
        (PPOConfig, "--gradient_checkpointing_use_reentrant", "without --gradient_checkpointing"),
        (PPOConfig, "--micro_train_batch_size 3 --use_dynamic_batch", "with --use_dynamic_batch"),
        (PPOConfig, "--eval_temperature 0.3", "without --eval_dataset"),
        (PPOConfig, "--eval_n_samples_per_prompt 2", "without --eval_dataset"),
        (PPOConfig, "--ema_beta 0.5", "without --enable_ema"),
        (PPOConfig, "--is_correction_type icepop", NOT_CORRECTED),
        (PPOConfig, "--is_correction_level geometric", NOT_CORRECTED),
        (PPOConfig, "--is_correction_mode mask", NOT_CORRECTED),
        (PPOConfig, "--is_correction_gating tv", NOT_CORRECTED),
        (PPOConfig, "--is_correction_clamp_survivors", NOT_CORRECTED),
        (PPOConfig, "--kl_unbiased_gradient", "without --use_kl_loss"),
        (PPOConfig, "--vllm_is_truncated_threshold 0.5 2", NOT_CORRECTED),
        (PPOConfig, "--dynamic_filtering_reward_range 0.1 0.9", "without --dynamic_filtering"),
        (PPOConfig, "--dynamic_filtering_max_empty 3", "without --dynamic_filtering"),
        (PPOConfig, "--overlong_penalty_factor 2", "without --overlong_buffer_len"),
        (PPOConfig, "--reward_try_timeout_s 3", "without URLs in --remote_rm_url"),
        (PPOConfig, "--reward_max_dropped 0.5", "without --reward_failure drop_group"),
        (PPOConfig, "--async_num_tasks 3", "without --agent_func_path"),
    ],
)
def test_a_setting_that_nothing_reads_in_this_run_is_said(config_class, line, expected):
    notices = parse_config(config_class, [*NEEDS[config_class].split(), *line.split()]).notices
    assert list(notices) == [f"{line.split()[0]} has no effect {expected}."]


@pytest.mark.parametrize(
    ("config_class", "line"),
    [
        (SFTConfig, "--train_max_tokens_per_gpu 99 --use_dynamic_batch"),
        (SFTConfig, "--lora_alpha 8 --lora_rank 4"),
        (DPOConfig, "--ring_attn_size 2 --ring_head_stride 2"),
        (SFTConfig, "--ring_attn_size 2 --cp_mode ulysses"),
        (SFTConfig, "--optim muon --muon.lr 0.1 --muon.momentum 0.9"),
        (DPOConfig, "--eval_dataset e --eval_split validation --eval_steps 5"),
        (SFTConfig, "--save_steps 5 --save_hf_ckpt --disable_ds_ckpt --max_ckpt_num 9"),
        (RMConfig, "--value_head_prefix v"),
        (RMConfig, "--use_wandb true --wandb_project p"),
        (SFTConfig, "--input_template {} --output_key o"),
        (DPOConfig, "--ref_offload --lora_rank 4 --ref_pretrain other"),
        (DPOConfig, "--ref_offload"),
        (KTOConfig, "--ref_offload"),
        (ChatConfig, "--csft_prompt x --enable_csft --top_p 0.5"),
        (SFTConfig, "--max_ckpt_num 3 --lora_alpha 16"),  # the defaults
        (
            PPOConfig,
            "--train_max_tokens_per_gpu 99 --rollout_max_tokens_per_gpu 99 --use_dynamic_batch",
        ),
        (PPOConfig, "--use_kl_loss --kl_estimator k3 --lambd 0.9 --eps_clip 0.3 --dual_clip 3"),
        (PPOConfig, "--eps_clip 0.3 --dual_clip 3 --policy_loss_type gspo"),
        (PPOConfig, "--eps_clip 0.3 --policy_loss_type cispo"),
        (PPOConfig, "--sapo_tau 1 2 --policy_loss_type sapo"),
        (PPOConfig, "--sapo_tau 1 2 --dual_clip 3 --policy_loss_type mine.py:loss"),
        (PPOConfig, "--vllm_gpu_memory_utilization 0.5 --vllm_enable_sleep --colocate_all_models"),
        (PPOConfig, "--vllm_num_engines 0 --lambd 1 --eps_clip 0.2"),  # the defaults
        (PPOConfig, "--optim muon --actor.muon.lr 0.1 --critic.muon.momentum 0.9"),
        (PPOConfig, "--lr_scheduler polynomial --min_lr_ratio 0.3 --lr_warmup_ratio 0.1"),
        (PPOConfig, "--gradient_checkpointing_use_reentrant --gradient_checkpointing"),
        (PPOConfig, "--micro_rollout_batch_size 3 --use_dynamic_batch"),  # calls of the function
        (
            PPOConfig,
            "--eval_temperature 0.3 --eval_n_samples_per_prompt 2 --ckpt.best_metric_key k "
            "--eval_dataset e",
        ),
        (PPOConfig, "--ema_beta 0.5 --enable_ema"),
        (
            PPOConfig,
            "--is_correction_type icepop --is_correction_level token --is_correction_treatment "
            "mask --vllm_is_truncated_threshold 0.5 2 --enable_vllm_is_correction",
        ),
        (
            PPOConfig,
            "--dynamic_filtering_reward_range 0.1 0.9 --dynamic_filtering_max_empty 3 "
            "--dynamic_filtering --n_samples_per_prompt 2",
        ),
        (PPOConfig, "--overlong_penalty_factor 2 --overlong_buffer_len 9"),
        (
            PPOConfig,
            "--reward_timeout_s 3 --reward_memory_gib 1 --reward_num_workers 2 "
            "--reward_failure drop_group --reward_max_dropped 0.5",
        ),
    ],
)
def test_a_setting_that_is_read_is_not_talked_about(config_class, line):
    parsed = parse_config(config_class, [*NEEDS[config_class].split(), *line.split()])
    assert parsed.notices == ()


@pytest.mark.parametrize(
    ("rewards", "line", "expected"),
    [
        ("--reward_pretrain r", "--reward_timeout_s 3", "with --reward_pretrain"),
        ("--reward_pretrain r", "--reward_try_timeout_s 3", "without URLs in --remote_rm_url"),
        ("--reward_pretrain r", "--reward_memory_gib 1", "without a .py file in --remote_rm_url"),
        ("--remote_rm_url http://h", "--reward_num_workers 2", "without a .py file in "
         "--remote_rm_url"),
        ("--agent_func_path a.py", "--reward_num_workers 2", "without a .py file in "
         "--remote_rm_url"),
        (
            "--reward_pretrain r",
            "--micro_rollout_batch_size 3 --use_dynamic_batch",
            "with --use_dynamic_batch",
        ),
        ("--remote_rm_url http://h", "--reward_timeout_s 3 --reward_try_timeout_s 3", None),
        (
            "--agent_func_path a.py",
            "--reward_timeout_s 3 --async_num_tasks 9 --agent_timeout_s 9",
            None,
        ),
    ],
)  # fmt: skip
def test_what_reads_a_setting_of_rewards_is_where_they_come_from(rewards, line, expected):
    words = f"--pretrain m --prompt_data d {rewards} {line}".split()
    told = [] if expected is None else [f"{line.split()[0]} has no effect {expected}."]
    assert list(parse_config(PPOConfig, words).notices) == told


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--max_norm 0.5 --actor.optim muon", ["--actor.max_norm"]),
        ("--min_lr_ratio 0.3 --critic.lr_scheduler constant", ["--critic.min_lr_ratio"]),
        (
            "--min_lr_ratio 0.3 --lr_scheduler linear --critic.lr_scheduler constant",
            ["--actor.min_lr_ratio", "--critic.min_lr_ratio"],
        ),
    ],
)
def test_a_flag_of_two_models_is_not_idle_where_one_of_them_reads_it(line, expected):
    notices = parse_config(PPOConfig, [*NEEDS[PPOConfig].split(), *line.split()]).notices
    assert [notice.split()[0] for notice in notices] == expected


@pytest.mark.parametrize(
    ("task", "line", "expected"),
    [
        ("generate", "--max_len 9", "with --eval_task generate"),
        ("generate_vllm", "--output_key o", "with --eval_task generate_vllm"),
        ("generate", "--value_head_prefix v", "with --eval_task generate"),
        ("generate", "--zero_stage 3", "with --eval_task generate"),
        ("generate_vllm", "--micro_batch_size 3", "with --eval_task generate_vllm"),
        ("generate_vllm", "--rollout_batch_size 3", "without --iter"),
        ("generate", "--csft_prompt x", "without --enable_csft"),
        ("generate", "--top_p 0.5 --greedy_sampling", "with --greedy_sampling"),
        ("rm", "--csft_prompt x", "with --eval_task rm"),
        ("rm", "--reward_template {input}{reward}", "without --post_processor csft"),
        ("rm", "--input_template {} --apply_chat_template", "with --apply_chat_template"),
    ],
)
def test_a_setting_that_a_task_does_not_read_is_said(task, line, expected):
    words = f"--pretrain m --dataset d --output_path o --eval_task {task} {line}".split()
    notices = parse_config(BatchInferenceConfig, words).notices
    assert list(notices) == [f"{line.split()[0]} has no effect {expected}."]


def test_the_probabilities_of_the_training_data_are_not_those_of_the_evaluation_data():
    line = f"{ROWS},e --dataset_probs 0.5,0.5 --eval_dataset a"
    assert parse_config(SFTConfig, line.split()).notices == ()
    [notice] = parse_config(SFTConfig, f"{line},b".split()).notices
    assert notice.startswith("--dataset_probs has no effect on --eval_dataset")
