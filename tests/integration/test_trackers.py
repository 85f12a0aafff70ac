"""A supervised command with wandb and TensorBoard: both hold the numbers of metrics.jsonl."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_STEPS = 4
BLOCK = 32 * 1024
METRICS = ("gpt_loss", "lr", "grad_norm")


def train(folder: Path) -> None:
    from openrlhf.cli.train_sft import main

    words = (
        f"--pretrain {folder}/model --dataset {folder}/rows.jsonl --output_key output "
        f"--save_path {folder}/run --train_batch_size 4 --micro_train_batch_size 4 "
        "--max_epochs 1 --learning_rate 1e-3 --use_tensorboard true --use_wandb true "
        "--wandb_project tests"
    )
    main(words.split())


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log: blocks of 32 KiB, pieces of (checksum, length, kind, bytes)."""
    position, parts = 7, []  # behind the file's own header
    while position + 7 <= len(content):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts.append(content[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield b"".join(parts)
            parts = []


def test_both_trackers_hold_the_values_of_every_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from wandb.proto.wandb_internal_pb2 import Record

    make_model(tmp_path / "model")
    rows = [{"input": f"{i}+{i}=", "output": str(2 * i)} for i in range(4 * NUM_STEPS)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    run_ranks(train, 1, tmp_path)
    run_dir = tmp_path / "run"
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = list(range(1, NUM_STEPS + 1))
    assert [record["step"] for record in records] == steps

    (folder,) = (run_dir / "tensorboard").iterdir()  # named as the run
    events = EventAccumulator(str(folder))
    events.Reload()
    [path] = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    history = []
    for data in log_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            history.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
    assert [row["step"] for row in history] == steps
    for name in METRICS:
        expected = [record[name] for record in records]
        assert [row[name] for row in history] == expected
        scalars = events.Scalars(name)
        assert [event.step for event in scalars] == steps
        assert [event.value for event in scalars] == pytest.approx(expected, rel=1e-6)
