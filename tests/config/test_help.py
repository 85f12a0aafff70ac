"""The text of --help: every flag in its group, with its values, its default and its names."""

import pytest

from openrlhf.config.base import walk
from openrlhf.config.cli import help_text
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SFTConfig
from tests.config.test_settings import CONFIGS


def test_flags_stand_in_groups_with_values_help_names_and_defaults():
    text = help_text(PPOConfig, "openrlhf ppo")
    assert text.startswith("usage: openrlhf ppo [-h] [OPTIONS]\n\nReinforcement learning: PPO")
    assert "\nactor.adam options:\n  `adam.*`: AdamW.\n\n  --actor.adam.lr FLOAT" in text
    words = " ".join(text.split())
    for said in (
        "--ds.zero_stage {0,1,2,3} ZeRO stage. Also --zero_stage. (default: 2)",
        "--algo.kl.target FLOAT|none KL to adapt to; unset: fixed. Also "
        "--kl_target. (default: none)",
        "--actor.adam.betas FLOAT FLOAT Adam betas. Also --adam_betas. (default: 0.9 0.95)",
        "--train.async_num_tasks INT Agents of an engine. Also --async_num_tasks. Environment: "
        "OPENRLHF_ASYNC_NUM_TASKS. (default: 128)",
        "--use_ms ModelScope instead of the Hugging Face hub. (default: false)",
    ):
        assert said in words
    text = " ".join(help_text(SFTConfig, "openrlhf sft").split())
    assert "(default: 'User: {}\\nAssistant: ')" in text


@pytest.mark.parametrize("config_class", CONFIGS)
def test_every_name_of_every_flag_is_in_the_help(config_class):
    text = help_text(config_class, "x", width=90)
    words = set(text.replace(".\n", "\n").replace(". ", " ").split())
    for leaf in walk(config_class):
        assert leaf.field.description.split()[0] in text
        assert {f"--{name}" for name, _ in leaf.names} <= words, leaf.path
    broken = [line for line in text.splitlines() if "{" not in line]  # choices stay on one line
    assert max(map(len, broken)) <= 104  # the notes at the top are not broken
