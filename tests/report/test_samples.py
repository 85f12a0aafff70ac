"""Samples of a run: in a page, and of any number behind a server."""

import json
import math
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pyarrow.parquet
import pytest

from openrlhf.report import samples
from openrlhf.report.sample_index import Query, SampleIndex
from openrlhf.report.samples import excerpt, step_files
from openrlhf.utils.images import read_picture
from openrlhf.utils.rollout_files import write_rollouts
from tests.helpers import tiny_vision
from tests.report.large_run import served, write_large_run
from tests.report.run_folders import SEARCHES, make_run, sample


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = make_run(tmp_path / "run")
    write_rollouts(path, 3, [sample(3, 0, 0)], num_kept=1000)
    (path / "rollouts" / "step_000003.parquet").rename(
        path / "rollouts" / "eval_step_000003.parquet"
    )
    return path


@pytest.fixture
def index(run_dir: Path) -> SampleIndex:
    index = SampleIndex(run_dir)
    index.refresh()
    return index


def ids(found: dict) -> list[str]:
    return [row["sample_id"] for row in found["rows"]]


def test_files_are_training_steps_and_then_evaluations(run_dir):
    assert [file.label for file in step_files(run_dir)] == [
        "step 1 (6 samples)",
        "step 2 (6 samples)",
        "evaluation at step 3 (1 samples)",
    ]


def test_an_excerpt_has_the_tokens_of_a_sample_and_what_an_older_file_has(run_dir):
    found = {row["sample_id"]: row for row in excerpt(run_dir, step_files(run_dir))}
    assert len(found) == 13
    new, old = found["1-1-0"], found["2-1-0"]
    assert new["tokens"]["advantages"] == [-0.5, 2.0]
    assert new["parts"] == {"format": 0.125, "answer": 1.0}
    assert new["others"] == {"colour": "blue"}
    assert (old["tokens"], old["advantage"], old["group_id"]) == (None, None, 11)


def test_an_excerpt_is_bounded_and_takes_from_all_steps(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path, num_steps=5)
    monkeypatch.setattr(samples, "MAX_EXCERPT_BYTES", 7000)
    monkeypatch.setattr(samples, "MAX_EXCERPT_FILES", 3)
    found = excerpt(run_dir, step_files(run_dir))
    assert 3 <= len(found) < 18
    assert {row["file"] for row in found} == {f"step_00000{step}.parquet" for step in (1, 3, 5)}


