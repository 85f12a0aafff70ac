"""One message shows every bad row, with the file it stands in; every kind of data set does so."""

from __future__ import annotations

import pytest
from datasets import Dataset

from openrlhf.datasets.loading import load_rows
from openrlhf.datasets.problems import row_place
from openrlhf.datasets.process_reward_dataset import ProcessFormat, ProcessRewardDataset
from openrlhf.datasets.prompts_dataset import PromptDataset, PromptFormat
from openrlhf.datasets.reward_dataset import PreferenceDataset, PreferenceFormat
from openrlhf.datasets.sft_dataset import SFTDataset, SFTFormat
from openrlhf.datasets.unpaired_preference_dataset import (
    UnpairedFormat,
    UnpairedPreferenceDataset,
)
from openrlhf.errors import DataError
from tests.tiny import make_tokenizer, write_jsonl

KINDS = {
    "prompts": (PromptDataset, PromptFormat(), {"input": "q"}, {"input": " "}),
    "sft": (
        SFTDataset,
        SFTFormat(output_key="output"),
        {"input": "q", "output": "a"},
        {"input": "", "output": "a"},
    ),
    "pairs": (
        PreferenceDataset,
        PreferenceFormat(with_margin=True),
        {"chosen": "a", "rejected": "b", "margin": 1.0},
        {"chosen": "a", "rejected": "b", "margin": None},
    ),
    "labelled": (
        UnpairedPreferenceDataset,
        UnpairedFormat(output_key="output"),
        {"input": "q", "output": "a", "label": 1},
        {"input": "q", "output": "a", "label": 7},
    ),
    "steps": (
        ProcessRewardDataset,
        ProcessFormat(placeholder_token="#", reward_tokens=("+", "-")),
        {"input": "a#", "label": ["+"]},
        {"input": "a##", "label": ["+"]},
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_bad_row_is_listed_with_its_file_and_row(tmp_path, kind):
    make, row_format, good, bad = KINDS[kind]
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    one = write_jsonl(tmp_path / "one.jsonl", [good, good, good, bad])
    two = write_jsonl(tmp_path / "two.jsonl", [bad] * 30)
    with pytest.raises(DataError) as caught:
        make(load_rows(f"{one},{two}"), tokenizer, row_format)
    problems = caught.value.problems
    assert "31 bad rows" in problems[0] and problems[-1] == "... and 11 more"
    assert problems[1].startswith(f"{one}: row 4: ")
    assert problems[2].startswith(f"{two}: row 1: ")
    assert len(problems) == 22


def test_a_nan_in_a_csv_or_parquet_file_is_found_by_its_reader(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    rows = [{"chosen": "a", "rejected": "b", "margin": m} for m in (0.5, float("nan"))]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("chosen,rejected,margin\na,b,0.5\na,b,nan\n")
    for name in ("rows.parquet", "rows.csv"):
        with pytest.raises(DataError, match=f"{name}: row 2: 'margin' is .*nan"):
            PreferenceDataset(
                load_rows(str(tmp_path / name)), tokenizer, PreferenceFormat(with_margin=True)
            )


def test_the_place_of_a_row_counts_from_its_own_file(tmp_path):
    one = write_jsonl(tmp_path / "train-1.jsonl", [{"a": 1}] * 3)
    two = write_jsonl(tmp_path / "train-2.jsonl", [{"a": 2}] * 3)
    folder = load_rows(str(tmp_path))
    assert row_place(folder, 2) == f"{one}: row 3"
    assert row_place(folder, 4) == f"{two}: row 2"
    capped = load_rows(f"{one},{two}", max_samples=2)
    assert row_place(capped, 1) == f"{one}: row 2"
    both = load_rows(f"{tmp_path},{two}", max_samples=5)
    assert [row["a"] for row in both] == [1, 1, 1, 2, 2]
    assert row_place(both, 4) == f"{two}: row 2"


def test_blended_rows_are_named_by_their_own_file(tmp_path):
    one, two = (
        write_jsonl(tmp_path / f"{name}.jsonl", [{"a": i} for i in range(9)]) for name in "ab"
    )
    blend = load_rows(f"{one},{two}", probs="0.6,0.4", max_samples=7)
    places = [row_place(blend, i) for i in range(7)]
    assert [int(place.rpartition(" ")[2]) - 1 for place in places] == list(blend["a"])
    assert {place.rpartition(":")[0] for place in places} == {str(one), str(two)}


def test_the_problems_of_all_files_and_data_sets_are_one_message(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text("{\n")
    with pytest.raises(DataError) as caught:
        load_rows(f"{folder},{tmp_path}/none.jsonl")
    problems = "\n".join(caught.value.problems)
    for place in ("a.jsonl:1: not JSON", "b.jsonl:1: not JSON", "none.jsonl does not exist"):
        assert place in problems


def test_ids_that_are_there_twice_are_listed_unless_they_may_be(tmp_path):
    rows = [{"id": "a", "x": 1}, {"id": None, "x": 2}, {"id": None, "x": 3}, {"id": "a", "x": 4}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError) as caught:
        load_rows(str(path))
    assert caught.value.problems == [
        "repeated ids: 1 bad rows. Give each row its own, or type --duplicate_ids keep if that is "
        "meant.",
        f"{path}: row 4: id 'a' is that of {path}: row 1, too",
    ]
    assert len(load_rows(str(path), duplicate_ids="keep")) == 4
    for ids in ([1, 2], [None, None], [["a"], ["a"]]):  # lists are no ids
        path = write_jsonl(path, [{"id": value} for value in ids])
        assert len(load_rows(f"{path},{path}")) == 4  # a data set twice is meant
