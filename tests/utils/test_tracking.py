"""Sinks write what they were given, and none of them can stop or slow a run."""

import io
import json
import math
import sqlite3
import threading
import time
from dataclasses import replace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from openrlhf.config.common import LoggerConfig, WandbConfig
from openrlhf.distributed.folders import set_earlier_run_aside
from openrlhf.utils.images import Picture, read_picture
from openrlhf.utils.rollout_files import rollout_row, write_rollouts
from openrlhf.utils.run_folder import METRICS_FILE
from openrlhf.utils.sinks import BackgroundSink
from openrlhf.utils.tracker import Tracker, make_tracker, read_metrics
from tests.helpers.rollouts import rollout


def test_jsonl_holds_one_strict_json_object_a_step(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.log(1, {"reward": 0.5, "kl": math.nan, "grad_norm": math.inf})
    tracker.log(2, {"reward": 0.75})
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["step"], first["reward"], first["kl"], first["grad_norm"]) == (1, 0.5, None, None)
    assert (second["step"], second["reward"]) == (2, 0.75)


def test_resume_drops_the_steps_after_the_checkpoint_and_torn_lines(tmp_path):
    tracker = Tracker(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"reward": float(step)})
    with tracker.path.open("a") as file:
        file.write('{"step": 4, "rew')
    resumed = Tracker(tmp_path)
    resumed.rewind(2)
    resumed.log(3, {"reward": 30.0})
    records = read_metrics(resumed.path)
    assert [(r["step"], r["reward"]) for r in records] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_what_came_after_the_checkpoint_of_its_step_is_replaced(tmp_path):
    tracker = Tracker(tmp_path)
    for step, values in ((3, {"reward": 1}), (3, {"eval/x": 1}), (4, {"reward": 2})):
        tracker.log(step, values)
    tracker.rewind(3)
    for step, values in ((3, {"eval/x": 5}), (4, {"reward": 6}), (4, {"eval/x": 7})):
        tracker.log(step, values)
    found = [(r["step"], r.get("reward"), r.get("eval/x")) for r in tracker.records()]
    assert found == [(3, 1, None), (3, None, 5), (4, 6, None), (4, None, 7)]


def test_resume_drops_the_samples_after_the_checkpoint(tmp_path):
    for step in (2, 3):
        for kind in ("step", "eval_step"):
            write_rollouts(tmp_path, step, [{"reward": 1.0}], num_kept=9, kind=kind)
    Tracker(tmp_path).rewind(2)
    left = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert left == ["eval_step_000002.parquet", "step_000002.parquet"]


def test_numbers_that_parquet_cannot_hold_are_text(tmp_path):
    path = write_rollouts(tmp_path, 1, [{"hash": 2**70}, {"hash": 3}], num_kept=9)
    assert pyarrow.parquet.read_table(path).to_pylist() == [{"hash": str(2**70)}, {"hash": "3"}]


def test_no_repeated_values_are_looked_for_among_log_probs(tmp_path):
    numbers = {"logprobs": np.zeros(4, np.float32), "token_ids": np.arange(4), "reward": 0.5}
    path = write_rollouts(tmp_path, 1, [numbers | {"prompt": "2 + 3"}], num_kept=9)
    found = pyarrow.parquet.read_metadata(path).row_group(0).to_dict()["columns"]
    is_looked = {column["path_in_schema"]: column["has_dictionary_page"] for column in found}
    lists = {"logprobs.list.element": False, "token_ids.list.element": True}
    assert is_looked == lists | {"reward": True, "prompt": True}


def test_files_that_cannot_be_written_warn_once(tmp_path, capsys):
    tracker = Tracker(tmp_path)
    tracker.path.mkdir()  # opening it now fails, for root as well
    (tmp_path / "rollouts").write_text("a file in the way")
    for step in (1, 2):
        tracker.log(step, {"reward": 1.0})
        assert write_rollouts(tmp_path, step, [{"reward": 1.0}], num_kept=9) is None
    assert capsys.readouterr().err.count("warning:") == 2


