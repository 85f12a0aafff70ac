"""Files that are damaged, or not what their name says, end a command in one line and exit code 2,
before a model is loaded; what is harmless is read.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from openrlhf.cli.train_sft import main
from openrlhf.datasets import data_files, loading
from openrlhf.datasets.loading import Expectations
from openrlhf.errors import ConfigError, DataError
from tests.tiny import write_jsonl

GOOD = b'{"input": "q", "output": "a"}\n'
ROWS = [{"input": "q", "output": "a"}] * 4


def content(data: bytes) -> Callable[[Path], None]:
    """Writes these bytes."""
    return lambda path: path.write_bytes(data)  # type: ignore[return-value]


def cut_parquet(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-20])


# Name of the file, what writes it, and how the line goes on behind its path.
CASES = {
    "cut inside a record": ("a.jsonl", content(GOOD + GOOD[:9]), ":2: cut record"),
    "cut gzip": (
        "a.jsonl.gz",
        content(gzip.compress(GOOD * 999)[:-12]),
        ": the compressed file is",
    ),
    "cut parquet": ("a.parquet", cut_parquet, " is damaged: "),
    "100 MB in a line": (
        "a.jsonl",
        content(GOOD + b'{"input": "' + b"x" * 10**8),
        ":2: a line of over",
    ),
    "integer of 5,000 digits": (
        "a.jsonl",
        content(GOOD + b'{"input": ' + b"9" * 5000 + b"}"),
        ":2: not JSON",
    ),
    "JSON called .csv": ("a.csv", content(GOOD * 9), ""),
    "a dangling link": (
        "a.jsonl",
        lambda path: path.symlink_to("nowhere.jsonl"),
        " is a link to nowhere.jsonl, which does not exist. ",
    ),
}


def refused(
    data: Path | str, model: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The error lines of train_sft on this data (a path, or flags); the exit code is 2."""
    named = f"--dataset {data}" if isinstance(data, Path) else data
    words = f"--pretrain {model} {named} --output_key output --save_path {run_dir}"
    with pytest.raises(SystemExit) as stop:
        main([*words.split(), "--train_batch_size", "2", "--micro_train_batch_size", "1"])
    error = capsys.readouterr().err
    assert stop.value.code == 2, error
    assert "Traceback" not in error
    return [line.removeprefix("error: ") for line in error.splitlines() if "error: " in line]


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that cannot be read: a command that got as far would say so."""
    monkeypatch.setattr("openrlhf.models.loading.from_pretrained_kwargs", None)


@pytest.mark.parametrize("case", CASES)
def test_a_bad_file_is_one_problem_and_exit_code_2(
    case: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, write, expected = CASES[case]
    path = tmp_path / name
    write(path)
    lines = refused(path, tiny_model_dir, tmp_path / "run", capsys)
    line, *others = [line for line in lines if "bad rows. " not in line]
    # A CSV file may hold anything: then the columns are not there, neither of them.
    assert len(others) == (0 if expected else 1)
    assert f"{path}{expected}" in line if expected else "is not in the data set; columns" in line


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = data_files.check_text

    def read_and_append(rows: datasets.Dataset, name: str) -> None:
        read(rows, name)
        with Path(name).open("ab") as file:
            file.write(GOOD)

    monkeypatch.setattr(data_files, "check_text", read_and_append)
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read"):
        loading.load_rows(str(path))


def test_rows_that_a_file_lost_are_noticed_where_their_number_or_hash_is_given(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(GOOD * 3)  # cut at the end of a line: a file like any other
    words = [f"--expect_rows 4 --dataset {path}", f"--expect_sha256 {digest} --dataset {path}"]
    found = [refused(flags, tiny_model_dir, tmp_path / "run", capsys) for flags in words]
    assert found[0] == [
        f"data set {path} has 3 rows, not 4. Fetch it again, or correct --expect_rows."
    ]
    assert f"{path} has the SHA-256 " in found[1][0] and f", not {digest}. Fetch" in found[1][0]


def test_what_is_expected_is_given_for_each_data_set(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", ROWS)
    two = write_jsonl(tmp_path / "two.jsonl", ROWS[:1])
    digests = [hashlib.sha256(path.read_bytes()).hexdigest().upper() for path in (one, two)]
    right = Expectations(num_rows="4, 1", sha256=",".join(digests))
    assert len(loading.load_rows(f"{one},{two}", expected=right, max_samples=2)) == 2
    for wrong, message in (
        (Expectations(num_rows="4"), "--expect_rows 4 is of 1 data sets, and 2 are named"),
        (Expectations(num_rows="4,x"), "--expect_rows 4,x is no number of rows"),
        (Expectations(num_rows="4,2"), "two.jsonl has 1 rows, not 2"),
        (Expectations(sha256=f"{digests[0]},0"), "two.jsonl has the SHA-256 .*, not 0."),
    ):
        with pytest.raises(ConfigError, match=message):
            loading.load_rows(f"{one},{two}", expected=wrong)
    with pytest.raises(ConfigError, match="--expect_sha256 is of a file, and data set"):
        loading.load_rows(str(tmp_path), expected=Expectations(sha256="0"))
