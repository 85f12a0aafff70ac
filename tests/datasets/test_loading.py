"""Files, folders, blends, and what can be wrong with them, each with its place and a remedy."""

import bz2
import gzip
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openrlhf.datasets.loading import beyond_limit, damage_of, load_rows, row_location
from openrlhf.datasets.sft_dataset import SFTDataset
from openrlhf.datasets.tokenized import RowFormat
from openrlhf.errors import ConfigError, DataError
from tests.tiny import make_tokenizer, write_jsonl

ROWS = [{"input": "a", "label": 1}, {"input": "b", "label": 2}]


DAMAGED = ["damaged records"]
LINES = b'{"input": "a", "label": 1}\n{"input": "b", "label": 2}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", LINES),
        ("rows.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("rows.json", b"[" + LINES.replace(b"}\n{", b"},\n{") + b"]"),
        ("rows.parquet", None),
    ],
)
def test_every_file_type_gives_the_same_rows(tmp_path, name, content):
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / name)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert list(load_rows(str(tmp_path / name))) == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_a_file_in_the_place_of_another_of_the_same_size_and_time_is_read(tmp_path, name):
    path = tmp_path / name
    for text in ("a", "b"):
        rows = datasets.Dataset.from_list([{"input": text}])
        {"jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}[name[5:]](path)
        os.utime(path, (1e9, 1e9))
        assert list(load_rows(str(path))) == [{"input": text}]


def test_names_with_signs_of_a_pattern_are_those_of_the_file_itself(tmp_path):
    for folder, file in (("a[1]", "x*.parquet"), ("a1", "xy.parquet"), ("a[1]", "xy.parquet")):
        rows = datasets.Dataset.from_list([{"input": f"{folder}/{file}"}])
        rows.to_parquet(tmp_path / folder / file)
    assert list(load_rows(f"{tmp_path}/a[1]/x*.parquet")) == [{"input": "a[1]/x*.parquet"}]
    read = [row["input"] for row in load_rows(f"{tmp_path}/a[1]")]
    assert read == ["a[1]/x*.parquet", "a[1]/xy.parquet"]


def test_a_saved_data_set_is_read_by_split(tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(tmp_path / "both")
    rows.save_to_disk(tmp_path / "one")
    assert list(load_rows(str(tmp_path / "both"), split="test")) == ROWS[1:]
    for split in ("train", "test"):  # it has no splits, like a file
        assert list(load_rows(str(tmp_path / "one"), split=split)) == ROWS
    with pytest.raises(ConfigError, match=r"no split 'dev'; splits found: test, train"):
        load_rows(str(tmp_path / "both"), split="dev")


def test_a_folder_has_the_splits_that_its_file_names_say(tmp_path, capsys):
    write_jsonl(tmp_path / "train-00000-of-00002.jsonl", ROWS[:1])
    write_jsonl(tmp_path / "train-00001-of-00002.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "test.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "extra.jsonl", ROWS)  # of no split: not read
    (tmp_path / "train.txt").write_text("notes")
    assert list(load_rows(str(tmp_path))) == ROWS
    said = " ".join(capsys.readouterr().err.split())
    assert f"not read of folder {tmp_path}: extra.jsonl, whose names say no split" in said
    assert list(load_rows(str(tmp_path), split="test")) == ROWS[1:]


def test_a_folder_may_be_named_from_here(tmp_path, capsys, monkeypatch):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "x.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    assert list(load_rows("data")) == ROWS
    assert "not read" not in capsys.readouterr().err


def test_a_subfolder_is_named_behind_an_at_sign(tmp_path):
    (tmp_path / "math").mkdir()
    write_jsonl(tmp_path / "math" / "train.jsonl", ROWS)
    assert list(load_rows(f"{tmp_path}@math")) == ROWS


def test_a_missing_split_lists_those_there_are(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    assert list(load_rows(str(tmp_path))) == ROWS  # no file names a split: all are train
    with pytest.raises(ConfigError, match=r"no split 'test'; splits found: train"):
        load_rows(str(tmp_path), split="test")
    write_jsonl(tmp_path / "dev.jsonl", ROWS)
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"splits found: train, validation"):
        load_rows(str(tmp_path), split="test")
    assert len(load_rows(str(tmp_path), split="dev")) == 2


def test_data_sets_follow_one_another_without_probabilities(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", ROWS)
    two = write_jsonl(tmp_path / "two.jsonl", [{"input": "c", "label": 3, "extra": "x"}])
    rows = load_rows(f"{one}, {two}")
    assert rows["input"] == ["a", "b", "c"]
    assert rows["extra"] == [None, None, "x"]


def test_probabilities_interleave_and_the_seed_fixes_the_order(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", [{"input": f"a{i}"} for i in range(50)])
    two = write_jsonl(tmp_path / "two.jsonl", [{"input": f"b{i}"} for i in range(50)])
    first, again, other = (
        load_rows(f"{one},{two}", probs="0.5,0.5", seed=seed)["input"][:20] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert {name[0] for name in first} == {"a", "b"}


@pytest.mark.parametrize("probs", ["1.0", "0.5,0.6", "1.5,-0.5", "a,b"])
def test_bad_probabilities_are_refused(tmp_path, probs):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match="Give a positive number for each, with the sum 1"):
        load_rows(f"{path},{path}", probs=probs)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("/no/such/file.jsonl", "does not exist"),
        ("absent.jsonl", "does not exist"),
        ("loader.py", "scripts are never run"),
        ("https://example.com/rows.jsonl", "URLs not fetched"),
        (" , ", "no data set is named"),
    ],
)
def test_what_is_no_data_set_is_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        load_rows(spec)


def test_a_byte_order_mark_blank_lines_and_late_columns_are_accepted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "x"}\r\n\r\n  \n{"b": "y"}')
    assert list(load_rows(str(path))) == [{"a": "x", "b": None}, {"a": None, "b": "y"}]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "script.py").write_text("print()")
    with pytest.raises(ConfigError, match=r"has no data files"):
        load_rows(str(tmp_path / "empty"))


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_nothing_in_a_file_is_zero_rows(tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"0 rows"):
        load_rows(str(path))


