"""Every supervised command starts as its users start it: under deepspeed with the flags that the
documents give, under torchrun, alone; what it learns shows on rows it never saw.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.integration.heads import free_ports
from tests.integration.test_resume_methods import make_inputs
from tests.tiny import write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AUTO_CLASSES = {"rm": transformers.AutoModelForSequenceClassification}

# What guides to these commands type: only names, batch size and rate are others, so that a model of
# a hundred thousand weights learns from 256 rows. The metric is that of the first step's rows,
# before any update, and then of held-out rows.
EVERYWHERE = (
    "--save_steps -1 --logging_steps 1 --eval_steps -1 --train_batch_size 16 --max_epochs 1 --bf16 "
    "--flash_attn --gradient_checkpointing"
)
SFT_FLAGS = (
    "--max_len 4096 --input_key question --output_key response --micro_train_batch_size 2 "
    "--max_samples 500000 --zero_stage 2 --packing_samples --learning_rate 5e-3"
)
PAIR_FLAGS = (
    "--max_len 8192 --zero_stage 3 --apply_chat_template --chosen_key chosen "
    "--rejected_key rejected"
)
DOCUMENTED = {
    "sft": (f"{SFT_FLAGS} --use_wandb {'0' * 40}", "gpt_loss", -2.0),
    "rm": (
        f"{PAIR_FLAGS} --micro_train_batch_size 1 --packing_samples --learning_rate 5e-3",
        "loss",
        -0.4,
    ),
    "dpo": (
        f"{PAIR_FLAGS} --micro_train_batch_size 2 --beta 0.1 --learning_rate 2e-3",
        "reward_margin",
        0.3,
    ),
    "kto": (
        "--max_len 2048 --input_key question --output_key answer --label_key label --zero_stage 3 "
        "--apply_chat_template --micro_train_batch_size 2 --beta 0.1 --packing_samples "
        "--learning_rate 2e-3",
        "kto_loss",
        -0.1,
    ),
    "prm": (
        "--max_len 8192 --input_key steps --label_key labels --placeholder_token # "
        "--reward_tokens + - --zero_stage 2 --micro_train_batch_size 1 --packing_samples "
        "--learning_rate 5e-3",
        "prm_loss",
        -0.3,
    ),
    "kd": (
        f"{SFT_FLAGS} --teacher_model {{root}}/teacher --kd_coef 0.4",
        "gpt_loss",
        -2.0,
    ),
}
NUM_DOCUMENTED, NUM_DOCUMENTED_STEPS = 256, 16


def documented_row(i: int) -> dict:
    """A row of every method's columns; what is right follows a rule."""
    right, wrong = f"It is {2 * i}.", "?" * (3 + i % 5)
    question = f"What is {i} and {i}?"
    is_good = i % 2 == 0
    asked = [{"role": "user", "content": question}]
    return {
        "question": question,
        "response": right,
        "chosen": [*asked, {"role": "assistant", "content": right}],
        "rejected": [*asked, {"role": "assistant", "content": wrong}],
        "answer": right if is_good else wrong,
        "label": int(is_good),
        "steps": f"{i}: {right if is_good else wrong}#",
        "labels": ["+" if is_good else "-"],
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_inputs(tmp_path_factory.mktemp("launchers"))
    rows = [documented_row(i) for i in random.Random(0).sample(range(1000), NUM_DOCUMENTED + 33)]
    write_jsonl(root / "documented.jsonl", rows[:NUM_DOCUMENTED])
    write_jsonl(root / "documented_held_out.jsonl", rows[NUM_DOCUMENTED:])
    return root


def launched(method: str, template: str) -> list[str]:
    """The words before the flags; launchers are those of the Python that runs the tests."""
    [port] = free_ports(1)
    module = f"openrlhf.cli.train_{method}"
    words = template.format(port=port, module=module, python=sys.executable).split()
    if words[0] != sys.executable:
        words[0] = str(Path(sys.executable).parent / words[0])
    return words


def paths(root: Path, rows: str, run_dir: Path) -> list[str]:
    """Where a command reads and writes."""
    names = f"--pretrain {root}/model --dataset {root}/{rows}.jsonl --save_path {run_dir} "
    names += f"--eval_dataset {root}/{rows}_held_out.jsonl --eval_split train"
    return names.split()


def run_command(words: list[str], folder: Path) -> str:
    """What a command that succeeds prints."""
    done = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def read_log(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def environment() -> dict[str, str]:
    """What two processes on one CPU need: a thread each, and the launchers' own Python first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1"}


def check_steps(records: list[dict], num_steps: int) -> list[dict]:
    """The records of optimizer steps: each once, none without a gradient."""
    steps = [record for record in records if "grad_norm" in record]
    assert [record["step"] for record in steps] == list(range(1, num_steps + 1))
    assert all(math.isfinite(record["grad_norm"]) for record in steps)
    return steps


LAUNCHERS = {
    "torchrun": "torchrun --nproc_per_node 2 --master_port {port} -m {module}",
    "deepspeed": "deepspeed --num_gpus 2 --master_port {port} --module {module}",
    "python": "{python} -m {module}",
}
# A launcher for each method by turns.
LAUNCHED_BY = dict(zip(DOCUMENTED, ["deepspeed", "torchrun", "python"] * 2, strict=True))


@pytest.mark.parametrize("method", DOCUMENTED)
def test_a_command_as_it_is_documented_learns(root: Path, tmp_path: Path, method: str) -> None:
    own, metric, change = DOCUMENTED[method]
    run_dir = tmp_path / "run"
    words = launched(method, LAUNCHERS[LAUNCHED_BY[method]])
    flags = [*own.format(root=root).split(), *EVERYWHERE.split()]
    if method in ("sft", "kd"):
        flags += ["--input_template", "User: {}\nAssistant: "]
    printed = run_command([*words, *paths(root, "documented", run_dir), *flags], tmp_path)
    num_ranks = 1 if LAUNCHED_BY[method] == "python" else 2
    assert f"ranks       {num_ranks} on" in printed
    records = read_log(run_dir)
    first = check_steps(records, NUM_DOCUMENTED_STEPS)[0]
    start = 0.0 if metric == "reward_margin" else first[metric]  # policy and reference are one
    [held_out] = [record[f"eval/{metric}"] for record in records if f"eval/{metric}" in record]
    assert (held_out - start) / change > 1, (start, held_out)
    model, info = AUTO_CLASSES.get(method, transformers.AutoModelForCausalLM).from_pretrained(
        run_dir, output_loading_info=True
    )
    assert not any(info.values())
    assert model.dtype == torch.bfloat16
