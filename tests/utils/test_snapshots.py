"""Models and data sets of ModelScope, by its own library, from a hub of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ConfigError
from openrlhf.utils import snapshots
from openrlhf.utils.snapshots import with_snapshots
from tests.tiny import make_model, write_jsonl
from tests.utils.model_scope import serving

NUM_ROWS = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What lies on the hub: a model, and a data set of two parts."""
    root = tmp_path_factory.mktemp("hub")
    make_model(root / "models" / "org" / "tiny")
    for part in ("easy", "hard"):
        folder = root / "datasets" / "org" / "rows" / part
        folder.mkdir(parents=True)
        rows = [{"input": f"{part} {i}", "output": "yes"} for i in range(NUM_ROWS)]
        write_jsonl(folder / "train.jsonl", rows)
    return root


@pytest.fixture(scope="module")
def cache(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the library puts what the hub serves; it takes one hub for the life of a process."""
    folder = tmp_path_factory.mktemp("cache")
    with serving(files) as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELSCOPE_ENDPOINT", address)
        patch.setenv("MODELSCOPE_CACHE", str(folder))
        yield folder


def fetched(line: str) -> PPOConfig:
    return with_snapshots(parse_config(PPOConfig, line.split()).config, is_shown=False)


def test_every_id_becomes_the_folder_of_its_files(cache: Path, files: Path, tmp_path: Path) -> None:
    here = write_jsonl(tmp_path / "here.jsonl", [{"input": "a"}])
    line = f"--pretrain org/tiny --prompt_data org/rows@easy,{here} --remote_rm_url http://a/b"
    config = fetched(f"{line} --use_ms")
    model = Path(config.actor.model_name_or_path or "")
    assert model.is_relative_to(cache)
    on_hub = files / "models" / "org" / "tiny"
    for path in on_hub.iterdir():
        assert (model / path.name).read_bytes() == path.read_bytes()
    rows, own = (config.data.prompt_dataset or "").split(",")
    folder, _, part = rows.rpartition("@")
    assert Path(folder, part, "train.jsonl").is_file()
    assert (part, own, config.reward.remote_url) == ("easy", str(here), "http://a/b")
    assert fetched(line).actor.model_name_or_path == "org/tiny"


@pytest.mark.usefixtures("cache")
def test_ids_that_the_hub_does_not_have_are_listed_together() -> None:
    line = "--pretrain org/none --prompt_data org/rows,org/lost --remote_rm_url r.py --use_ms"
    with pytest.raises(ConfigError) as caught:
        fetched(line)
    model, rows = caught.value.problems
    assert model.startswith("--pretrain org/none cannot be fetched from ModelScope: ")
    assert rows.startswith("--prompt_data org/lost cannot be fetched from ModelScope: ")


def test_a_library_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, refuse) -> None:
    monkeypatch.setattr(snapshots, "find_spec", lambda _: None)
    words = ["--use_ms", "--pretrain", "org/tiny", "--dataset", "org/rows"]
    code, said = refuse("train_sft", words)
    assert (code, len(said.splitlines())) == (2, 1)
    assert "--use_ms" in said and "pip install '.[modelscope]'" in said
