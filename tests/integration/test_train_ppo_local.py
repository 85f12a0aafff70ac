"""train_ppo in several processes without Ray: all controllers see the same."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import argv

RANDOM_REWARD = """
import os


def reward_func(queries, prompts, labels):
    return {"rewards": [float(os.urandom(1)[0]) for _ in queries]}
"""


def launch(flags: str, **values: Path | str) -> subprocess.CompletedProcess[str]:
    """Run train_ppo on two ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    words += ["--master_port", str(port), "-m", "openrlhf.cli.train_ppo", *argv(flags, **values)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment)


@pytest.mark.parametrize("zero_stage", ["2", pytest.param("3", marks=pytest.mark.slow)])
def test_two_ranks_agree_on_random_rewards(
    tiny_model_dir: Path, prompt_file: Path, tmp_path: Path, zero_stage: str
) -> None:
    code = tmp_path / "random_reward.py"
    code.write_text(RANDOM_REWARD)
    result = launch(
        "--advantage_estimator gae --n_samples_per_prompt 3",
        pretrain=tiny_model_dir,
        prompt_data=prompt_file,
        remote_rm_url=code,
        zero_stage=zero_stage,
        save_path=tmp_path / "run",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    steps = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in r]
    assert len(steps) == 2
    # Off-policy updates, yet the same policy generated and trained on both ranks.
    assert all(step["vllm_kl"] < 1e-3 for step in steps)
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert result.stdout.count("step 1/2") == 1