def test_a_run_goes_back_though_its_disk_takes_no_metrics(tmp_path, capsys):
    tracker = Tracker(tmp_path)
    for step in (1, 2):
        tracker.log(step, {"reward": float(step)})
    tracker.path.with_suffix(".partial").mkdir()  # nothing can be written there
    tracker.rewind(1)
    tracker.log(1, {"reward": 10.0})
    assert [record["reward"] for record in tracker.records()] == [1.0, 2.0, 10.0]
    assert capsys.readouterr().err.count("metrics cannot be written to") == 1


def test_a_sink_gets_everything_before_it_closes(tmp_path):
    records = []
    sink = BackgroundSink("sink", records.extend)
    tracker = Tracker(tmp_path, sinks=[sink])
    for step in range(5):
        tracker.log(step, {"reward": float(step)})
    tracker.close()
    assert records == [(step, {"reward": float(step)}) for step in range(5)]


def test_a_failing_sink_warns_once_and_training_goes_on(capsys):
    def read(records):
        raise ConnectionError("no network\nsecond line")

    sink = BackgroundSink("wandb", read)
    sink._thread.join(10)
    for step in range(500):
        sink.offer((step, {"reward": 0.0}))
    sink.close()
    warning = capsys.readouterr().err
    assert warning.count("warning:") == 1
    assert "wandb failed (ConnectionError: no network)" in warning


def test_a_hanging_sink_costs_no_time_and_one_warning(capsys):
    release = threading.Event()
    sink = BackgroundSink("sink", lambda records: release.wait(60), queue_size=4)
    start = time.monotonic()
    for step in range(100):
        sink.offer((step, {"reward": 0.0}))
    sink.close(timeout_s=0.1)
    assert time.monotonic() - start < 2.0
    assert capsys.readouterr().err.count("warning:") == 1
    release.set()


def test_tensorboard_writes_an_event_file_and_is_off_by_default(tmp_path):
    for tensorboard_dir in (None, str(tmp_path / "tb")):
        config = LoggerConfig(tensorboard_dir=tensorboard_dir)
        tracker = make_tracker(config, tmp_path / "run", {})
        tracker.log(1, {"reward": 1.0})
        tracker.close()
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
        assert (tmp_path / "tb").exists() == bool(tensorboard_dir)
    assert list((tmp_path / "tb/run").glob("events.out.tfevents.*"))


def test_tensorboard_shows_steps_that_come_again_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = LoggerConfig(tensorboard_dir=str(tmp_path / "tb"), wandb=WandbConfig(run_name="one"))
    for resume_step, steps in ((None, (1, 2, 3)), (1, (2, 3, 4))):
        tracker = make_tracker(config, tmp_path / "run", {}, resume_step=resume_step)
        for step in steps:
            tracker.log(step, {"reward": float(step)})
        tracker.close()
        time.sleep(1.1)  # files are named by the second
    events = accumulator.EventAccumulator(str(tmp_path / "tb/one")).Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3, 4]


RECORDS = [(1, {"loss": 0.5, "eval/a@b_pass1": 1.0}), (2, {"loss": 0.25})]
NAMES = WandbConfig(project="sums", run_name="first", group="tries")


def test_the_libraries_themselves_take_what_is_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    _, mlflow = map(pytest.importorskip, ("trackio", "mlflow"))
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    config = LoggerConfig(trackio=True, mlflow=True, wandb=NAMES)
    settings = {
        "adam": {"lr": 1e-5},
        **{f"s{k}": k for k in range(100)},
    }  # more than it takes at once
    tracker = make_tracker(config, tmp_path / "run", settings)
    for step, values in RECORDS:
        tracker.log(step, values)
    tracker.close()
    [run] = mlflow.search_runs(experiment_names=["sums"], output_format="list")
    assert (run.info.run_name, run.data.params["adam.lr"]) == ("first", "1e-05")
    assert len(run.data.params) == 101
    assert run.data.metrics == {"loss": 0.25, "eval/a_b_pass1": 1.0}  # a name that it takes
    with sqlite3.connect(tmp_path / "sums.db") as store:
        found = store.execute(
            "select run_name, step, metrics from metrics order by step"
        ).fetchall()
    assert [(name, step, json.loads(text)) for name, step, text in found] == [
        ("first", step, values) for step, values in RECORDS
    ]


