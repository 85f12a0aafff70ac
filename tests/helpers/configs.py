"""The commands with their configs, and how flags are refused."""

from pathlib import Path

import pytest

from openrlhf.config.base import CommandConfig
from openrlhf.config.cli import parse_config
from openrlhf.config.evaluation import EvaluateConfig
from openrlhf.config.methods import METHODS
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.serving import (
    BatchInferenceConfig,
    ChatConfig,
    DoctorConfig,
    LoraCombinerConfig,
    PushConfig,
    ReplayConfig,
    ReportConfig,
    ServeRewardConfig,
)
from openrlhf.config.supervised import DPOConfig, KDConfig, KTOConfig, PRMConfig, SFTConfig
from openrlhf.errors import ConfigError

COMMANDS: dict[str, type[CommandConfig]] = {
    **{f"train_{name}": method.config_class for name, method in METHODS.items()},
    "train_ppo_ray": PPOConfig,
    "evaluate": EvaluateConfig,
    "batch_inference": BatchInferenceConfig,
    "serve_rm": ServeRewardConfig,
    "lora_combiner": LoraCombinerConfig,
    "push": PushConfig,
    "interactive_chat": ChatConfig,
    "doctor": DoctorConfig,
    "replay": ReplayConfig,
    "report": ReportConfig,
}
CONFIGS = tuple(COMMANDS.values())
ROWS = "--pretrain m --dataset d "
NEEDS = {
    PPOConfig: "--pretrain m --prompt_data d --remote_rm_url r.py ",
    SFTConfig: ROWS,
    DPOConfig: ROWS,
    KTOConfig: ROWS,
    PRMConfig: ROWS + "--placeholder_token <step> ",
    KDConfig: ROWS + "--teacher_model t ",
    EvaluateConfig: "--models m --dataset d --remote_rm_url r.py ",
    BatchInferenceConfig: ROWS + "--output_path o.jsonl --eval_task ",
    LoraCombinerConfig: "--model_path m --lora_path l --output_path ",
    ServeRewardConfig: "--reward_pretrain m ",
}


def rl_config(flags: str = "", *, pretrain: Path | str = "m") -> PPOConfig:
    """The configuration of an RL command; later flags win."""
    line = f"--pretrain {pretrain} --prompt_data d --remote_rm_url r.py {flags}"
    return parse_config(PPOConfig, line.split()).config


def problems(config_class, line):
    with pytest.raises(ConfigError) as caught:
        parse_config(config_class, line.split())
    return caught.value.problems
