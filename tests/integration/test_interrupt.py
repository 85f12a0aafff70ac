"""Ctrl-C in the middle of a run: exit code 130, one line, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import argv

DEADLINE_S = 150.0
FLAGS = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "
    "--label_key answer --num_episodes 2000 --logging_steps 1 "
)


@contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A command that takes Ctrl-C, whatever this process does with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_a_step(run_dir: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or not any("reward" in r for r in read_metrics(metrics)):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command", ["train_ppo --vllm_num_engines 0", "train_ppo_ray --vllm_num_engines 1"]
)
def test_ctrl_c_ends_a_run_and_all_its_processes(
    command: str, tiny_model_dir: Path, prompt_file: Path, reward_file: Path, tmp_path: Path
) -> None:
    module, *flags = command.split()
    words = argv(
        FLAGS + " ".join(flags),
        pretrain=tiny_model_dir,
        prompt_data=prompt_file,
        remote_rm_url=reward_file,
        train_batch_size="16",
        save_path=tmp_path / "run",
    )
    with started([f"openrlhf.cli.{module}", *words]) as process:
        wait_for_a_step(tmp_path / "run", process)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error[-3000:]
    assert error.strip().splitlines()[-1] == "error: interrupted"
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, alive
