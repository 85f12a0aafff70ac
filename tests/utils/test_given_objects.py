"""Objects that a program gives where a command takes a path."""

import json
from pathlib import Path

import datasets
import numpy as np
import pandas
import peft
import pytest
import torch
import transformers

from openrlhf.api import evaluate, sft
from openrlhf.errors import ConfigError
from openrlhf.utils.given_objects import as_paths
from openrlhf.utils.images import read_picture
from tests.helpers import tiny_vision

ROWS = [{"input": "1+1=", "output": "2", "n": 10**20}, {"input": "é", "output": ""}]


def test_rows_are_written_as_they_are_and_once(tmp_path: Path) -> None:
    first, again = (as_paths("dataset", list(ROWS), tmp_path) for _ in range(2))
    assert first == again
    assert [path.name for path in tmp_path.iterdir()] == [Path(first).name]
    assert [json.loads(line) for line in Path(first).read_text().splitlines()] == ROWS
    assert as_paths("dataset", ROWS[:1], tmp_path) != first


def test_rows_may_hold_images_bytes_and_paths(tmp_path: Path) -> None:
    image = tiny_vision.noise(28, 56)
    image.save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    path = as_paths("dataset", [{"images": [image, data, tmp_path / "a.png"]}], tmp_path)
    [row] = map(json.loads, Path(path).read_text().splitlines())
    assert row["images"][2] == str(tmp_path / "a.png")
    for value in row["images"]:
        assert read_picture(value).open().tobytes() == image.tobytes()


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    rows = [{"input": "a", "n": np.int64(3), "x": np.float32(0.5), "t": torch.tensor(1)}]
    path = as_paths("dataset", rows, tmp_path)
    assert json.loads(Path(path).read_text()) == {"input": "a", "n": 3, "x": 0.5, "t": 1}


def test_a_model_with_an_adapter_is_refused_since_its_base_would_be_lost(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model_dir)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="has an adapter on a model in memory"):
        as_paths("pretrain", (wrapped, tokenizer), tmp_path)


def test_what_has_no_rows_and_what_has_no_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval_dataset has no rows"):
        as_paths("eval_dataset", [], tmp_path)
    endless = datasets.IterableDataset.from_generator(lambda: iter(lambda: {"input": "a"}, None))
    with pytest.raises(ConfigError, match="dataset is a stream"):
        as_paths("dataset", endless, tmp_path)


@pytest.mark.parametrize("make", [datasets.Dataset.from_list, pandas.DataFrame])
def test_tables_are_written_as_parquet(tmp_path: Path, make) -> None:
    rows = [{"input": "a", "output": "b"}]
    [path, other] = as_paths("data.dataset", [make(rows), "other.jsonl"], tmp_path)
    assert Path(path).name.startswith("dataset-")
    assert (pandas.read_parquet(path).to_dict("records"), other) == (rows, "other.jsonl")


def test_the_index_of_a_frame_is_no_column(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"input": [*"abcd"]})[lambda rows: rows["input"] != "c"]
    path = as_paths("data.dataset", frame, tmp_path)
    table = datasets.Dataset.from_parquet(path, cache_dir=str(tmp_path))
    assert table.column_names == ["input"] and table["input"][:] == [*"abd"]


def test_a_model_and_its_tokenizer_become_a_folder(tmp_path: Path, tiny_model_dir: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    pair = model, transformers.AutoTokenizer.from_pretrained(tiny_model_dir)
    first, again = (as_paths("pretrain", pair, tmp_path) for _ in range(2))
    assert first == again
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in Path(first).iterdir()
    }
    with pytest.raises(ConfigError, match=r"pretrain cannot be a Qwen2For.*Give \(model, tokeniz"):
        as_paths("pretrain", model, tmp_path)


def test_what_cannot_be_written_is_one_line_with_what_to_give(tmp_path: Path) -> None:
    for value, said in (
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS[1:])), r"its parts \(train\)"),
        (datasets.Dataset.from_list(ROWS[1:]).with_transform(dict), "dataset has a transform"),
        ({"input": ["a"], "output": ["b"]}, r"be a dict. Give datasets.Dataset.from_dict of it"),
        (iter(ROWS), "cannot be a list_iterator. Give a path or hub id, a datasets.Dataset, or a"),
        (
            [{}, {"input": {1, 2}}],
            "row 2, column 'input': neither JSON nor an image: set instead of an image",
        ),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            as_paths("dataset", value, tmp_path)
        assert len(caught.value.problems) == 1


def test_settings_name_the_files_of_their_objects(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = sft.config(pretrain=str(tiny_model_dir), dataset=ROWS)
    folder = f"{Path(config.ckpt.output_dir)}_inputs"
    assert config.data.dataset.startswith(f"{folder}/dataset-")
    config = sft.config(pretrain=str(tiny_model_dir), data={"dataset": ROWS})
    folder = f"{Path(config.ckpt.output_dir)}_inputs"
    assert config.data.dataset.startswith(f"{folder}/dataset-")
    config = evaluate.config(
        models=[str(tiny_model_dir)], eval_dataset=ROWS, reward=len, save_path="out"
    )
    assert config.models == str(tiny_model_dir)
    assert config.data.prompt_dataset.startswith("out_inputs/eval_dataset-")
