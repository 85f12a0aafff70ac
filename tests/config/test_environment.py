"""The environment variables that a run honours, one by one.

MASTER_ADDR and MASTER_PORT are torch's own: ranks of tests/distributed/spawn.py meet there. Numbers
of asynchronous training: test_async_settings.py; GPUs: tests/serving/test_batch_inference.py.
"""

import os
import subprocess
import sys

import pytest

from openrlhf.config.cli import parse_config
from openrlhf.config.supervised import SFTConfig

SFT_NEEDS = ["--pretrain", "m", "--dataset", "d", "--save_path", "run"]
OF_CALLER = {
    "HF_HOME": "/caches/hf",
    "HF_TOKEN": "hf_token_of_mine",
    "HF_HUB_OFFLINE": "1",
    "HF_ENDPOINT": "http://mirror.example",
}


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