GOOD = b'{"a": 1}\n'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            b'{"a": "cut in the mid',
            "rows.jsonl:2: not JSON: Unterminated string starting at, col.* 7 .*byte 9",
        ),
        (b'{"a": "\xff"}', "rows.jsonl:2: not JSON: .*can't decode byte 0xff.*at byte 9"),
        (b'{"a": NaN}', "rows.jsonl:2: not JSON: NaN is not a number"),
        (b'{"a": 1, "a": 2}', "rows.jsonl:2: not JSON: duplicate key a"),
        (b"\0\0\0\0", "rows.jsonl:2: not JSON: zero bytes"),
        *[
            (b'{"a": [0.0, 0e5, %b]}' % number.encode(), f"rows.jsonl:2: not JSON: {number} is not")
            for number in ("1e400", "-1E400", "1e-400")
        ],
        (b'{"a": 1},', "rows.jsonl:2: not JSON: Extra data"),
        (b"[" * 99999, "rows.jsonl:2: not JSON: maximum recursion"),
    ],
)
def test_a_damaged_record_is_named_by_file_and_line(tmp_path, bad, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + bad)
    with pytest.raises(DataError, match=message) as caught:
        load_rows(str(path))
    assert "1 bad rows" in caught.value.problems[0]


def test_mixed_types_in_a_column_are_refused(tmp_path):
    labels = [1, None, 2.5, 3, 4, "x", 5, "y", 6]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"label": label} for label in labels])
    for allowed in ((), DAMAGED):  # which type is the right one, the first row does not say
        with pytest.raises(DataError, match=r"rows.jsonl:6: column 'label' mixes types") as caught:
            load_rows(str(path), allowed=allowed)
        assert "skip" not in str(caught.value)
    one = write_jsonl(tmp_path / "one.jsonl", [{"label": 1}])
    two = write_jsonl(tmp_path / "two.jsonl", [{"label": "x"}])
    with pytest.raises(DataError, match=r"do not fit together"):
        load_rows(f"{one},{two}")


