"""A checkpoint of one number of ranks and ZeRO stage is taken up by any other: a run that changes
both goes on with the same rows and the same losses.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.spawn import meet_elsewhere, run_ranks
from tests.integration.test_resume_methods import make_inputs
from tests.stopped_runs import records, stopping_behind

pytestmark = pytest.mark.slow


# Three starts of one run: on two ranks, on one, on two again.
CHAINS = {
    "sft_lora": ("sft", "--input_key input --output_key output --lora_rank 4", (3, 2, 2)),
    "dpo": ("dpo", "--prompt_key input", (1, 3, 2)),
}
COMMON = (
    "--max_epochs 2 --train_batch_size 4 --micro_train_batch_size 2 --learning_rate 1e-3 "
    "--logging_steps 1 --lr_warmup_ratio 0 --l2 0.1 --save_steps 2 --load_checkpoint "
    "--use_ds_universal_ckpt"
)


def start(root: Path, chain: str, run: str, number: int) -> None:
    """One start of a chain's command."""
    meet_elsewhere()
    method, flags, stages = CHAINS[chain]
    run_dir = root / chain / run
    importlib.import_module(f"openrlhf.cli.train_{method}").main(
        [
            *("--pretrain", str(root / "model"), "--dataset", str(root / "rows.jsonl")),
            *(*COMMON.split(), *flags.split(), "--zero_stage", str(stages[number])),
            *("--save_path", str(run_dir), "--ckpt_path", str(run_dir / "ckpt")),
        ]
    )


def first_starts(root: Path) -> None:
    for chain in CHAINS:
        start(root, chain, "straight", 0)
        with stopping_behind(2):
            start(root, chain, "resumed", 0)


def second_starts(root: Path) -> None:
    for chain in CHAINS:
        with stopping_behind(4):
            start(root, chain, "resumed", 1)


def third_starts(root: Path) -> None:
    for chain in CHAINS:
        start(root, chain, "resumed", 2)


def check_by_script(ckpt_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "scripts" / "ckpt_ds_zero_to_universal.sh"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CKPT_PATH": str(ckpt_path)}
    done = subprocess.run(["bash", script], env=env, check=True, capture_output=True, text=True)
    assert "global_step4: --load_checkpoint --use_ds_universal_ckpt" in done.stdout


def test_a_run_goes_from_two_ranks_to_one_and_back_with_the_same_losses(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    for starts, size in ((first_starts, 2), (second_starts, 1), (third_starts, 2)):
        run_ranks(starts, size, tmp_path)
        if size == 1:
            check_by_script(tmp_path / "dpo" / "resumed" / "ckpt")
    for chain in CHAINS:
        straight, resumed = (records(tmp_path / chain / run) for run in ("straight", "resumed"))
        assert [r["step"] for r in resumed] == [r["step"] for r in straight] == [1, 2, 3, 4, 5, 6]
        loss = "gpt_loss" if chain.startswith("sft") else "loss"
        for name, tolerance in ((loss, 1e-6), ("lr", 1e-12), ("grad_norm", 1e-5)):
            found, expected = ([r[name] for r in run] for run in (resumed, straight))
            assert found == pytest.approx(expected, rel=0, abs=tolerance), (chain, name)
