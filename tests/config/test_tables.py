"""Every flag of every command is accepted, with the default that users know."""

from __future__ import annotations

import re
import time
from importlib import import_module

import pytest

from openrlhf.config.base import value_at
from openrlhf.config.cli import build, parse_config
from openrlhf.config.distillation import KDConfig
from openrlhf.config.flags import flag_table
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.preference import DPOConfig, KTOConfig, RMConfig
from openrlhf.config.process import PRMConfig
from openrlhf.config.reward_server import ServeRewardConfig
from openrlhf.config.serving import BatchInferenceConfig, ChatConfig, LoraCombinerConfig
from openrlhf.config.supervised import SFTConfig
from tests.config import tables

ROWS = ("dataset", "dataset_probs", "dataset_split")  # PPO has prompts
SHARED = {flag: default for flag, default in tables.SUPERVISED.items() if flag not in ROWS}
COMMANDS = {
    "train_sft": (SFTConfig, {**tables.SUPERVISED, **tables.SFT}),
    "train_rm": (RMConfig, {**tables.SUPERVISED, **tables.RM}),
    "train_dpo": (DPOConfig, {**tables.SUPERVISED, **tables.DPO}),
    "train_kto": (KTOConfig, {**tables.SUPERVISED, **tables.KTO}),
    "train_prm": (PRMConfig, {**tables.SUPERVISED, **tables.PRM}),
    "train_kd": (KDConfig, {**tables.SUPERVISED, **tables.KD}),
    "train_ppo_ray": (PPOConfig, {**SHARED, **tables.PPO}),
    "batch_inference": (BatchInferenceConfig, tables.BATCH_INFERENCE),
    "serve_rm": (ServeRewardConfig, tables.SERVE_RM),
    "lora_combiner": (LoraCombinerConfig, tables.LORA_COMBINER),
    "interactive_chat": (ChatConfig, tables.INTERACTIVE_CHAT),
}
# Our defaults where they are others on purpose.
DECIDED_OTHERWISE = {
    "bf16": "auto",  # the checkpoint's type
    "flash_attn": "flash_attention_2",  # SDPA where it is missing
    "value_head_prefix": "score",  # of batch_inference: exported reward models load without it
    "host": "127.0.0.1",  # other machines only when asked, and with a token
    "max_ckpt_mem": float("inf"),  # 1e8 GB is no cap
    "actor_num_gpus_per_node": None,  # all visible
    "critic_num_gpus_per_node": None,
    "ref_num_gpus_per_node": None,
    "reward_num_gpus_per_node": None,
}
HERE = [
    (config_class, flag, default)
    for config_class, flags in COMMANDS.values()
    for flag, default in flags.items()
    if flag not in config_class.dead_flags
]


def defaults(config_class):
    return build(config_class, {})[0]


@pytest.mark.parametrize(
    ("config_class", "flag", "default"), HERE, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_flag_is_accepted_and_has_its_default(config_class, flag, default):
    target = flag_table(config_class)[flag][0]
    value = value_at(defaults(config_class), target.option.path)
    if flag in ("wandb_run_name", "save_path"):
        assert value.startswith(default)
    else:
        expected = DECIDED_OTHERWISE.get(flag, default)
        assert value == expected
        assert isinstance(value, bool) == isinstance(expected, bool)


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


def test_flags_without_effect_are_these():
    dead = {name: config_class.dead_flags for name, (config_class, _) in COMMANDS.items()}
    assert {name: flags for name, flags in dead.items() if flags} == {
        "train_sft": ("train_split",),
        "train_ppo_ray": ("actor_init_on_gpu", "perf"),
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_reads_its_own_config(name):
    module = import_module(f"openrlhf.cli.{name}")
    assert getattr(module, COMMANDS[name][0].__name__) is COMMANDS[name][0]
