"""Flags whose feature is not built are refused by name; flags without effect do not block a run."""

from __future__ import annotations

import pytest

from openrlhf.config.base import walk
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.config.unimplemented import (
    UNIMPLEMENTED,
    unimplemented_problems,
)
from openrlhf.errors import ConfigError

PPO_NEEDS = "--pretrain m --prompt_data d --remote_rm_url r.py "
SFT_NEEDS = "--pretrain m --dataset d "


def refused(line, config_class=PPOConfig, needs=PPO_NEEDS):
    return list(unimplemented_problems(parse_config(config_class, (needs + line).split()).config))


def test_the_list_is_this():
    assert list(UNIMPLEMENTED) == [
        "actor.freeze_visual_encoder",
        "data.max_images_per_prompt",
    ]


def test_every_path_of_the_list_is_a_field():
    known = {option.path for tree in (PPOConfig, SFTConfig) for option in walk(tree)}
    assert UNIMPLEMENTED.keys() <= known


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("--max_images_per_prompt 2", "--max_images_per_prompt 2"),
        ("--freeze_visual_encoder", "--freeze_visual_encoder"),
    ],
)  # fmt: skip
def test_a_setting_of_the_list_is_refused_with_its_flag(line, flag):
    lines = refused(line)
    assert len(lines) == 1
    assert lines[0].startswith(f"not yet implemented: {flag} (")


def test_all_are_refused_together():
    line = PPO_NEEDS + "--max_images_per_prompt 2 --gamma 3 --freeze_visual_encoder"
    with pytest.raises(ConfigError) as caught:
        parse_config(PPOConfig, line.split(), more_problems=unimplemented_problems)
    assert caught.value.problems == [
        "--gamma must be at most 1.0: 3. Type a value at most 1.0.",
        "not yet implemented: --freeze_visual_encoder (vision-language models). Leave it out.",
        "not yet implemented: --max_images_per_prompt 2 (vision-language models). Leave it out.",
    ]


def test_built_features_and_settings_without_effect_pass():
    line = (
        "--save_hf_ckpt --load_checkpoint --save_steps 2 --pretrain_data d --eval_steps 5 "
        "--use_tensorboard t "
        "--overlap_comm --adam_offload --gradient_checkpointing --deepspeed_enable_sleep "
        "--vllm_enable_sleep --colocate_all_models --full_determinism --use_dynamic_batch "
        "--max_epochs 2 --policy_loss_type sapo --dynamic_filtering --n_samples_per_prompt 2 "
        "--enable_vllm_is_correction "
        "--overlong_buffer_len 16 --kl_target 0.1 "
        "--stop_properly_penalty_coef 0.5 --entropy_loss_coef 0 --freezing_actor_steps 2 "
        "--save_value_network --vllm_tensor_parallel_size 2 --use_wandb true --ptx_coef 0.1 "
        "--reward_failure drop_group --remote_rm_url http://a:5000/get_reward,http://b/get_reward "
        "--async_train --async_queue_size 2 --partial_rollout --enable_ema --ema_beta 0.9 "
        "--lora_alpha 32 --image_key pictures"
    )
    assert refused(line) == []
    assert refused("--save_hf_ckpt --multiturn --apply_chat_template", SFTConfig, SFT_NEEDS) == []