@pytest.mark.parametrize(
    "values",
    [
        [1, 7, 10**20],
        [2**63 - 1, None, -(2**63)],
        [12345678901234567891, 12345678901234567892],
        [1, 0.5, 0.30000000000000004, 3.141592653589793],
        [{"n": 1}, {"n": 0.5}, {"m": [1, {"x": "007"}]}],
        [[1, 2.5], ["a"], []],
        ["2020-01-01", "2020-01-01T10:00:00Z"],
        [{"n": 1, "m": None}, {"n": 2, "m": 3}],
        [[{"n": "x"}], [{"m": "y"}, {"n": None}]],
        [{"n": 1, "m": 2}, {"m": 3, "n": 4}],
        [{"n": {"m": "x"}}, {"n": {}}],
    ],
)
def test_values_stand_in_the_table_as_they_stand_in_the_file(tmp_path, values):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"q": "x", "a": value} for value in values])
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"q": "y", "a": value} for value in values[:1]])
    found = load_rows(f"{path},{plain}")["a"]
    assert json.dumps(list(found)) == json.dumps([*values, values[0]])


def test_the_keys_of_objects_keep_their_order(tmp_path):
    said = [{"role": "user", "content": "q"}, {"content": "a", "role": "assistant"}]
    called = {"role": "x", "f": {"role": "a", "m": 1}}, {"f": {"m": 2, "role": "b"}, "role": "y"}
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": said, "calls": called}])
    (row,) = load_rows(str(path))
    assert json.dumps(row) == json.dumps({"messages": said, "calls": called})


def test_damaged_binary_files_are_named(tmp_path):
    parquet = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(ROWS).to_parquet(parquet)
    parquet.write_bytes(parquet.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"rows.parquet is damaged"):
        load_rows(str(parquet))
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(GOOD * 1000, mtime=0)[:-12])
    with pytest.raises(DataError, match=r"rows.jsonl.gz cannot be read: Compressed file ended"):
        load_rows(str(packed))


def test_cells_of_a_csv_are_text_as_it_stands(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        'day,text,n\n2020-01-02,"two\nlines",1\nNA,"",2.50\n007,true,\na "b" c,"say ""hi""",1"\n'
    )
    assert list(load_rows(str(path))) == [
        {"day": "2020-01-02", "text": "two\nlines", "n": "1"},
        {"day": "NA", "text": None, "n": "2.50"},
        {"day": "007", "text": "true", "n": None},
        {"day": 'a "b" c', "text": 'say "hi"', "n": '1"'},
    ]


def test_a_cell_that_is_too_long_is_named_by_the_line_where_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("openrlhf.datasets.loading.MAX_LINE_MIB", 1)
    path = tmp_path / "rows.csv"
    path.write_text('a,b\n1,2\n3,"' + f"{'x' * 2**19}\n" * 3 + '"\n4,5\n')
    with pytest.raises(DataError, match=r"csv:3: line 4: field larger than field limit"):
        load_rows(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n3\n", r"csv:3: 1 cells, and the first line names 2 columns. Add"),
        (b"a,b\nHi, you,x\nBye, you,y\n", r"csv:2: 3 cells"),
        (b"a,b\nBye,ciao,\n\nHi,x,\n", r"csv:4: 3 cells"),
        (b'a,b\n"x\ny",1\n"say \\"hi\\", ok",x\n', r"csv:4: line 4: ',' expected after '\"'\. Cl"),
        (b'a,b\n1,2\n3,"cut in the mid', r"csv:3: a quote is not closed"),
        (b'a,b\n1,"x\n2,y\n', r"csv:2: a quote is not closed"),
        (b'a,b\n1,"x\n2,y\n3,"z"\n4,w\n', r"csv:2: line 4: ',' expected after '\"'\. Close each"),
        (b"a,b\n1,\xff\n", r"csv:2: .*can't decode byte 0xff"),
        (b"a\n1\n\0\0\0\0", r"csv:3: zero bytes"),
        (b"a,b,\n1,2,\n", r"csv has a column without a name: a, b, \. Name it"),
        (b"a,a\n1,2\n", r"csv has two columns of one name: a, a. Rename"),
        (b"a,b\n", r"has 0 rows"),
    ],
)
def test_a_damaged_csv_is_named_by_line(tmp_path, content, message):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_rows(str(path))


