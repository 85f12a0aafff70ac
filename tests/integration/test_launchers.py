"""Supervised commands start as their users start them, under deepspeed and torchrun with the flags
that the documents give; what they learn shows on rows they never saw.
"""

import json
import math
import os
import random
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.integration.commands import run_command
from tests.integration.heads import free_ports
from tests.tiny import make_model, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

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
DOCUMENTED = {
    "sft": (
        f"{SFT_FLAGS} --use_wandb {'0' * 40}",
        "deepspeed --num_gpus 2 --master_port {port} --module {module}",
    ),
    "kd": (
        f"{SFT_FLAGS} --teacher_model {{root}}/teacher --kd_coef 0.4",
        "torchrun --nproc_per_node 2 --master_port {port} -m {module}",
    ),
}
NUM_ROWS, NUM_STEPS = 256, 16


def launched(method: str, template: str) -> list[str]:
    """The words before the flags; launchers are those of the Python that runs the tests."""
    [port] = free_ports(1)
    module = f"openrlhf.cli.train_{method}"
    words = template.format(port=port, module=module, python=sys.executable).split()
    if words[0] != sys.executable:
        words[0] = str(Path(sys.executable).parent / words[0])
    return words


def environment() -> dict[str, str]:
    """What two processes on one CPU need: a thread each, and the launchers' own Python first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("method", DOCUMENTED)
def test_a_command_as_it_is_documented_learns(tmp_path: Path, method: str) -> None:
    make_model(tmp_path / "model")
    make_model(tmp_path / "teacher", num_layers=1, seed=3)
    numbers = random.Random(0).sample(range(1000), NUM_ROWS + 33)
    rows = [{"question": f"What is {i} and {i}?", "response": f"It is {2 * i}."} for i in numbers]
    write_jsonl(tmp_path / "rows.jsonl", rows[:NUM_ROWS])
    write_jsonl(tmp_path / "held_out.jsonl", rows[NUM_ROWS:])
    flags, launcher = DOCUMENTED[method]
    run_dir = tmp_path / "run"
    names = (
        f"--pretrain {tmp_path}/model --dataset {tmp_path}/rows.jsonl --save_path {run_dir} "
        f"--eval_dataset {tmp_path}/held_out.jsonl --eval_split train"
    )
    words = [*launched(method, launcher), *names.split(), *flags.format(root=tmp_path).split()]
    words += [*EVERYWHERE.split(), "--input_template", "User: {}\nAssistant: "]
    assert "ranks       2 on" in run_command(*words, env=environment(), timeout=500)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "grad_norm" in record]
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 1))
    assert all(math.isfinite(record["grad_norm"]) for record in steps)
    [held_out] = [record["eval/gpt_loss"] for record in records if "eval/gpt_loss" in record]
    assert held_out < steps[0]["gpt_loss"] - 2.0
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        run_dir, output_loading_info=True
    )
    assert not any(info.values())
    assert model.dtype == torch.bfloat16
