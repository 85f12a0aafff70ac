"""`ray start --head` and `ray job submit`, as the documents show them, on a cluster of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import argv
from tests.integration.heads import Head, ray_command, running_head
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


def job(head: Head, command: str, *words: str) -> str:
    """What `ray job` printed; it must succeed."""
    done = subprocess.run(
        [ray_command(), "job", command, "--address", head.dashboard, *words],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
        env=head.environment(),
    )
    return done.stdout


@pytest.mark.slow
def test_a_job_trains_in_its_folder_one_that_is_stopped_saves_and_nothing_is_left(
    job_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "120")  # 3 s unless the head is told

    def entrypoint(run_dir: Path, more: str) -> list[str]:
        words = argv(
            f"{GRPO_JOB} {more}",
            pretrain="model",
            prompt_data="prompts.jsonl",
            remote_rm_url="reward_func.py",
            train_batch_size="16",
            save_path=run_dir,
            ckpt_path=run_dir / "ckpt",
        )
        return ["--", "python3", "-m", "openrlhf.cli.train_ppo_ray", *words]

    place, first, second = f"--working-dir={job_folder}", tmp_path / "first", tmp_path / "second"
    with running_head("--num-cpus", "2", has_dashboard=True) as head:
        assert "step 1/1" in job(head, "submit", place, *entrypoint(first, ""))
        endless = entrypoint(second, "--num_episodes 2000")
        job(head, "submit", "--no-wait", "--submission-id=it", place, *endless)
        wait_for_a_step(second, head.process)
        assert "was stopped" in job(head, "stop", "it")
        saved_step(job(head, "logs", "it"), second / "ckpt")
        family = head.processes()
    [step] = [r for r in read_metrics(first / "metrics.jsonl") if "reward" in r]
    assert step["ratio_max"] == 1.0 and step["vllm_kl"] < 1e-6
    assert (first / "config.json").exists()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