def test_rollouts_are_read_back_as_written(tmp_path):
    rows = [
        {"sample_id": "0/1/0", "reward": 1.0, "token_ids": torch.tensor([5, 6])},
        {"sample_id": "0/1/1", "reward": 0.0, "token_ids": torch.tensor([5]), "extra": {"n": 1.0}},
    ]
    asked = []

    def texts(token_ids):
        asked.extend(token_ids)
        return [f"t{token_id}" for token_id in token_ids]

    path = write_rollouts(tmp_path, 7, rows, num_kept=9, token_texts=texts)
    assert path == tmp_path / "rollouts/step_000007.parquet"
    back = pyarrow.parquet.read_table(path).to_pylist()
    assert [row["token_texts"] for row in back] == [["t5", "t6"], ["t5"]]
    assert asked == [5, 6]
    assert [row["token_ids"] for row in back] == [[5, 6], [5]]
    assert [row["extra"] for row in back] == [None, {"n": 1.0}]


def test_columns_of_mixed_types_become_json(tmp_path):
    rows = [{"label": "7"}, {"label": 7}, {"label": {"answer": [1, "x"]}}, {"label": None}]
    path = write_rollouts(tmp_path, 1, rows, num_kept=9)
    labels = pyarrow.parquet.read_table(path)["label"].to_pylist()
    assert labels == ['"7"', "7", '{"answer": [1, "x"]}', None]


def test_the_files_of_the_last_steps_stay(tmp_path):
    # It goes on from a checkpoint of step 2.
    for step in (1, 2, 3, 4, 3, 4, 5):
        write_rollouts(tmp_path, step, [{"reward": 1.0}], num_kept=2)
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["step_000004.parquet", "step_000005.parquet"]


def test_images_are_kept_once_and_as_long_as_a_file_names_them(tmp_path):
    red, blue = (read_picture(Image.new("RGB", (4, 2), colour)) for colour in ("red", "blue"))
    jpeg = io.BytesIO()
    Image.new("RGB", (4, 2), "lime").save(jpeg, format="JPEG")
    lime = read_picture(jpeg.getvalue())

    def write(step: int, *images: Picture, kind: str = "step") -> list[str]:
        rows = [{"images": [{"sha256": image.sha256}]} for image in images]
        write_rollouts(
            tmp_path, step, rows or [{"reward": 1.0}], num_kept=1, kind=kind, images=images
        )
        return sorted(path.name for path in (tmp_path / "rollouts" / "images").glob("*"))

    def names(*images: Picture) -> list[str]:
        return sorted(f"{image.sha256}.png" for image in images)

    assert write(0, red, kind="eval_step") == names(red)
    assert write(50, red, lime, red) == names(red, lime)
    assert write(100, blue) == names(red, blue)  # the evaluation has the red one
    assert write(150) == names(red)
    [path] = (tmp_path / "rollouts" / "images").iterdir()
    assert path.read_bytes() == red.data
    write(200, lime)
    kept = read_picture(tmp_path / "rollouts" / "images" / f"{lime.sha256}.png")
    assert kept.data.startswith(b"\x89PNG")
    assert kept.open().tobytes() == lime.open().tobytes()


def test_images_of_the_user_beside_a_run_are_not_its_own(tmp_path):
    """Nothing is removed there, and a later run moves nothing of it aside."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "cat.png").write_bytes(b"mine")
    for step in (1, 50):
        write_rollouts(tmp_path, step, [{"reward": 1.0}], num_kept=1)
    (tmp_path / METRICS_FILE).write_text("{}")
    set_earlier_run_aside(tmp_path, keeps_model=False)
    assert (tmp_path / "images" / "cat.png").read_bytes() == b"mine"


def test_a_column_named_images_of_a_reward_is_none_of_the_samples_images():
    """It would be read as theirs, and end a run where files are removed."""
    sample = replace(rollout([1], [2]), extra_columns={"images": "two of them", "words": 3})
    row = rollout_row(sample, None)
    assert "images" not in row and row["words"] == 3
