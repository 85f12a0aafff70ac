"""A trained model goes to the Hugging Face hub, at the end of its run or by `openrlhf push`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from openrlhf import api
from openrlhf.cli.push import main as push
from openrlhf.errors import CheckpointError, ConfigError
from tests.fake_hub import FakeHub, fake_hub
from tests.tiny import make_model, write_jsonl

REPOSITORY = "me/tiny"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_model(tmp_path / "model")
    write_jsonl(tmp_path / "rows.jsonl", [{"input": f"{n}+1=", "output": "x"} for n in range(4)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that this process and its children reach."""
    with fake_hub() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", found.address)  # read at the import
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield found


SETTINGS = {
    "pretrain": "model",
    "dataset": "rows.jsonl",
    "output_key": "output",
    "train_batch_size": 4,
    "max_epochs": 1,
    "save_path": "run",
}


def sft(repository: str) -> api.Result:
    return api.sft(**SETTINGS, push_to_hub=repository)


def test_a_run_pushes_its_model_and_nothing_of_its_records(folder: Path, hub: FakeHub) -> None:
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    line = [sys.executable, "-m", "openrlhf.cli.main", "sft", *flags, "--push_to_hub", REPOSITORY]
    env = {**os.environ, "HF_HOME": str(folder)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, hub.is_private) == (0, {REPOSITORY: True}), done.stderr
    assert f"model pushed to {hub.address}/{REPOSITORY}" in done.stdout
    files = hub.files[REPOSITORY]
    assert set(files) == {
        *("README.md", "chat_template.jinja", "config.json", "generation_config.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }
    assert files["model.safetensors"] == (folder / "run" / "model.safetensors").read_bytes()


def test_a_repository_that_cannot_be_written_is_known_before_the_run(
    folder: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--push_to_hub no/such/name cannot be written: "):
        sft("no/such/name")
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    with pytest.raises(ConfigError, match=r"cannot be written: .* or leave --push_to_hub out"):
        sft(REPOSITORY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"cannot be written: .*offline"):
        sft(REPOSITORY)
    assert not (folder / "run" / "metrics.jsonl").exists()


def test_a_push_that_fails_leaves_the_model_and_says_how_to_try_again(
    folder: Path, hub: FakeHub
) -> None:
    hub.refuses_commits = True
    with pytest.raises(CheckpointError) as caught:
        sft(REPOSITORY)
    assert str(caught.value) == (
        "the model is in run, and was not pushed to me/tiny: The disk of the hub is full. Type "
        "openrlhf push run --push_to_hub me/tiny to try again."
    )
    hub.refuses_commits = False
    push(["run", "--push_to_hub", REPOSITORY])
    assert "model.safetensors" in hub.files[REPOSITORY]


def test_the_best_model_of_a_run_without_an_export_is_pushed(folder: Path, hub: FakeHub) -> None:
    best = folder / "ckpt" / "best_global_step7_hf"
    best.mkdir(parents=True)
    (best / "config.json").write_text(json.dumps({"best": True}))
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(f"ckpt: {{path: {folder}/ckpt, save_steps: 7}}\n")
    push(["run", "--push_to_hub", REPOSITORY])
    assert hub.files == {REPOSITORY: {"config.json": b'{"best": true}'}}


def test_a_model_takes_the_place_of_an_adapter_and_of_other_pieces(
    folder: Path, hub: FakeHub
) -> None:
    earlier = ("adapter_config.json", "adapter_model.safetensors", "model.safetensors.index.json")
    kept = {"eval.json": b"{}", ".gitattributes": b""}
    hub.files[REPOSITORY] = dict.fromkeys(earlier, b"old") | kept
    (folder / "model" / "preprocessor_config.json").write_text("{}")
    push(["model", "--push_to_hub", REPOSITORY])
    files = hub.files[REPOSITORY]
    assert not files.keys() & {*earlier} and files.items() >= kept.items()
    assert {"config.json", "model.safetensors", "preprocessor_config.json"} <= files.keys()


def test_what_is_no_model_is_not_pushed(
    folder: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(SystemExit) as caught:
        push(["empty", "--push_to_hub", REPOSITORY])
    assert (caught.value.code, hub.files) == (2, {})
    assert "error: empty holds no model" in capsys.readouterr().err
