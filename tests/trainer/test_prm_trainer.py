"""A process reward model learns to judge steps it never saw; rows of labels that are tokens and
rows of labels that are numbers share a batch.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from openrlhf.cli.train_prm import main
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, write_jsonl

FLAGS = (
    "--placeholder_token # --reward_tokens + - --train_batch_size 16 --micro_train_batch_size 4 "
    "--learning_rate 3e-3 --max_epochs 3 --eval_split train --lr_warmup_ratio 0"
)


def make_rows(num_rows: int, seed: int) -> list[dict]:
    """Three steps of four letters; a step is good when it has an x in it."""
    draw = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        is_good = [draw.random() < 0.5 for _ in range(3)]
        steps = ["".join(draw.choices("abcd", k=3)) for _ in is_good]
        text = "".join(
            f"{s}{'x' if good else 'e'}#" for s, good in zip(steps, is_good, strict=True)
        )
        rows.append({"input": text, "label": ["+" if good else "-" for good in is_good]})
    return rows


def train(folder: Path) -> None:
    main(
        f"--pretrain {folder}/model --dataset {folder}/train.jsonl "
        f"--eval_dataset {folder}/eval.jsonl --save_path {folder}/run {FLAGS}".split()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prm")
    make_model(folder / "model")
    write_jsonl(folder / "train.jsonl", make_rows(96, seed=0))
    write_jsonl(folder / "eval.jsonl", make_rows(33, seed=1))
    run_ranks(train, 1, folder)
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> list[dict]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_it_judges_steps_it_never_saw(records: list[dict]) -> None:
    losses = [record["prm_loss"] for record in records if "prm_loss" in record]
    assert len(losses) == 3 * 6
    assert losses[0] == pytest.approx(0.693, abs=0.1)  # log 2: it knows nothing yet
    assert [r["eval/acc"] for r in records if "eval/acc" in r][-1] >= 0.95


def test_the_export_gives_the_verdicts_that_were_logged(folder: Path, records: list[dict]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "run")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "run")
    marker, good, bad = tokenizer.convert_tokens_to_ids(["#", "+", "-"])
    hits, losses = [], []
    for row in make_rows(33, seed=1):
        ids = torch.tensor(tokenizer(row["input"])["input_ids"])
        logits = model(ids[None]).logits[0][ids == marker][:, [good, bad]]
        for own, label in zip(logits.log_softmax(-1), row["label"], strict=True):
            losses.append(-own["+-".index(label)].item())
            hits.append(own.argmax() == "+-".index(label))
    assert records[-1]["eval/acc"] == pytest.approx(sum(hits).item() / len(hits))
    assert records[-1]["eval/prm_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
