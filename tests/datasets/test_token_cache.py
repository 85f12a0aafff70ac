"""What the cache may answer: the same rows, tokenizer and format, whole, and nothing else."""

from __future__ import annotations

import os
import time

import pytest
from datasets import Dataset

from openrlhf.datasets.process_reward_dataset import ProcessFormat, ProcessRewardDataset
from openrlhf.datasets.reward_dataset import PreferenceDataset, PreferenceFormat
from openrlhf.datasets.sft_dataset import SFTDataset, SFTFormat
from openrlhf.datasets.token_cache import (
    MAX_AGE_S,
    MIN_ROWS,
    cache_key,
    load_tokens,
    rows_fingerprint,
    save_tokens,
    tokenizer_fingerprint,
)
from openrlhf.datasets.token_store import TokenizedRows, TokenStore
from openrlhf.datasets.unpaired_preference_dataset import (
    UnpairedFormat,
    UnpairedPreferenceDataset,
)
from openrlhf.errors import DataError
from openrlhf.utils.tokenizer import TextEncoder
from tests.tiny import make_tokenizer

KEY = "k"


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path / "tokenizer")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenized"


def small_content() -> TokenizedRows:
    store = TokenStore()
    store.append([5, 6, 7], [False, True, True])
    store.append([8])
    content = TokenizedRows([store], row_ids=[0, 2], extras=[0.5, [1, True]], num_truncated=1)
    content.dropped["over-long"] = 3
    return content


def test_an_entry_comes_back_as_it_was(folder):
    save_tokens(KEY, small_content())
    found = load_tokens(KEY)
    assert found.stores[0][0].tolist() == [5, 6, 7]
    assert found.stores[0].mask(0).tolist() == [False, True, True]
    assert (found.row_ids, found.extras, found.num_truncated) == ([0, 2], [0.5, [1, True]], 1)
    assert found.dropped == {"over-long": 3}
    assert found.fingerprint() == small_content().fingerprint()
    assert [path.name for path in folder.iterdir()] == ["k.tokens"]
    assert load_tokens("other") is None


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:50] + b"\1"])
def test_a_damaged_entry_is_no_entry(folder, damage):
    save_tokens(KEY, small_content())
    path = folder / "k.tokens"
    path.write_bytes(damage(path.read_bytes()))
    assert load_tokens(KEY) is None


def test_entries_nobody_used_for_a_month_are_removed(folder):
    save_tokens("old", small_content())
    save_tokens("used", small_content())
    long_ago = time.time() - MAX_AGE_S - 60
    (folder / "left-by-a-killed-run").write_text("")
    for name in ("old.tokens", "used.tokens", "left-by-a-killed-run"):
        os.utime(folder / name, (long_ago, long_ago))
    load_tokens("used")
    save_tokens("new", small_content())
    assert sorted(path.stem for path in folder.iterdir()) == ["new", "used"]


def test_the_key_follows_rows_tokenizer_and_recipe(tokenizer):
    rows = Dataset.from_list([{"a": "x"}, {"a": "y"}])
    key = cache_key(rows, tokenizer, "recipe")
    assert key == cache_key(Dataset.from_list([{"a": "x"}, {"a": "y"}]), tokenizer, "recipe")
    assert key != cache_key(rows, tokenizer, "other recipe")
    assert key != cache_key(rows.select([1, 0]), tokenizer, "recipe")
    assert key != cache_key(rows.rename_column("a", "b"), tokenizer, "recipe")
    tokenizer.chat_template += " "
    assert key != cache_key(rows, tokenizer, "recipe")


def test_rows_of_one_table_have_their_own_fingerprints():
    rows = Dataset.from_list([{"a": "x"}, {"a": "y"}, {"a": "x"}])
    first, second, third = (rows_fingerprint(rows.select([i])) for i in range(3))
    assert first != second and first == third


def test_using_a_tokenizer_leaves_its_fingerprint(tokenizer):
    before = tokenizer_fingerprint(tokenizer)
    TextEncoder(tokenizer).encode_prompts(["some text"])
    assert tokenizer_fingerprint(tokenizer) == before


def sft_row(i: int) -> dict:
    return {"input": f"q{i}", "output": "" if i == 3 else "x" * (1 + i % 40)}


def pair_row(i: int) -> dict:
    return {"prompt": f"q{i}", "chosen": "a" * (1 + i % 40), "rejected": "b" if i else "a",
            "margin": i / 2}  # fmt: skip


def labelled_row(i: int) -> dict:
    return {"input": f"q{i}", "output": "x" * (1 + i % 40), "label": i % 3 == 0}


def process_row(i: int) -> dict:
    return {"input": f"{'x' * (i % 40)}#{i}#", "label": [i / 2000, 1.0]}


KINDS = {
    "sft": (SFTDataset, SFTFormat(output_key="output", max_len=45), sft_row),
    "pairs": (PreferenceDataset, PreferenceFormat(with_margin=True, max_len=30), pair_row),
    "labelled": (
        UnpairedPreferenceDataset,
        UnpairedFormat(output_key="output", max_len=45, overlong="truncate"),
        labelled_row,
    ),
    "steps": (
        ProcessRewardDataset,
        ProcessFormat(placeholder_token="#", reward_tokens=("+", "-"), max_len=30),
        process_row,
    ),
}


def flat(example: object) -> list[object]:
    """The fields of an example as plain values."""
    values = vars(example).values()
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_is_the_same_from_the_cache(tokenizer, folder, monkeypatch, kind):
    make, row_format, row = KINDS[kind]
    rows = Dataset.from_list([row(i) for i in range(MIN_ROWS)])
    built = make(rows, tokenizer, row_format)
    assert len(list(folder.iterdir())) == 1 and built.notices[-1:] != []

    def refuse(*_: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(TextEncoder, "encode_segments", refuse)
    seen: list[tuple[int, int]] = []
    cached = make(rows, tokenizer, row_format, progress=lambda *done: seen.append(done))
    assert seen == [(MIN_ROWS, MIN_ROWS)]
    assert [flat(cached[i]) for i in range(len(cached))] == [
        flat(built[i]) for i in range(len(built))
    ]
    for name in ("notices", "dropped", "num_truncated", "row_ids", "fingerprint"):
        assert getattr(cached, name) == getattr(built, name)
    assert cached.lengths.tolist() == built.lengths.tolist()


def test_another_format_is_tokenised_anew(tokenizer, folder):
    rows = Dataset.from_list([sft_row(i) for i in range(MIN_ROWS)])
    for max_len in (45, 50):
        dataset = SFTDataset(rows, tokenizer, SFTFormat(output_key="output", max_len=max_len))
        assert int(dataset.lengths.max()) == max_len
    assert len(list(folder.iterdir())) == 2


def test_bad_rows_are_never_cached(tokenizer, folder):
    rows = Dataset.from_list([labelled_row(0) | {"label": 2}] * MIN_ROWS)
    for _ in range(2):
        with pytest.raises(DataError, match=f"{MIN_ROWS} bad rows"):
            UnpairedPreferenceDataset(rows, tokenizer, UnpairedFormat(output_key="output"))
    assert not folder.exists()


def test_a_cache_that_cannot_be_written_is_said(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "file"))
    rows = Dataset.from_list([sft_row(i) for i in range(MIN_ROWS)])
    dataset = SFTDataset(rows, tokenizer, SFTFormat(output_key="output"))
    assert "are not kept for the next run" in dataset.notices[0]
