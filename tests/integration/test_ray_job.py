"""`ray start --head` and `ray job submit`, as the documents show them, on a cluster of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import argv
from tests.integration.heads import ray_command, running_head

GRPO_JOB = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "
    "--label_key answer --max_samples 8 --vllm_num_engines 1"
)


@pytest.fixture
def job_folder(tiny_model_dir: Path, prompt_file: Path, reward_file: Path, tmp_path: Path) -> Path:
    """What a user would have beside the command: model, prompts, reward function."""
    folder = tmp_path / "job"
    shutil.copytree(tiny_model_dir, folder / "model")
    shutil.copy(prompt_file, folder / "prompts.jsonl")
    shutil.copy(reward_file, folder / "reward_func.py")
    return folder


@pytest.mark.slow
def test_a_submitted_job_trains_in_its_working_directory_and_leaves_nothing_behind(
    job_folder: Path, tmp_path: Path
) -> None:
    words = argv(
        GRPO_JOB,
        pretrain="model",
        prompt_data="prompts.jsonl",
        remote_rm_url="reward_func.py",
        train_batch_size="16",
        save_path=tmp_path / "run",
    )
    with running_head("--num-cpus", "2", has_dashboard=True) as head:
        submit = [ray_command(), "job", "submit", "--address", head.dashboard]
        submit += ["--working-dir", str(job_folder), "--", "python3", "-m"]
        result = subprocess.run(
            [*submit, "openrlhf.cli.train_ppo_ray", *words],
            capture_output=True,
            text=True,
            timeout=240,
            env=head.environment(),
        )
        family = head.processes()
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert "step 1/1" in result.stdout
    [step] = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in r]
    assert step["ratio_max"] == 1.0
    assert step["vllm_kl"] < 1e-6
    assert (tmp_path / "run" / "config.json").exists()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


@pytest.mark.slow
def test_a_job_that_fails_says_so_to_the_one_who_submitted_it(
    job_folder: Path, tmp_path: Path
) -> None:
    words = argv(GRPO_JOB, pretrain="model", prompt_data="missing.jsonl", save_path=tmp_path / "r")
    with running_head("--num-cpus", "2", has_dashboard=True) as head:
        submit = [ray_command(), "job", "submit", "--address", head.dashboard]
        submit += ["--working-dir", str(job_folder), "--", "python3", "-m"]
        result = subprocess.run(
            [*submit, "openrlhf.cli.train_ppo_ray", *words, "--remote_rm_url", "reward_func.py"],
            capture_output=True,
            text=True,
            timeout=240,
            env=head.environment(),
        )
    assert result.returncode != 0
    assert "missing.jsonl" in result.stdout + result.stderr
