"""Files that are damaged, or not what their name says, end a command in one line and exit code 2,
before a model is loaded; what is harmless is read.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
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


def cut_arrow(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path.parent / "saved")
    [source] = (path.parent / "saved").glob("*.arrow")
    path.write_bytes(source.read_bytes()[:100])


def cut_saved(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)
    [part] = path.glob("*.arrow")
    part.write_bytes(part.read_bytes()[:100])


def saved_without_a_part(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)
    next(path.glob("*.arrow")).unlink()


def text_in_no_alphabet(path: Path) -> None:
    words = pa.array([b"q", b"\xff"]).view(pa.string())  # pyarrow takes it, and writes it
    table = pa.table({"input": words, "output": words})
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
    else:
        datasets.Dataset(table).save_to_disk(path)


# Name of the file, what writes it, and how the line goes on behind its path.
CASES = {
    "cut inside a record": ("a.jsonl", content(GOOD + GOOD[:9]), ":2: cut record"),
    "a byte that is not UTF-8": ("a.jsonl", content(GOOD + b'{"a": "\xff"}\n'), ":2: not UTF-8"),
    "zero bytes at the end": ("a.jsonl", content(GOOD + b"\0" * 99), ":2: holds zero bytes"),
    "empty": ("a.jsonl", content(b""), " is empty: 0 rows"),
    "only blank lines": ("a.jsonl", content(b"\n \n"), " has 0 rows"),
    "an empty array": ("a.json", content(b"[]"), " has 0 rows"),
    "a key twice": ("a.jsonl", content(b'{"input": 1, "input": 2}'), ":1: duplicate key input"),
    "NaN": ("a.jsonl", content(b'{"input": NaN}'), ":1: NaN is not a number"),
    "Infinity": ("a.jsonl", content(b'{"input": Infinity}'), ":1: Infinity is not a number"),
    "mixed types": (
        "a.jsonl",
        content(b'{"input": 1}\n{"input": "b"}'),
        ":2: column 'input' mixes",
    ),
    "cut parquet": ("a.parquet", cut_parquet, " is damaged: "),
    "no UTF-8 in parquet": ("a.parquet", text_in_no_alphabet, " is damaged: column 'input': "),
    "no UTF-8 in a saved data set": (
        "saved",
        text_in_no_alphabet,
        " is damaged: column 'input': ",
    ),
    "an array cut in its third line": (
        "a.json",
        content(b'[\n{"input": "q"},\n{"input": "q'),
        ":3: cut record",
    ),
    "cut gzip": (
        "a.jsonl.gz",
        content(gzip.compress(GOOD * 999)[:-12]),
        ": the compressed file is",
    ),
    "cut gzip of an array": (
        "a.json.gz",
        content(gzip.compress(b"[]")[:-9]),
        ": the compressed file is",
    ),
    "no gzip": ("a.jsonl.gz", content(GOOD), ": the compressed file is cut or damaged"),
    "cut arrow": ("a.arrow", cut_arrow, " is damaged: "),
    "cut saved data set": ("saved", cut_saved, " is a damaged saved data set"),
    "saved data set without a part": (
        "saved",
        saved_without_a_part,
        " is a damaged saved data set",
    ),
    "a comma behind a record": ("a.jsonl", content(GOOD[:-1] + b",\n"), ":1: not JSON: Extra data"),
    "an array in .jsonl": ("a.jsonl", content(b"[" + GOOD[:-1] + b"]"), ":1: list instead"),
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
    "number beyond all": (
        "a.jsonl",
        content(b'{"input": "a", "x": 1e999}'),
        ":1: the number 1e999 is too large",
    ),
    "depth of 10,000": ("a.jsonl", content(b'{"input": ' + b"[" * 10_000), ":1: nested too deeply"),
    "parquet called .jsonl": ("a.jsonl", content(b"PAR1\xc0\x01\xfe"), ":1: not UTF-8"),
    "JSON called .parquet": ("a.parquet", content(GOOD * 9), " is damaged: "),
    "100 MB in a line of CSV": (
        "a.csv",
        content(b"input,output\nq,a\nq," + b"x" * 10**8),
        ":3: a line of over 64 MiB",
    ),
    "cut inside a cell": (
        "a.csv",
        content(b'input,output\nq,a\nq,"a lo'),
        " is damaged: Error tokenizing data. C error: EOF inside string",
    ),
    "cut inside a long header": (
        "a.csv",
        content(b'"input,output\n' + b"q,a\n" * 50_000),
        ":1: cut record: ",
    ),
    "a cell too many": (
        "a.csv",
        content(b"input,output\nq,a\nq,a,b\n"),
        " is damaged: Error tokenizing data. C error: Expected 2 fields in line 3, saw 3",
    ),
    "JSON called .csv": ("a.csv", content(GOOD * 9), ""),
    "text": ("a.txt", content(b"To be, or not to be\n"), ":1: not JSON"),
    "a folder called .jsonl": ("a.jsonl", lambda path: path.mkdir(), " has no data files"),
    "a dangling link": (
        "a.jsonl",
        lambda path: path.symlink_to("nowhere.jsonl"),
        " is a link to nowhere.jsonl, which does not exist. ",
    ),
    "a script": ("a.py", content(b"rows = []"), " is a Python script, which is never run"),
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


@pytest.fixture
def as_nobody(monkeypatch: pytest.MonkeyPatch):
    """A folder all may enter, and a switch to a user without rights, where there are such."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    user = os.geteuid()

    def become_nobody() -> None:
        if user == 0:
            os.seteuid(65534)

    yield folder, become_nobody
    os.seteuid(user)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "arrow"])
def test_an_unreadable_file_is_one_line(suffix: str, as_nobody) -> None:
    folder, become_nobody = as_nobody
    path = folder / f"a.{suffix}"
    path.write_bytes(GOOD)
    path.chmod(0)
    become_nobody()
    with pytest.raises(DataError) as caught:
        loading.load_rows(str(path))
    [line] = caught.value.problems
    assert line.startswith(str(path)) and "Permission denied" in line


def test_a_file_in_a_folder_nobody_may_enter_is_one_line(as_nobody) -> None:
    folder, become_nobody = as_nobody
    (folder / "locked").mkdir()
    (folder / "locked").chmod(0)
    become_nobody()
    path = folder / "locked" / "a.jsonl"
    with pytest.raises(DataError, match=f"{path} cannot be read: Permission denied"):
        loading.load_rows(str(path))


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


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", b"\xef\xbb\xbfinput,output\r\nq,a\r\n"),
        ("a.jsonl", b"\xef\xbb\xbf" + GOOD),
        ("a.jsonl", GOOD.replace(b"\n", b"\r\n") * 2),
        ("a.jsonl", b"\n\n" + GOOD + b"\n"),
        ("a.jsonl", GOOD[:-1]),
        ("a.txt", GOOD),
        ("a.json", b"\xef\xbb\xbf [" + GOOD + b"]"),
    ],
)
def test_what_is_harmless_is_read(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    rows = loading.load_rows(str(tmp_path / name)).to_list()
    assert rows[0] == ROWS[0] and len(rows) in (1, 2)