def test_an_excerpt_has_the_best_and_the_worst_of_the_last_file(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    rewards = [0.5] * 60
    for k, reward in {50: 1.0, 51: 1.0, 53: 0.9, 55: 0.0, 57: math.nan, 58: None}.items():
        rewards[k] = reward  # two a prompt: 50 and 51 are of one
    rows = [sample(3, k // 2, k % 2) | {"reward": r} for k, r in enumerate(rewards)]
    for step in (1, 2):
        write_rollouts(run_dir, step, rows, num_kept=9)
    monkeypatch.setattr(samples, "MAX_EXCERPT_BYTES", 12_000)
    found = excerpt(run_dir, step_files(run_dir))
    numbers = [row["number"] for row in found if row["file"] == "step_000002.parquet"]
    assert {53, 55} <= {*numbers} and {50, 51} & {*numbers}
    assert numbers[0] == 0 and len(numbers) < 30
    assert max(row["number"] for row in found if row["file"] == "step_000001.parquet") < 30


def test_a_page_is_sorted_searched_and_counted(index):
    found = index.samples(Query(sort="reward", is_descending=True, size=2, page=2))
    assert (found["total"], ids(found)) == (13, ["1-2-0", "2-2-0"])
    by_label = index.samples(Query(file="step_000001.parquet", sort="label", size=3))
    assert [row["label"] for row in by_label["rows"]] == ["9", "9", "10"]
    assert index.samples(Query(search="ONERROR"))["total"] == 4
    assert index.samples(Query(search="'; DROP TABLE samples; --"))["total"] == 0
    assert index.samples(Query(sort="reward; DROP TABLE samples"))["total"] == 13


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_takes_text_and_conditions(search, tmp_path):
    index = SampleIndex(make_run(tmp_path))
    index.refresh()
    found = index.samples(Query(search=search))["rows"]
    assert [f"{row['reward']:g}" for row in found] == SEARCHES[search]


def test_a_condition_compares_what_the_page_shows(tmp_path):
    rewards = [0.1 + 1e-9, 0.1 - 1e-9, math.nan, None, 0.2]
    write_rollouts(tmp_path, 1, [sample(1, 0, 0) | {"reward": r} for r in rewards], num_kept=9)
    index = SampleIndex(tmp_path)
    index.refresh()
    searches = ("reward=0.1", "reward>0.1", "reward<=0.1")
    assert [index.samples(Query(search=search))["total"] for search in searches] == [2, 1, 2]


def test_columns_of_any_name_and_labels_of_any_type_are_those_of_the_file(tmp_path):
    own = {"filename": "a.txt", "file_row_number": 7, "Reward": "high", "Response": "R"}
    write_rollouts(tmp_path, 1, [sample(1, 0, 0) | own | {"label": ["a", "b"]}], num_kept=9)
    write_rollouts(tmp_path, 2, [sample(2, 0, 0) | {"label": "5"}], num_kept=9)
    index = SampleIndex(tmp_path)
    index.refresh()
    first, second = index.samples(Query())["rows"]
    assert first["reward"] is not None and first["response"]
    assert (first["label"], second["label"]) == ("['a', 'b']", "5")
    found = index.sample("step_000001.parquet", 0)
    assert found["others"].items() >= own.items() and found["label"] == "['a', 'b']"


def test_the_name_of_a_folder_is_no_pattern(tmp_path):
    for name, number in (("run[1]", 0), ("run1", 1)):
        write_rollouts(tmp_path / name, 1, [sample(1, number, 0)], num_kept=9)
    index = SampleIndex(tmp_path / "run[1]")
    index.refresh()
    assert ids(index.samples(Query())) == [index.sample("step_000001.parquet", 0)["sample_id"]]
    assert ids(index.samples(Query())) == [sample(1, 0, 0)["sample_id"]]


@pytest.mark.parametrize("label", [{"kwargs": [{}]}, [{}], {"a": {}}])
def test_labels_that_hold_empty_mappings_are_written_as_text(label, tmp_path):
    [path] = [write_rollouts(tmp_path, 1, [sample(1, 0, 0) | {"label": label}] * 2, num_kept=9)]
    assert pyarrow.parquet.read_table(path)["label"].to_pylist() == [json.dumps(label)] * 2


def test_prompts_have_the_numbers_of_their_samples(index):
    found = index.groups(Query(file="step_000001.parquet", sort="reward", is_descending=True))
    assert found["total"] == 3
    first = found["rows"][0]
    assert (first["prompt"], first["num_samples"], first["reward"]) == ("2+1=", 2, 2.125)
    assert (first["reward_min"], first["reward_max"]) == (2.0, 2.25)
    by_label = index.groups(Query(file="step_000001.parquet", sort="label", size=1, page=3))
    assert [row["label"] for row in by_label["rows"]] == ["11"]
    assert index.samples(Query(file="step_000001.parquet", group_id=1))["total"] == 2
    assert index.groups(Query(file="step_000002.parquet"))["total"] == 3  # by the row of the prompt


def test_a_sample_behind_a_server_is_the_one_of_the_excerpt(index, run_dir):
    for expected in excerpt(run_dir, step_files(run_dir)):
        assert index.sample(expected["file"], expected["number"]) == expected
    assert index.sample("../run/rollouts/step_000001.parquet", 0) is None
    assert index.sample("step_000001.parquet", 6) is None


def test_an_index_follows_a_run_that_goes_on(index, run_dir):
    (run_dir / "rollouts" / "step_000001.parquet").unlink()
    write_rollouts(run_dir, 4, [sample(4, 0, 0)], num_kept=1000)
    index.refresh()
    assert index.samples(Query())["total"] == 8
    assert ids(index.samples(Query(file="step_000004.parquet"))) == ["4-0-0"]


def time_pages(run_dir: Path) -> dict[str, float]:
    """How long a new server takes for a page of each kind, in processor time of both sides."""

    def get(path: str, **query: object) -> tuple[bytes, float]:
        start = time.process_time()
        words = urllib.parse.urlencode({"run": run_dir, "size": 20, **query})
        with urllib.request.urlopen(f"{address}{path}?{words}") as page:
            return page.read(), time.process_time() - start

    with served([run_dir]) as address:
        page, opening = get("")
        assert b'"num_samples": 100000' in page
        times = {"opening": opening}
        for view, total in (("groups", 12_500), ("samples", 100_000)):
            for query in (
                *({"page": 1}, {"page": 2}, {"page": 600}, {"file": "step_000100.parquet"}),
                *(
                    {"sort": name, "page": page}
                    for name in ("reward", "num_actions", "label", "prompt")
                    for page in (1, 2)
                ),
                *({"search": "nosuchword"}, {"search": "ETA", "sort": "reward"}),
                {"search": "reward>0.5 length<100 eta", "sort": "reward"},
                *({"search": "eta o"}, {"search": "eta o", "page": 2}),
            ):
                response, times[f"{view} {query}"] = get(view, **query)
                found = json.loads(response)
                if not query.keys() & {"search", "file"}:
                    assert (found["total"], len(found["rows"])) == (total, 20)
            assert found["total"] > 20 and len(found["rows"]) == 20  # those with "eta o"
        _, times["sample"] = get("sample", file="step_000050.parquet", number=999)
    return times


def test_a_hundred_thousand_samples_open_in_2_s_and_a_page_turns_in_200_ms(tmp_path):
    """In the best of three rounds: other tests on the machine take a part of its caches."""
    run_dir = write_large_run(tmp_path)
    best: dict[str, float] = {}
    for _ in range(3):
        best = {name: min(took, best.get(name, took)) for name, took in time_pages(run_dir).items()}
        slow = {n: took for n, took in best.items() if took > (2 if n == "opening" else 0.2)}
        if not slow:
            break
    assert slow == {}


@pytest.mark.parametrize("run", ["<image>", "<image><image><row><image>"])
def test_words_stand_for_the_tokens_of_an_image_and_for_marks_between_them(tmp_path, run):
    """A data set writes one placeholder; the prompt of an agent has all."""
    image = {"sha256": "0", "width": 56, "height": 28, "start": 1, "num_tokens": 4}
    texts = ["<fake>", "<image>", "<image>", "<row>", "<image>", "<fake>", "a"]
    row = sample(1, 0, 0) | {"prompt": f"<fake>{run}<fake>?", "token_texts": texts}
    write_rollouts(tmp_path, 1, [row | {"images": [image]}], num_kept=9)
    [found] = excerpt(tmp_path, step_files(tmp_path))
    assert found["prompt"] == "<fake>[image 1: 56x28, 4 tokens]<fake>?"


def test_an_image_whose_file_is_gone_or_elsewhere_is_not_shown(tmp_path):
    picture = read_picture(tiny_vision.noise(28, 28))
    place = {"width": 28, "height": 28, "start": 1, "num_tokens": 1}
    names = [picture.sha256, "gone", "../other"]
    row = sample(1, 0, 0) | {"images": [{"sha256": name, **place} for name in names]}
    write_rollouts(tmp_path, 1, [row], num_kept=9, images=[picture])
    (tmp_path / "other.png").write_bytes(picture.data)
    [found] = excerpt(tmp_path, step_files(tmp_path))
    assert [image["src"] is not None for image in found["images"]] == [True, False, False]
    assert read_picture(found["images"][0]["src"]).open() == picture.open()
