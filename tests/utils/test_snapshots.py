"""Models and data sets of hubs: ids of ModelScope become folders, what cannot be had is listed."""

import os
from pathlib import Path

import datasets
import modelscope
import pytest
from huggingface_hub import constants
from modelscope_hub.errors import HubError

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.utils import snapshots
from openrlhf.utils.snapshots import with_snapshots
from tests.tiny import write_jsonl

HAS = {"model": ["org/tiny"], "dataset": ["org/rows"]}


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """ModelScope's library, with two repositories."""

    def snapshot_download(*, repo_id: str, repo_type: str) -> str:
        if repo_id not in HAS[repo_type]:
            raise HubError(f"{repo_id} is not found")
        return f"/cache/{repo_type}/{repo_id}"

    monkeypatch.setattr(modelscope, "snapshot_download", snapshot_download)


def fetched(line: str) -> PPOConfig:
    return with_snapshots(parse_config(PPOConfig, line.split()).config, is_shown=False)


def test_every_id_becomes_the_folder_of_its_files(tmp_path: Path) -> None:
    here = write_jsonl(tmp_path / "here.jsonl", [{"input": "a"}])
    line = f"--pretrain org/tiny --prompt_data org/rows@easy,{here} --remote_rm_url http://a/b"
    config = fetched(f"{line} --use_ms")
    assert config.actor.model_name_or_path == "/cache/model/org/tiny"
    assert config.data.prompt_dataset == f"/cache/dataset/org/rows@easy,{here}"
    assert config.reward.remote_url == "http://a/b"
    assert fetched(line).actor.model_name_or_path == "org/tiny"


def test_ids_that_the_hub_does_not_have_are_listed_together() -> None:
    line = "--pretrain org/none --prompt_data org/rows,org/lost --remote_rm_url r.py --use_ms"
    with pytest.raises(ConfigError) as caught:
        fetched(line)
    model, rows = sorted(caught.value.problems)
    assert model.startswith("--pretrain org/none cannot be fetched from ModelScope: ")
    assert rows.startswith("--prompt_data org/lost cannot be fetched from ModelScope: ")


@pytest.mark.parametrize(
    ("words", "flag", "library"),
    [
        ("--use_ms", "--use_ms", "modelscope"),
        ("--use_trackio", "--use_trackio", "trackio"),
        ("--report_to mlflow tensorboard", "--use_mlflow", "mlflow"),
    ],
)
def test_a_library_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, refuse, words: str, flag: str, library: str
) -> None:
    monkeypatch.setattr(snapshots, "find_spec", lambda _: None)
    line = f"{words} --pretrain org/tiny --dataset org/rows"
    code, said = refuse("train_sft", line.split())
    assert (code, len(said.splitlines())) == (2, 1)
    assert f"{flag} is set" in said and f"pip install '.[{library}]'" in said


def test_a_hub_that_does_not_answer_is_said_once_and_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    here = write_jsonl(tmp_path / "here.jsonl", [{"input": "a"}])
    local = f"--pretrain {tmp_path} --prompt_data {here} --remote_rm_url http://a/b"
    for line, said in ((local, ""), (local.replace(str(tmp_path), "org/tiny", 1), "org/tiny")):
        for _ in range(2):
            config = parse_config(PPOConfig, line.split()).config
            assert with_snapshots(config, is_shown=True) == config
        warned = capsys.readouterr().err
        assert warned.count("http://127.0.0.1:9 does not answer") == bool(said)
        assert said in warned
        assert constants.HF_HUB_OFFLINE is datasets.config.HF_HUB_OFFLINE is bool(said)
        assert os.environ["HF_HUB_OFFLINE"] == str(int(bool(said)))