@pytest.mark.parametrize(
    ("name", "content", "bad"),
    [
        (
            "rows.jsonl",
            b'{"a": "x"}\n\n{"a": "cut in\n[1]\n{"a": NaN}\n{"a": "\xff"}\n{"a": "y"}',
            {
                2: ("rows.jsonl:3", "not JSON: Invalid control", '{"a": "cut in'),
                3: ("rows.jsonl:4", "list instead of an object", "[1]"),
                4: ("rows.jsonl:5", "not JSON: NaN is not a number", '{"a": NaN}'),
                5: ("rows.jsonl:6", "not JSON: 'utf-8' codec", '{"a": "\\xff"}'),
            },
        ),
        (
            "rows.json",
            b'[{"a": "x"}, {"a": "\\ud83d"}, 5, {"a": "y"}]',
            {
                2: ("rows.json: row 2", "half a character", '{"a": "\\ud83d"}'),
                3: ("rows.json: row 3", "int instead of an object", "5"),
            },
        ),
        (
            "rows.csv",
            b'a,b\nx,1\n\n"two\nlines",1,2\n\xff,1\n"p"q,1\ny,1\n3,"cut in',
            {
                2: ("rows.csv:4", "3 cells, and the first line", '"two\nlines",1,2'),
                3: ("rows.csv:6", "'utf-8' codec can't", "\\xff,1"),
                4: ("rows.csv:7", "line 7: ',' expected after", '"p"q,1'),
                6: ("rows.csv:9", "a quote is not closed", '3,"cut in'),
            },
        ),
    ],
)
def test_damaged_records_that_are_allowed_are_empty_rows_whose_damage_is_known(
    tmp_path: Path, name: str, content: bytes, bad: dict[int, tuple[str, str, str]]
) -> None:
    (tmp_path / name).write_bytes(content)
    good = write_jsonl(tmp_path / "good.jsonl", [{"a": "z"}])
    rows = load_rows(f"{good},{tmp_path / name}", allowed=DAMAGED)
    assert [row["a"] for row in rows if row["a"]] == ["z", "x", "y"]
    for number, (place, problem, text) in bad.items():
        assert not any(rows[number].values())
        found = damage_of(rows, number)
        assert found and (found[0], found[2]) == (str(tmp_path / place), text)
        assert found[1].startswith(problem) and row_location(rows, number) == found[0]
    assert {i for i in range(len(rows)) if damage_of(rows, i)} == {*bad}
    with pytest.raises(DataError, match=rf": {len(bad)} bad rows.*--bad_rows skip to leave them"):
        load_rows(f"{good},{tmp_path / name}")


@pytest.mark.parametrize("torn", ["", '{"a": \n'])
@pytest.mark.parametrize("other", ["text", b"bytes", datetime(2020, 1, 2), True])
def test_columns_of_two_types_do_not_fit_together_whether_a_record_is_damaged_or_not(
    tmp_path: Path, torn: str, other: object
) -> None:
    datasets.Dataset.from_list([{"a": other}]).to_parquet(tmp_path / "other.parquet")
    (tmp_path / "rows.jsonl").write_text(f'{{"a": 1}}\n{torn}{{"a": 2}}\n')
    with pytest.raises(DataError, match=r"do not fit together"):
        load_rows(f"{tmp_path}/rows.jsonl,{tmp_path}/other.parquet", allowed=DAMAGED)


