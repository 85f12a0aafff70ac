"""Settings of the optimizer, of sums and of kernels, through the command: a run with each learns,
and those that only compute otherwise give the losses of the run without them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from openrlhf.cli.train_sft import main
from tests.distributed.spawn import run_ranks
from tests.tiny import make_model, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMON = (
    "--input_key question --output_key answer --train_batch_size 16 --micro_train_batch_size 4 "
    "--learning_rate 5e-3 --lr_warmup_ratio 0 --max_epochs 2 --eval_split train"
)
LORA = "--lora_rank 8 --learning_rate 2e-2"
RUNS = {
    "plain": "",
    "lora": LORA,
    "muon": "--optim muon --muon.lr 0.02",
    "muon_lora": f"--optim muon --muon.lr 0.02 {LORA}",
    "bf16": "--bf16",
    "sums_in_bf16": "--bf16 --grad_accum_dtype bf16",
    "sums_in_fp32": "--bf16 --grad_accum_dtype fp32",
    "eager": "--attn_implementation eager",
    "recomputed": "--gradient_checkpointing",
    "recomputed_reentrant": "--gradient_checkpointing --gradient_checkpointing_use_reentrant",
    "recomputed_lora": f"--gradient_checkpointing {LORA}",
    "recomputed_reentrant_lora": (
        f"--gradient_checkpointing --gradient_checkpointing_use_reentrant {LORA}"
    ),
    "adam_offload": "--zero_stage 2 --adam_offload",
    "by_tokens": "--use_dynamic_batch --train_max_tokens_per_gpu 100",
}
SAME = {  # name -> the run with the same losses
    "sums_in_fp32": "bf16",
    "eager": "plain",
    "recomputed": "plain",
    "recomputed_reentrant": "plain",
    "recomputed_lora": "lora",
    "recomputed_reentrant_lora": "lora",
    "adam_offload": "plain",
    "by_tokens": "plain",
}
NUM_ROWS, NUM_STEPS = 120, 16  # the last batch of an epoch is smaller
# Of the held-out loss, from about log 262 = 5.57; an adapter has a random head and embeddings.
FALL, FALL_OF_ADAPTER = 2.0, 0.4


def make_row(i: int) -> dict:
    return {"question": f"{i}?", "answer": f"It is {2 * i}."}


def train_all(folder: Path) -> None:
    for name, flags in RUNS.items():
        main(
            f"--pretrain {folder}/model --dataset {folder}/rows.jsonl --eval_dataset "
            f"{folder}/held_out.jsonl --save_path {folder}/{name} {COMMON} {flags}".split()
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    make_model(folder / "model")
    rows = [make_row(i) for i in random.Random(0).sample(range(1000), NUM_ROWS + 17)]
    write_jsonl(folder / "rows.jsonl", rows[:NUM_ROWS])
    write_jsonl(folder / "held_out.jsonl", rows[NUM_ROWS:])
    return folder


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Path:
    run_ranks(train_all, 1, folder)
    return folder


def records(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_falls_on_rows_it_never_saw(one_rank: Path, name: str) -> None:
    found = records(one_rank, name)
    steps = [record for record in found if "grad_norm" in record]
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 1))
    last = [record["eval/gpt_loss"] for record in found if "eval/gpt_loss" in record][-1]
    assert steps[0]["gpt_loss"] - last > (FALL_OF_ADAPTER if "lora" in name else FALL)
    assert steps[-1]["lr"] == pytest.approx(0.1 * max(record["lr"] for record in steps), rel=0.2)


@pytest.mark.parametrize("name", SAME)
def test_what_only_computes_otherwise_gives_the_same_losses(one_rank: Path, name: str) -> None:
    own, other = (
        [record["gpt_loss"] for record in records(one_rank, run) if "gpt_loss" in record]
        for run in (name, SAME[name])
    )
    assert own == pytest.approx(other, rel=1e-4)
