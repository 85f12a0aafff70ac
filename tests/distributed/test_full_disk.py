"""A model that has no room on its disk: said before training, and not lost behind it."""

import errno
import json
import os
import re
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import nn

from openrlhf.cli import train_sft
from openrlhf.distributed import export
from tests.integration.commands import exit_code
from tests.tiny import write_jsonl


def sft_words(model: Path, folder: Path) -> list[str]:
    rows = write_jsonl(folder / "rows.jsonl", [{"input": "q", "output": "a"}] * 2)
    words = f"--pretrain {model} --dataset {rows} --input_key input --output_key output "
    words += f"--train_batch_size 2 --micro_train_batch_size 2 --save_path {folder / 'run'}"
    return words.split()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The disk of a run folder is full; the paths that were tried. Other folders have room."""
    tried: list[str] = []
    write_folder = export.write_folder

    def write(model: nn.Module, state: dict, tokenizer: object, path: Path) -> None:
        tried.append(path.name)
        if path.name == "run":
            (path / ".export").mkdir(parents=True, exist_ok=True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_folder(model, state, tokenizer, path)

    monkeypatch.setattr(export, "write_folder", write)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    return tried


def test_a_model_without_room_at_the_end_is_written_elsewhere(
    full: list[str], tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    assert exit_code(train_sft.main, sft_words(tiny_model_dir, tmp_path)) == 3
    lines = capsys.readouterr().err.splitlines()
    [error] = [line for line in lines if line.startswith("error: ")]
    start = f"error: the model cannot be written to {tmp_path}/run: No space left on device. It "
    assert error.startswith(start + "takes 0.4 MB, ")
    assert "Traceback" not in "".join(lines)
    [elsewhere] = (tmp_path / "elsewhere").iterdir()
    assert f"It was written to {elsewhere} instead: move it from there." in error
    assert full == ["run", elsewhere.name]
    transformers.AutoModelForCausalLM.from_pretrained(elsewhere)
    assert not (tmp_path / "run" / ".export").exists()
    assert json.loads((tmp_path / "run" / "ended.json").read_text())["error"].endswith(error[7:])


@contextmanager
def room_for_a_model_alone(model: Path) -> Iterator[None]:
    """Refuse files as large as states, which take three times as much."""
    num_bytes = (model / "model.safetensors").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_last_checkpoint_that_fails_costs_a_line_that_says_which_is_there(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*sft_words(tiny_model_dir, tmp_path), "--save_steps", "1", "--load_checkpoint"]
    words += ["--ckpt_path", str(tmp_path / "ckpt"), "--max_epochs"]
    assert exit_code(train_sft.main, [*words, "1"]) == 0
    capsys.readouterr()
    with room_for_a_model_alone(tiny_model_dir):
        assert exit_code(train_sft.main, [*words, "2"]) == 0
    said = capsys.readouterr()
    [warning] = [line for line in said.err.splitlines() if "was not saved" in line]
    assert warning.startswith("warning: checkpoint of step 2 was not saved: File too large: ")
    last = f"The last one is {tmp_path}/ckpt/global_step1. It is failure 1 of 3 in a row."
    assert warning.endswith(last)
    assert f"model saved to {tmp_path}/run, beside " in said.out


@pytest.mark.parametrize("num_steps", [3, 4])
def test_checkpoints_without_room_do_not_cost_the_model(
    num_steps: int, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    words = [*sft_words(tiny_model_dir, tmp_path), "--max_epochs", str(num_steps)]
    words += ["--save_steps", "1", "--ckpt_path", str(tmp_path / "ckpt")]
    with room_for_a_model_alone(tiny_model_dir):
        assert exit_code(train_sft.main, words) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"error: checkpoint of step 3 was not saved: File too large: tp0-dp0.pt takes 1\.3 MB, "
        rf"\d+\.\d+ [GM]B are free in {tmp_path}/ckpt/tmp-global_step3/model\. There is no other "
        rf"one\. It is failure 3 in a row: stopping\. The model was written to {tmp_path}/run\.",
        last,
    )
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")


def test_a_disk_without_room_for_the_model_is_said_before_training(
    monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path, tmp_path: Path, capsys
) -> None:
    class Usage:
        free = 100_000

    plain = export.shutil.disk_usage
    monkeypatch.setattr(
        export.shutil,
        "disk_usage",
        lambda path: Usage if Path(path).is_relative_to(tmp_path) else plain(path),
    )
    assert exit_code(train_sft.main, sft_words(tiny_model_dir, tmp_path)) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == (
        f"error: --save_path {tmp_path}/run has 0.1 MB free, and the model takes 0.4 MB; 5% more "
        "must be free, for logs and rollouts. Make room, or type the path of a folder on another "
        "disk."
    )
    assert "step 1/" not in said.out
