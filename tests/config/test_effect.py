"""Settings are read by some code; a setting that was typed in vain is said."""

from __future__ import annotations

import ast

import pytest

from openrlhf.config.base import walk
from openrlhf.config.cli import parse_config
from openrlhf.config.distillation import KDConfig
from openrlhf.config.effect import CONDITION
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.preference import DPOConfig, KTOConfig, RMConfig
from openrlhf.config.process import PRMConfig
from openrlhf.config.serving import ChatConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.config.unimplemented import UNIMPLEMENTED
from tests.config.test_settings import CONFIGS
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


def without_role(path: str) -> str:
    """`muon.lr` of `actor.muon.lr`: the settings of an optimizer are those of every model."""
    return path.removeprefix("actor.").removeprefix("critic.") if ".muon." in path else path


def test_every_leaf_is_read_or_known_to_have_no_effect():
    read = names_read()
    waiting = set(UNIMPLEMENTED)
    refinements = {path for path, refined in REFINEMENTS.items() if refined in waiting}
    known = {*READ_BY_CONFIG, *ANNOUNCED, *HARMLESS, *refinements, *waiting}
    unread = {
        without_role(option.path)
        for config_class in CONFIGS
        for option in walk(config_class)
        if option.path.rpartition(".")[2] not in read
    }
    assert unread <= known, "no code reads these settings"


def test_every_condition_names_a_setting():
    paths = {option.path for config_class in CONFIGS for option in walk(config_class)}
    for config_class in CONFIGS:
        for option in walk(config_class):
            if condition := option.info.only_with:
                found = CONDITION.fullmatch(condition)
                assert found and found["path"] in paths, f"{option.path}: {condition}"


@pytest.mark.parametrize(
    ("config_class", "line", "expected"),
    [
        (SFTConfig, "--lora_alpha 8", "without --lora_rank"),
        (SFTConfig, "--train_max_tokens_per_gpu 99", "without --use_dynamic_batch"),
        (DPOConfig, "--ring_head_stride 2", "without --ring_attn_size"),
        (RMConfig, "--eval_steps 5", "without --eval_dataset"),
        (SFTConfig, "--save_hf_ckpt", "without --save_steps"),
        (DPOConfig, "--simpo_gamma 1", "without --loss_type simpo"),
        (SFTConfig, "--input_template {} --apply_chat_template", "with --apply_chat_template"),
        (SFTConfig, "--dataloader_num_workers 2", "here: the trainer packs batches itself"),
        (KDConfig, "--kd_max_new_tokens 8", "without --kd_on_policy"),
        (ChatConfig, "--csft_prompt x", "without --enable_csft"),
        (PPOConfig, "--eps_clip 0.3 --eps_clip_low_high 0.2 0.3", "with --eps_clip_low_high"),
        (PPOConfig, "--use_kl_loss --init_kl_coef 0", "without --init_kl_coef"),
        (
            PPOConfig,
            "--lambd 0.9 --advantage_estimator reinforce",
            "without --advantage_estimator gae",
        ),
        (PPOConfig, "--reward_max_dropped 0.5", "without --reward_failure drop_group"),
        (PPOConfig, "--vllm_enable_sleep", "without --colocate_all_models"),
        (PPOConfig, "--is_correction_type icepop", "without --enable_vllm_is_correction"),
    ],
)
def test_a_setting_that_was_typed_in_vain_is_said(config_class, line, expected):
    notices = parse_config(config_class, [*NEEDS[config_class].split(), *line.split()]).notices
    assert list(notices) == [f"{line.split()[0]} has no effect {expected}."]


@pytest.mark.parametrize(
    ("config_class", "line"),
    [
        (SFTConfig, "--lora_alpha 8 --lora_rank 4"),
        (SFTConfig, "--max_ckpt_num 3 --lora_alpha 16"),  # the defaults
        (DPOConfig, "--ring_attn_size 2 --ring_head_stride 2"),
        (DPOConfig, "--eval_dataset e --eval_split validation --eval_steps 5"),
        (SFTConfig, "--save_steps 5 --save_hf_ckpt --disable_ds_ckpt --max_ckpt_num 9"),
        (SFTConfig, "--input_template {} --output_key o"),
        (PPOConfig, "--use_kl_loss --kl_estimator k3 --lambd 0.9 --eps_clip 0.3 --dual_clip 3"),
        (PPOConfig, "--is_correction_type icepop --enable_vllm_is_correction"),
        (PPOConfig, "--reward_failure drop_group --reward_max_dropped 0.5"),
    ],
)
def test_a_setting_that_is_read_is_not_talked_about(config_class, line):
    parsed = parse_config(config_class, [*NEEDS[config_class].split(), *line.split()])
    assert parsed.notices == ()
