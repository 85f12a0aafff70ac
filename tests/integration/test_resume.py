"""A training command that was killed goes on, typed again, exactly where its checkpoint stood."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openrlhf.cli import train_sft
from openrlhf.distributed.backend import shut_down
from tests.tiny import make_model, write_jsonl

FLAGS = (
    "--input_key input --output_key output --max_epochs 10 --train_batch_size 4 "
    "--micro_train_batch_size 2 --learning_rate 1e-3 --save_steps 3 --max_ckpt_num 2 "
    "--save_hf_ckpt"
)
NUM_ROWS = 10  # three batches an epoch, the last one smaller: 30 steps


def command(root: Path, name: str, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "openrlhf.cli.train_sft", *FLAGS.split()),
        *("--pretrain", str(root / "model"), "--dataset", str(root / "rows.jsonl")),
        *("--save_path", str(root / name), "--ckpt_path", str(root / name / "ckpt"), *more),
    ]


def records(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for_step(process: subprocess.Popen[bytes], run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not any(record["step"] >= step for record in records(run_dir)):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.timeout(400)
def test_the_same_command_goes_on_exactly_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "model")
    rows = [{"input": f"{i}+{i}=", "output": str(2 * i)} for i in range(NUM_ROWS)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    train_sft.main(command(tmp_path, "straight")[3:])
    shut_down()

    killed = tmp_path / "killed"
    process = subprocess.Popen(
        command(tmp_path, "killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_step(process, killed, 10)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "model.safetensors").exists()
    train_sft.main(command(tmp_path, "killed", "--load_checkpoint")[3:])
    shut_down()
    said = capsys.readouterr()
    assert "resuming from" in said.out + said.err

    straight = tmp_path / "straight"
    expected, found = (load_file(path / "model.safetensors") for path in (straight, killed))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    losses = [[(r["step"], r["gpt_loss"], r["lr"]) for r in records(d)] for d in (straight, killed)]
    assert losses[0] == losses[1]
    assert [step for step, _, _ in losses[1]] == list(range(1, 31))
    kept = sorted(path.name for path in (killed / "ckpt").glob("global_step*"))
    assert kept == ["global_step27", "global_step27_hf", "global_step30", "global_step30_hf"]
