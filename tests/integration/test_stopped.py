"""Processes that are stopped rather than killed: named after a while, ended at their deadline."""

import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from openrlhf.cli import train_ppo_ray
from openrlhf.trainer.ppo_trainer import PPOTrainer
from tests.helpers.processes import (
    SFT_FLAGS,
    environment,
    launched,
    started,
    wait_for_a_step,
    workers,
)
from tests.integration.commands import argv
from tests.tiny import write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(600)]

FLAGS = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "
    "--num_episodes 100 --vllm_num_engines 1 --actor_num_gpus_per_node 2 "
    "--engine_timeout_s 20 --rank_timeout_s 20 --max_restarts 0"
)


@pytest.mark.parametrize(
    ("title", "who"), [("LLMRayActor", "engine vllm-0"), ("PolicyModelActor", "actor rank . of 2")]
)
def test_a_stopped_process_is_named_and_the_run_ends(
    ray_cluster: None,
    given: dict,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    title: str,
    who: str,
) -> None:
    monkeypatch.setattr("openrlhf.utils.progress.SAY_AFTER_S", 5.0)
    report, stopped = PPOTrainer.report, list[psutil.Process]()

    def report_and_stop(trainer: PPOTrainer, global_step: int, *args: Any) -> None:
        report(trainer, global_step, *args)
        if global_step == 2:
            stopped.append(workers(title)[-1])
            stopped[0].send_signal(signal.SIGSTOP)

    monkeypatch.setattr(PPOTrainer, "report", report_and_stop)
    with pytest.raises(SystemExit) as ended:
        train_ppo_ray.main(argv(FLAGS, **given, train_batch_size="16"))
    said = capsys.readouterr().err
    named = rf"{who} on node \S+ \(pid {stopped[0].pid}\) has not responded for \d+ s.*"
    assert ended.value.code == 3 and re.search(f"error: {named} was ended", said), said[-3000:]
    assert re.search(f"warning: {named}; it is ended after 20 s", said), said[-3000:]
    assert not psutil.wait_procs(stopped, timeout=10)[1]


@pytest.mark.parametrize(
    ("program", "number", "told"),
    [
        ("raylet", signal.SIGKILL, r"Ray's raylet died: pid {pid} was killed by SIGKILL.*"),
        ("gcs_server", signal.SIGKILL, r"Ray's GCS died: pid {pid} was killed by SIGKILL.*"),
        ("raylet", signal.SIGSTOP, r"Ray's raylet \(pid {pid}\) has not responded for \d+ s.*"),
        ("gcs_server", signal.SIGSTOP, r"Ray's GCS \(pid {pid}\) has not responded for \d+ s.*"),
    ],
)
def test_a_ray_that_is_dead_or_stopped_is_named_and_not_waited_for(
    given: dict, tmp_path: Path, program: str, number: int, told: str
) -> None:
    words = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *argv(FLAGS, **given)]
    with started([*words, "--train_batch_size", "16"]) as process:
        wait_for_a_step(tmp_path / "run", process)
        family = psutil.Process(process.pid).children(recursive=True)
        [victim] = [child for child in family if child.name() == program]
        victim.send_signal(number)
        _, said = process.communicate(timeout=30 if number == signal.SIGKILL else 60)
    assert "Traceback" not in said and not psutil.wait_procs(family, timeout=10)[1], said[-3000:]
    if process.returncode == 1 and program == "raylet":  # Ray was quicker: docs/troubleshooting.md
        assert f"\nerror: Ray's raylet (pid {victim.pid}) died\n" in said, said[-3000:]
    else:
        assert process.returncode == 3, said[-3000:]
        assert re.search(f"^error: {told.format(pid=victim.pid)}", said, re.MULTILINE), said[-3000:]


def test_sigterm_ends_a_run_whose_raylet_is_stopped(given: dict, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *argv(FLAGS, **given)]
    words += ["--train_batch_size", "16", "--grace_s", "10", "--rank_timeout_s", "600"]
    with started(words) as process:
        wait_for_a_step(tmp_path / "run", process)
        family = psutil.Process(process.pid).children(recursive=True)
        [raylet] = [child for child in family if child.name() == "raylet"]
        raylet.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "error: interrupted: " in said, said[-3000:]
    assert not psutil.wait_procs(family, timeout=10)[1]


# The launcher ends the stopped one 30 s after the other has left.
def test_a_stopped_rank_of_a_launcher_is_named_and_the_run_ends(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i} and", "completion": "two words"} for i in range(80_000)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    words = f"--pretrain {tiny_model_dir} --dataset {tmp_path}/rows.jsonl "
    words += f"--save_path {tmp_path}/run {SFT_FLAGS} --rank_timeout_s 24"
    launcher = "torchrun --nproc_per_node 2 --master_port {port} -m {module}"
    with started([*launched("train_sft", launcher), *words.split()], env=environment()) as process:
        wait_for_a_step(tmp_path / "run", process, metric="gpt_loss")
        family = psutil.Process(process.pid).children(recursive=True)
        [rank] = [p for p in family if p.environ().get("LOCAL_RANK") == "1"]
        rank.send_signal(signal.SIGSTOP)
        try:
            _, said = process.communicate(timeout=100)
        finally:
            _, alive = psutil.wait_procs(family, timeout=10)
            for left in alive:
                left.kill()
    named = rf"rank 1 of 2 on node \S+ \(pid {rank.pid}\) has not responded for \d+ s"
    waits = "while the other ranks wait for it"
    assert process.returncode != 0 and not alive
    assert re.search(rf"warning: {named} {waits}; the run ends after 24 s", said), said[-3000:]
    assert re.search(rf"error: {named} {waits} \(--rank_timeout_s 24\)", said), said[-3000:]
