"""The environment variables that a run honours, one by one.

MASTER_ADDR and MASTER_PORT are torch's own: ranks of tests/distributed/spawn.py meet there.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.trainer.rank_gpus import see_own_gpus

NEEDS = ["--pretrain", "m", "--prompt_data", "d", "--remote_rm_url", "http://a"]
SFT_NEEDS = ["--pretrain", "m", "--dataset", "d", "--save_path", "run"]
OF_CALLER = {  # what a caller sets for libraries, and workers get
    "HF_HOME": "/caches/hf",
    "HF_TOKEN": "hf_token_of_mine",
    "HF_HUB_OFFLINE": "1",
    "HF_ENDPOINT": "http://mirror.example",
    "WANDB_MODE": "offline",
    "WANDB_API_KEY": "key",
    "NCCL_DEBUG": "INFO",
    "NCCL_SOCKET_IFNAME": "eth7",
    "GLOO_SOCKET_IFNAME": "eth7",
    "UCX_TLS": "tcp",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512",
    "LD_LIBRARY_PATH": "/opt/nccl/lib",
    "TOKENIZERS_PARALLELISM": "true",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
    "OPENRLHF_ASYNC_QUEUE_SIZE": "3",
    "OPENRLHF_ASYNC_NUM_TASKS": "5",
}


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_CALLER.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("caller")
def test_numbers_of_asynchronous_training() -> None:
    train = parse_config(PPOConfig, NEEDS).config.train
    assert (train.async_queue_size, train.async_num_tasks) == (3, 5)


@pytest.mark.parametrize(
    ("words", "with_it", "without"),
    [
        ([], "/logs", None),
        (["--use_tensorboard"], "/logs", "run/tensorboard"),
        (["--use_tensorboard", "true"], "/logs", "run/tensorboard"),
        (["--report_to", "tensorboard"], "/logs", "run/tensorboard"),
        (["--use_tensorboard", "/mine"], "/mine", "/mine"),
        (["--use_tensorboard", "false"], None, None),
    ],
)
def test_the_folder_of_tensorboard(
    monkeypatch: pytest.MonkeyPatch, words: list[str], with_it: str | None, without: str | None
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "/logs")
    assert parse_config(SFTConfig, SFT_NEEDS + words).config.logger.tensorboard_dir == with_it
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR")
    assert parse_config(SFTConfig, SFT_NEEDS + words).config.logger.tensorboard_dir == without


def test_the_gpus_that_a_caller_leaves_are_shared_out() -> None:
    line = "--eval_task generate_vllm --pretrain m --dataset d --output_path o"
    config = parse_config(BatchInferenceConfig, line.split()).config
    env = {"CUDA_VISIBLE_DEVICES": "4,6", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    see_own_gpus(config, env=env)
    assert env["CUDA_VISIBLE_DEVICES"] == "6"


def test_the_hub_is_the_callers() -> None:
    code = (
        "from openrlhf.utils.logging import quiet_frameworks; quiet_frameworks(); "
        "from huggingface_hub import constants as c, get_token; "
        "print(c.HF_HOME, c.ENDPOINT, c.HF_HUB_OFFLINE, get_token())"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | OF_CALLER)
    found = ["/caches/hf", "http://mirror.example", "True", "hf_token_of_mine"]
    assert result.stdout.split() == found, result.stderr
