"""A run folder belongs to one process at a time, and holds the files of one run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.cli import train_sft
from openrlhf.distributed.folders import HOLDER, holding
from openrlhf.errors import ConfigError
from tests.tiny import write_jsonl

HOLD = """
import sys, time
from pathlib import Path
from openrlhf.distributed.folders import holding
with holding(Path(sys.argv[1]), "--save_path"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_is_refused_while_its_holder_lives_and_free_once_it_is_killed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError) as refused, holding(tmp_path, "--save_path"):
            pass
        assert str(refused.value).startswith(
            f"--save_path {tmp_path} is in use: process {process.pid} on "
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
        with holding(tmp_path, "--save_path"):
            assert json.loads((tmp_path / HOLDER).read_text())["pid"] == os.getpid()
    assert not (tmp_path / HOLDER).exists()


@pytest.fixture
def words(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a b", "completion": "c d"}] * 8)
    flags = "--train_batch_size 4 --micro_train_batch_size 4 --max_epochs 1"
    named = {"pretrain": tiny_model_dir, "dataset": tmp_path / "rows.jsonl"}
    return [*(w for name, v in named.items() for w in (f"--{name}", str(v))), *flags.split()]


def test_the_run_before_is_moved_aside_with_its_model_and_said(words, tmp_path, capsys):
    run, model = tmp_path / "run", "model.safetensors"
    train_sft.main([*words, "--save_path", str(run)])
    first = (run / model).read_bytes()
    (run / "rollouts").mkdir()  # as a run of RL leaves it
    (run / "rollouts" / "step_000009.parquet").write_bytes(b"")
    (run / "notes.txt").write_text("mine")
    train_sft.main([*words, "--save_path", str(run), "--learning_rate", "1e-3"])
    aside = run / "aside-1"
    said = capsys.readouterr().out
    assert f"the model and the records of the run before in {run} were moved to {aside}" in said
    assert (aside / model).read_bytes() == first != (run / model).read_bytes()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (run / "rollouts").exists() and (aside / "rollouts").is_dir()
    assert (run / "notes.txt").exists() and (run / "finished.json").exists()


def test_a_model_that_the_new_run_starts_from_stays_where_it_is(words, tmp_path, capsys):
    run = tmp_path / "run"
    train_sft.main([*words, "--save_path", str(run)])
    train_sft.main([*words, "--save_path", str(run), "--pretrain", str(run)])
    assert f"the records of the run before in {run}" in capsys.readouterr().out
    assert (run / "model.safetensors").exists()
    assert {path.name for path in (run / "aside-1").iterdir()} == {
        *("config.yaml", "finished.json", "metrics.jsonl"),
    }
