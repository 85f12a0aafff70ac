"""A training command of any method that stops behind a checkpoint and is typed again leaves, bit
for bit, the model and the log of the command that was never stopped.
"""

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.helpers.stopped_runs import records, stopping_behind
from tests.helpers.supervised_runs import (
    CASES,
    check_same,
    make_inputs,
    start,
    straight_and_resumed,
    weights_of,
    words,
)
from tests.integration.commands import run_command


def run_two_ranks(root: Path) -> None:
    for case in CASES:
        # A student cannot sample from split weights.
        stage = "--zero_stage 2 --adam_offload" if case == "kd_on_policy" else "--zero_stage 3"
        straight_and_resumed(root, root / "two" / case, case, *stage.split())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("resume"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_resumed_run_of_any_method_on_two_ranks_is_the_run_that_was_not_stopped(
    root: Path,
) -> None:
    run_ranks(run_two_ranks, 2, root)
    for case in CASES:
        check_same(root / "two" / case, case)


LONG = ("--max_epochs", "8", "--save_steps", "5", "--max_ckpt_num", "2", "--load_checkpoint")


def run_long(name: str, root: Path) -> None:
    start(root, root / name, "sft_lora", *LONG)


def test_the_same_command_goes_on_exactly_after_a_kill(root: Path) -> None:
    straight, killed = root / "straight", root / "killed"
    run_ranks(partial(run_long, "straight"), 1, root)
    command = [sys.executable, "-m", "openrlhf.cli.train_sft"]
    command += words(root, killed, "sft_lora", *LONG)[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as the ranks of `run_ranks`
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        deadline = time.monotonic() + 120
        while not any(record["step"] >= 9 for record in records(killed)):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
    assert not list(killed.glob("*.safetensors"))
    run_ranks(partial(run_long, "killed"), 1, root)
    # Where checkpoints go that are not resumed; a best model of a later step may lie there.
    assert not list((killed / "ckpt").glob("aside-*/global_step*"))
    assert records(straight) == records(killed)
    expected, found = weights_of(straight), weights_of(killed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    kept = sorted(path.name for path in (killed / "ckpt").glob("global_step*"))
    assert kept == ["global_step20", "global_step24"]


# Three starts of one run, on two ranks, on one and on two again: their ZeRO stages.
CHAINS = {"sft_lora": (3, 2, 2), "dpo_lora": (1, 3, 2)}
EVERY_STEP = "--logging_steps 1 --l2 0.1 --lora_dropout 0 --save_steps 2 --load_checkpoint"


def start_chain(number: int, root: Path) -> None:
    """One start of every chain; the first two stop behind a checkpoint, unless run straight."""
    for case, stages in CHAINS.items():
        stage = f"{EVERY_STEP} --use_ds_universal_ckpt --zero_stage {stages[number]}".split()
        if number == 0:
            start(root, root / case / "straight", case, *stage)
        with stopping_behind(2 * (number + 1)) if number < 2 else nullcontext():
            start(root, root / case / "resumed", case, *stage)


@pytest.mark.slow
def test_a_run_goes_from_two_ranks_to_one_and_back_with_the_same_losses(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    for number, size in enumerate((2, 1, 2)):
        run_ranks(partial(start_chain, number), size, tmp_path)
    script = Path(__file__).parents[2] / "examples" / "scripts" / "ckpt_ds_zero_to_universal.sh"
    env = {**os.environ, "CKPT_PATH": str(tmp_path / "dpo_lora/resumed/ckpt")}
    said = run_command("bash", str(script), env=env)
    assert "global_step6: --load_checkpoint --use_ds_universal_ckpt" in said
    for case in CHAINS:
        straight, resumed = (records(tmp_path / case / run) for run in ("straight", "resumed"))
        steps, expected = ([r for r in run if "lr" in r] for run in (resumed, straight))
        assert [r["step"] for r in steps] == [r["step"] for r in expected] == [1, 2, 3, 4, 5, 6]
        loss = "gpt_loss" if case.startswith("sft") else "loss"
        for name, tolerance in ((loss, 1e-6), ("lr", 1e-12), ("grad_norm", 1e-5)):
            found, wanted = ([r[name] for r in run] for run in (steps, expected))
            assert found == pytest.approx(wanted, rel=0, abs=tolerance), (case, name)