def test_a_limit_of_rows_does_not_count_damaged_records(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text("{\n" * 5 + '{"a": "x"}\n' * 2 + "{\n" + '{"a": "y"}\n' * 5)
    two.write_text('{"a": "z"}\n{\n')
    for spec, expected in ((f"{one}", ["x", "x", "y"]), (f"{two},{one}", ["z", "x", "x"])):
        rows = load_rows(spec, max_samples=3, allowed=DAMAGED)
        assert [row["a"] for row in rows if row["a"]] == expected
    blend = load_rows(f"{one},{one}", probs="0.5,0.5", max_samples=3, allowed=DAMAGED)
    assert sum(row["a"] is not None for row in blend) == 3
    assert row_location(blend, len(blend) - 1).startswith(f"{one}: row ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", b'[{"a": 1}, {"a": ', "json:1: not JSON"),
        (
            "rows.jsonl",
            '{"a": 1}\n{"a": 2}\n'.encode("utf-16"),
            "rows.jsonl is UTF-16, not text in UTF-8",
        ),
        ("rows.csv", b'a,b\n1,"x\n2,y\n3,z\n', "csv:2: a quote is not closed"),
        ("rows.csv", b'a,b\n1,"x\n2,y\n3,"z"\n4,w\n', "csv:2: line 4: ',' expected"),
        ("rows.csv", "a,b\n1,2\n".encode("utf-16"), "rows.csv is UTF-16, not text"),
        ("rows.jsonl", gzip.compress(LINES, mtime=0), "is gzip, not text.*let its name say"),
        ("rows.jsonl.bz2", bz2.compress(LINES), "is bzip2, not text"),
        ("rows.json", b"PAR1" + bytes(9), "is Parquet, not text"),
        ("rows.json", b'{\n"a": 1\n}\n', "3 bad rows. Repair them: JSON has an object a line"),
        ("rows.tsv", b"a\tb\n1\t2\n", "2 bad rows. .*other files end with .csv"),
        ("rows.jsonl.gz", gzip.compress(LINES * 99, mtime=0)[:-12], "Compressed file ended"),
        ("rows.parquet", b"PAR1", "rows.parquet is damaged"),
    ],
)
def test_a_file_that_is_damaged_as_a_whole_is_refused_all_the_same(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_rows(str(tmp_path / name), allowed=DAMAGED)
    assert "skip" not in str(caught.value)


def test_a_hub_subset_is_a_configuration_or_else_a_folder(monkeypatch):
    calls = []

    def load_dataset(*names: str, **options: str) -> datasets.Dataset:
        calls.append((names, options))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["main", "hard"])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for spec in ("org/math", "org/math@hard", "org/math@data/en"):
        assert list(load_rows(spec, split="test")) == ROWS
    assert calls == [
        (("org/math", None), {"split": "test"}),
        (("org/math", "hard"), {"split": "test"}),
        (("org/math",), {"data_dir": "data/en", "split": "test"}),
    ]


def test_a_split_that_the_hub_does_not_have_is_one_line(monkeypatch):
    def refuse(*names: str, **options: str) -> None:
        raise ValueError("Unknown split 'dev'. Should be one of ['train'].\nMore of it.")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    said = (
        r"data set org/a cannot be loaded from the hub \(split 'dev'\): Unknown .*\['train'\]. Ch"
    )
    with pytest.raises(ConfigError, match=said):
        load_rows("org/a", split="dev")


