"""A supervised command with wandb and TensorBoard: both hold the numbers of metrics.jsonl."""

import json
from pathlib import Path

import pytest

from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_STEPS = 4
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


def test_both_trackers_hold_the_numbers_of_the_log(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
    kept = path.read_bytes()  # values are JSON within it
    for name in METRICS:
        expected = [record[name] for record in records]
        assert all(json.dumps(value).encode() in kept for value in expected)
        scalars = events.Scalars(name)
        assert [event.step for event in scalars] == steps
        assert [event.value for event in scalars] == pytest.approx(expected, rel=1e-6)
