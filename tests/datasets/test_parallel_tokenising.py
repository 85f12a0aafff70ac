"""Tokenising in several processes: what one process makes, whatever the processes suffer, and once
for all ranks of a machine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import Process
from pathlib import Path

import psutil
import pytest
from datasets import Dataset

from openrlhf.datasets import tokenized
from openrlhf.datasets.prompts_dataset import PromptDataset, PromptFormat
from openrlhf.datasets.sft_dataset import SFTDataset, SFTFormat
from openrlhf.datasets.token_cache import giving_way
from openrlhf.datasets.unpaired_preference_dataset import (
    UnpairedFormat,
    UnpairedPreferenceDataset,
)
from openrlhf.errors import ConfigError, DataError
from openrlhf.utils import forked
from openrlhf.utils.forked import map_forked
from tests.datasets.test_token_cache import KINDS, flat
from tests.tiny import make_tokenizer

NUM_ROWS = 3500  # three chunks and a half


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenized"


@pytest.fixture
def tokenizer(tmp_path: Path) -> object:
    return make_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch):
    """Sets how many processes tokenise."""

    def use(num_processes: int) -> None:
        monkeypatch.setattr(tokenized, "PARALLEL_ROWS", 1)
        monkeypatch.setattr(tokenized, "num_cores", lambda: num_processes)
        monkeypatch.setattr(tokenized, "MIN_ROWS", 10**9)  # no cache

    return use


@pytest.mark.parametrize("kind", list(KINDS))
def test_several_processes_make_what_one_makes(kind, tokenizer, in_processes) -> None:
    make, row_format, row = KINDS[kind]
    rows = Dataset.from_list([row(i % 2000) for i in range(NUM_ROWS)])
    found, steps = [], []
    for num_processes in (1, 3):
        in_processes(num_processes)
        found.append(make(rows, tokenizer, row_format, progress=lambda *done: steps.append(done)))
    one, three = found
    assert [flat(one[i]) for i in range(len(one))] == [flat(three[i]) for i in range(len(three))]
    for name in ("notices", "dropped", "num_truncated", "row_ids", "fingerprint"):
        assert getattr(one, name) == getattr(three, name)
    assert steps == [(n, NUM_ROWS) for n in (1000, 2000, 3000, 3500)] * 2


def test_prompts_are_the_same_from_several_processes(tokenizer, in_processes) -> None:
    def row(i: int) -> dict:
        ending = [{"role": "assistant", "content": "a"}] if i % 7 == 0 else []
        text = "x" * (i % 50) + ("<|end|>" if i % 5 == 0 else "y")
        return {"input": [{"role": "user", "content": text}, *ending], "label": i}

    rows = Dataset.from_list([row(i) for i in range(NUM_ROWS)])
    form = PromptFormat(label_key="label", apply_chat_template=True, max_len=40)
    found = []
    for num_processes in (1, 3):
        in_processes(num_processes)
        found.append(PromptDataset(rows, tokenizer, form))
    one, three = found
    assert [one[i] for i in range(len(one))] == [three[i] for i in range(len(three))]
    assert one.notices == three.notices and len(one.notices) == 3
    assert (one.num_answered, one.num_dropped) == (three.num_answered, three.num_dropped)
    assert one.fingerprint == three.fingerprint


def test_prompts_come_from_the_cache(tokenizer, cache: Path, monkeypatch) -> None:
    rows = [{"input": "x" * (1 + i % 50) + ("<|end|>" if i % 9 == 0 else "")} for i in range(1500)]
    form = PromptFormat(max_len=40)
    built = PromptDataset(Dataset.from_list(rows), tokenizer, form)
    monkeypatch.setattr(PromptDataset, "_build", None)
    found = PromptDataset(Dataset.from_list(rows), tokenizer, form)
    assert [found[i] for i in range(len(found))] == [built[i] for i in range(len(built))]
    assert found.notices == built.notices and len(found.notices) == 2
    assert found.fingerprint == built.fingerprint


def test_bad_rows_of_all_processes_are_listed_in_order(tokenizer, in_processes) -> None:
    rows = [{"input": "q", "output": "a", "label": 2 if i % 1500 == 7 else 1} for i in range(3100)]
    in_processes(2)
    with pytest.raises(DataError) as caught:
        UnpairedPreferenceDataset(
            Dataset.from_list(rows), tokenizer, UnpairedFormat(output_key="output")
        )
    head, *places = caught.value.problems
    assert head.startswith("data set: 3 bad rows.")
    assert [line.partition(":")[0] for line in places] == ["row 8", "row 1508", "row 3008"]


def test_an_error_of_the_template_is_raised_as_by_one_process(tokenizer, in_processes) -> None:
    tokenizer.chat_template = (
        "{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    turns = [{"role": r, "content": "x"} for r in ("user", "assistant")]
    rows = Dataset.from_list([{"messages": turns * 2}] * 2500)
    in_processes(2)
    form = SFTFormat(input_key="messages", apply_chat_template=True, multiturn=True)
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        SFTDataset(rows, tokenizer, form)


def die_of(item: int, parent: int, how: str) -> int:
    """Squares; another process than the parent dies, or hangs, at 5."""
    if item == 5 and os.getpid() != parent:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)
    return item * item


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_what_a_lost_process_owes_is_done_by_the_parent(
    how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forked, "DEADLINE_S", 2.0)
    parent = os.getpid()
    squares = map_forked(lambda i: die_of(i, parent, how), range(12), num_processes=3)
    assert list(squares) == [i * i for i in range(12)]
    assert "is gone (exit code -9); its share is done in this one." in capfd.readouterr().err
    assert multiprocessing.active_children() == []


def test_processes_end_when_nobody_wants_more() -> None:
    squares = map_forked(lambda i: i * i, range(1000), num_processes=2)
    assert [next(squares), next(squares)] == [0, 1]
    squares.close()
    assert multiprocessing.active_children() == []


FORM = SFTFormat(output_key="output")


def many_rows() -> Dataset:
    return Dataset.from_list([{"input": f"q{i}", "output": "a" * (i % 9)} for i in range(4000)])


def tokenise(tokenizer: object, folder: Path, role: str, pause_s: float) -> None:
    """As rank 0 or another rank of the machine: two processes, slow ones; leaves a mark for every
    chunk, and the fingerprint.
    """
    build = SFTDataset._build_chunk

    def slowly(self: SFTDataset, start: int) -> tuple:
        (folder / f"{role}-{start}").touch()
        time.sleep(pause_s)
        return build(self, start)

    SFTDataset._build_chunk = slowly  # type: ignore[method-assign]
    tokenized.PARALLEL_ROWS, tokenized.num_cores = 1, lambda: 2
    if role == "first":
        time.sleep(0.5)  # the other ranks are there before
    with giving_way(gives_way=role != "first"):
        answer = SFTDataset(many_rows(), tokenizer, FORM).fingerprint  # type: ignore[arg-type]
    (folder / f"{role}.answer").write_text(answer)


def start(tokenizer: object, folder: Path, role: str, pause_s: float) -> Process:
    process = multiprocessing.get_context("fork").Process(
        target=tokenise, args=(tokenizer, folder, role, pause_s)
    )
    process.start()
    return process  # type: ignore[return-value]


def test_ranks_of_a_machine_tokenise_once_the_first_rank_does(tokenizer, tmp_path: Path) -> None:
    ranks = [start(tokenizer, tmp_path, role, 0.2) for role in ("second", "third", "first")]
    for rank in ranks:
        rank.join(60)
    answers = [path.read_text() for path in tmp_path.glob("*.answer")]
    assert len(answers) == 3 and len(set(answers)) == 1
    marks = sorted(path.name for path in tmp_path.glob("*-*"))
    assert marks == [f"first-{start}" for start in (0, 1000, 2000, 3000)]


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_tokenisation_leaves_no_entry_and_no_process(
    tokenizer, tmp_path: Path, cache: Path
) -> None:
    killed = start(tokenizer, tmp_path, "first", 60.0)
    wait_for(lambda: (tmp_path / "first-0").exists() and (tmp_path / "first-1000").exists())
    workers = psutil.Process(killed.pid).children()
    assert len(workers) == 2
    killed.kill()
    killed.join(10)
    wait_for(lambda: not any(map(runs, workers)))
    assert list(cache.glob("*")) == []
    again = start(tokenizer, tmp_path, "first", 0.0)
    again.join(60)
    [entry] = cache.iterdir()
    assert entry.suffix == ".tokens"
    with giving_way():
        found = SFTDataset(many_rows(), tokenizer, FORM)
    assert found.fingerprint == (tmp_path / "first.answer").read_text()
