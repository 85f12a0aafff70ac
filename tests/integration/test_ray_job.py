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
from tests.integration.test_interrupt import saved_step, wait_for_a_step

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


@pytest.mark.slow
def test_a_job_that_is_stopped_saves_first(
    job_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "120")  # 3 s unless the head is told
    run, root = tmp_path / "run", tmp_path / "ckpt"
    words = argv(
        f"{GRPO_JOB} --num_episodes 2000",
        pretrain="model",
        prompt_data="prompts.jsonl",
        remote_rm_url="reward_func.py",
        train_batch_size="16",
        save_path=run,
        ckpt_path=root,
    )
    with running_head("--num-cpus", "2", has_dashboard=True) as head:

        def job(command: str, *words: str) -> str:
            done = subprocess.run(
                [ray_command(), "job", command, "--address", head.dashboard, *words],
                check=True,
                capture_output=True,
                text=True,
                timeout=200,
                env=head.environment(),
            )
            return done.stdout

        entrypoint = ["--", "python3", "-m", "openrlhf.cli.train_ppo_ray", *words]
        job("submit", "--no-wait", "--submission-id=it", f"--working-dir={job_folder}", *entrypoint)
        wait_for_a_step(run, head.process)
        assert "was stopped" in job("stop", "it")
        saved_step(job("logs", "it"), root)