def test_the_place_of_a_row_counts_from_its_own_file(tmp_path):
    one = write_jsonl(tmp_path / "train-1.jsonl", [{"a": 1}] * 3)
    two = write_jsonl(tmp_path / "train-2.jsonl", [{"a": 2}] * 3)
    folder = load_rows(str(tmp_path))
    assert row_location(folder, 2) == f"{one}: row 3"
    assert row_location(folder, 4) == f"{two}: row 2"
    capped = load_rows(f"{one},{two}", max_samples=2)
    assert row_location(capped, 1) == f"{one}: row 2"
    both = load_rows(f"{tmp_path},{two}", max_samples=5)
    assert [row["a"] for row in both] == [1, 1, 1, 2, 2]
    assert row_location(both, 4) == f"{two}: row 2"


def test_a_limit_that_leaves_out_rows_of_some_data_sets_is_said(tmp_path):
    one, two = (
        write_jsonl(tmp_path / f"{name}.jsonl", [{"a": i} for i in range(9)]) for name in "ab"
    )
    rows = load_rows(f"{one},{two}", max_samples=4)
    assert beyond_limit(rows) == (
        f"the limit of 4 samples leaves 4 of 9 rows of {one}, 0 of 9 rows of {two}"
    )
    assert beyond_limit(load_rows(f"{one},{two}", max_samples=18)) == ""
    assert beyond_limit(load_rows(str(one), max_samples=4)) == ""  # what was asked for


def test_blended_rows_are_named_by_their_own_file(tmp_path):
    one, two = (
        write_jsonl(tmp_path / f"{name}.jsonl", [{"a": i} for i in range(9)]) for name in "ab"
    )
    blend = load_rows(f"{one},{two}", probs="0.6,0.4", max_samples=7)
    places = [row_location(blend, i) for i in range(7)]
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
    assert len(load_rows(str(path), allowed=["repeated ids"])) == 4
    for ids in ([1, 2], [None, None], [["a"], ["a"]]):  # lists are no ids
        path = write_jsonl(path, [{"id": value} for value in ids])
        assert len(load_rows(f"{path},{path}")) == 4  # a data set twice is meant


def test_half_a_character_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "x"}\n{"a": "x\\ud83d"}\n{"a": "\\ud83d\\ude00"}\n')
    with pytest.raises(DataError) as caught:
        load_rows(str(path))
    told = f"{path}:2: half a character (a surrogate without its other)"
    assert caught.value.problems[1:] == [told]
    array = tmp_path / "rows.json"
    array.write_bytes(b'[{"a": "x"}, {"a": ["\\uD83D"]}]')
    with pytest.raises(DataError, match=r"rows\.json: row 2: half a character"):
        load_rows(str(array))


def test_a_column_that_the_library_does_not_know_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    column = pa.array([[("a", 1)]], type=pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"m": column}), path)
    with pytest.raises(DataError, match=r"cannot be read: Arrow type map.*'m'.*Write its columns"):
        load_rows(str(path))


def test_a_home_that_cannot_be_written_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}])
    caches = ("HF_DATASETS_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    env = {name: value for name, value in os.environ.items() if name not in caches}
    code = f"from openrlhf.datasets.loading import load_rows\nload_rows({str(path)!r})"
    command = [sys.executable, "-c", code]
    env |= {"HOME": "/dev/null/x"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    last = result.stderr.splitlines()[-1]
    told = "Error: the cache of data sets cannot be written: /dev/null/x"
    assert told in last and "Set HF_DATASETS_CACHE to a folder" in last


@pytest.mark.parametrize("cache", ["/proc/nowhere", "/dev/null/cache"])
def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_file(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}])
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    rows = datasets.Dataset.from_list([{"text": "a"}])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    told = f"the cache of data sets cannot be written: {cache}.*Set HF_DATASETS_CACHE to a folder"
    with pytest.raises(ConfigError, match=told) as caught:
        load_rows(str(path))
    assert "rows.jsonl" not in str(caught.value)
    with pytest.raises(ConfigError, match=told):
        SFTDataset(rows, tokenizer, RowFormat(pretrain_mode=True))
