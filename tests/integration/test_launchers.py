"""Every supervised command starts as its users start it: under deepspeed, under torchrun, alone;
what it learns shows on rows it never saw.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.integration.heads import free_ports
from tests.integration.test_resume_methods import CASES, make_inputs, make_row
from tests.tiny import write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# What each command logs, how much that changes on held-out rows from the first evaluation to the
# last one, and the class its export loads in.
METHODS = {
    "sft": ("gpt_loss", -1.0, transformers.AutoModelForCausalLM),
    "rm": ("loss", -0.3, transformers.AutoModelForSequenceClassification),
    "dpo": ("reward_margin", 0.3, transformers.AutoModelForCausalLM),
    # The labels of these answers follow no rule; test_kto_trainer.py shows it learn.
    "kto": ("kto_loss", None, transformers.AutoModelForCausalLM),
    "prm": ("prm_loss", -0.05, transformers.AutoModelForCausalLM),
    "kd": ("gpt_loss", -0.5, transformers.AutoModelForCausalLM),
}
FLAGS = (
    "--train_batch_size 4 --micro_train_batch_size 2 --max_epochs 3 --learning_rate 2e-3 "
    "--lr_warmup_ratio 0 --eval_split train --eval_steps 2"
)
NUM_ROWS, NUM_STEPS = 30, 24  # the last batch of an epoch is smaller
# ZeRO stages by turns; one process alone runs either as it can.
LAUNCHERS = {
    "deepspeed": ("deepspeed --num_gpus 2 --master_port {port} --module {module}", 2),
    "torchrun": ("torchrun --nproc_per_node 2 --master_port {port} -m {module}", 3),
    "python": ("{python} -m {module}", 2),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_inputs(tmp_path_factory.mktemp("launchers"))
    write_jsonl(root / "rows.jsonl", [make_row(i) for i in range(NUM_ROWS)])
    write_jsonl(root / "held_out.jsonl", [make_row(i) for i in range(NUM_ROWS, 2 * NUM_ROWS)])
    return root


def command(root: Path, method: str, launcher: str, run_dir: Path) -> list[str]:
    """The words of a command; launchers are those of the Python that runs the tests."""
    template, stage = LAUNCHERS[launcher]
    [port] = free_ports(1)
    module = f"openrlhf.cli.train_{method}"
    words = template.format(port=port, module=module, python=sys.executable).split()
    if launcher != "python":
        words[0] = str(Path(sys.executable).parent / words[0])
    case = {"sft": "sft_lora"}.get(method, method)
    own = CASES[case].format(root=root).split(" --lora_rank")[0].split()[1:]
    paths = f"--pretrain {root}/model --dataset {root}/rows.jsonl --save_path {run_dir} "
    paths += f"--eval_dataset {root}/held_out.jsonl"
    return [*words, *paths.split(), *own, *FLAGS.split(), "--zero_stage", str(stage)]


def environment() -> dict[str, str]:
    """What two processes on one CPU need: a thread each, and the launchers' own Python first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("method", METHODS)
def test_a_command_learns_and_exports_under_every_launcher(
    root: Path, tmp_path: Path, method: str, launcher: str
) -> None:
    metric, change, auto_class = METHODS[method]
    run_dir = tmp_path / "run"
    done = subprocess.run(
        command(root, method, launcher, run_dir),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [record for record in records if "grad_norm" in record]
    assert [record["step"] for record in losses] == list(range(1, NUM_STEPS + 1))
    assert all(math.isfinite(record["grad_norm"]) for record in losses)
    values = [record[f"eval/{metric}"] for record in records if f"eval/{metric}" in record]
    assert len(values) == NUM_STEPS // 2
    assert change is None or (values[-1] - values[0]) / change > 1, values
    num_ranks = 1 if launcher == "python" else 2
    assert f"ranks       {num_ranks} on" in done.stdout
    _, info = auto_class.from_pretrained(run_dir, output_loading_info=True)
    assert not any(info.values())
