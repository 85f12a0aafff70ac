"""Commands start as their users start them, under deepspeed and torchrun with the flags that the
documents give: what they learn shows on rows they never saw, every rank does its share, and
trackers hold the numbers of the log.
"""

import json
import math
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
import transformers

from tests.distributed.spawn import run_ranks
from tests.helpers.processes import environment, launched
from tests.integration.commands import run_command
from tests.tiny import make_model, read_jsonl, write_jsonl

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
    words = [*launched(f"train_{method}", launcher), *names.split()]
    words += flags.format(root=tmp_path).split()
    words += [*EVERYWHERE.split(), "--input_template", "User: {}\nAssistant: "]
    assert "ranks       2 on" in run_command(*words, env=environment(), timeout=500)
    records = read_jsonl(run_dir / "metrics.jsonl")
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


TWO = "torchrun --nproc_per_node 2 --master_port {port} -m {module}"
VLLM = "--eval_task generate_vllm --greedy_sampling --prompt_max_len 64 --max_num_seqs 4"
NUM_PROMPTS = 160


def kill_in_the_middle(words: list[str], parts: Path) -> int:
    """Start, wait until both ranks left results, kill -9 all of them; answers how many there
    were.
    """
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    try:
        while len(files := [p for p in parts.glob("*/rank*.jsonl") if p.stat().st_size]) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    finally:
        for each in (process, *psutil.Process(process.pid).children(recursive=True)):
            each.send_signal(signal.SIGKILL)
        process.wait()
    return sum(len(path.read_text().splitlines()) - 1 for path in files)


def test_killed_engines_go_on_where_they_stopped_and_two_answer_as_one(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    prompts = [{"input": f"prompt {i}"} for i in range(NUM_PROMPTS)]
    rows = write_jsonl(tmp_path / "many.jsonl", prompts)
    killed, straight = tmp_path / "killed.jsonl", tmp_path / "straight.jsonl"
    flags = f"{VLLM} --pretrain {tmp_path}/model --dataset {rows} --max_new_tokens 64 --output_path"
    parts = tmp_path / "killed.jsonl.parts"
    two = [*flags.split(), str(killed)]
    num_done = kill_in_the_middle([*launched("batch_inference", TWO), *two], parts)
    assert 0 < num_done < NUM_PROMPTS and not killed.exists()
    with next(parts.glob("*/rank0.jsonl")).open("a") as file:
        file.write('\n[17, [{"input": "half a li')
    said = run_command(*launched("batch_inference", TWO), *two, env=environment())
    assert "going on with what is done" in said and said.count("160 rows written") == 1
    one = ["-m", "openrlhf.cli.batch_inference", *flags.split(), straight]
    run_command(*one, env=environment())
    assert killed.read_text() == straight.read_text() and not parts.exists()


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
    rows = [{"input": f"{i}+{i}=", "output": str(2 * i)} for i in range(16)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    run_ranks(train, 1, tmp_path)
    run_dir = tmp_path / "run"
    records = read_jsonl(run_dir / "metrics.jsonl")
    steps = list(range(1, 5))
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
