"""What each checkpoint flag of a training command leaves on disk, and what a resume finds there."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.distributed.checkpoints import GIB
from openrlhf.distributed.manifest import num_bytes
from tests.distributed.spawn import run_ranks
from tests.integration.test_resume_methods import make_inputs, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CASE = "sft_lora"  # 6 steps, the third of them smaller
RUNS = {
    "none": "",
    "every_fourth": "--save_steps 4",
    "newest_two": "--save_steps 1 --max_ckpt_num 2",
    "exports_too": "--save_steps 2 --max_ckpt_num 2 --save_hf_ckpt",
    "exports_only": "--save_steps 2 --save_hf_ckpt --disable_ds_ckpt",
    "no_room": "--save_steps 2 --max_ckpt_mem 1e-9",
}
FOLDERS = {
    "none": [],
    "every_fourth": ["global_step4", "global_step6"],
    "newest_two": ["global_step5", "global_step6"],
    "exports_too": ["global_step4", "global_step4_hf", "global_step6", "global_step6_hf"],
    "exports_only": ["global_step2_hf", "global_step4_hf", "global_step6_hf"],
    "no_room": ["global_step6"],  # the newest stays, whatever its size
    "room_for_two": ["global_step5", "global_step6"],
    "exports_only_again": ["aside-1", "global_step2_hf", "global_step4_hf", "global_step6_hf"],
}


def folders(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "ckpt").glob("*"))


def run_everything(root: Path) -> dict:
    """Folders before and after; runs in one process one after the other."""
    found: dict = {}
    for name, flags in RUNS.items():
        start(root, root / name, CASE, *flags.split())
        found[name] = folders(root / name)
    size = num_bytes(root / "newest_two" / "ckpt" / "global_step6") / GIB
    cap = f"--save_steps 1 --max_ckpt_num 9 --max_ckpt_mem {2.5 * size}".split()
    start(root, root / "room_for_two", CASE, *cap)
    found["room_for_two"] = folders(root / "room_for_two")
    again = [*RUNS["exports_only"].split(), "--load_checkpoint"]
    start(root, root / "exports_only", CASE, *again)  # there is nothing to go on from
    found["exports_only_again"] = folders(root / "exports_only")
    return found


def test_a_run_leaves_the_checkpoints_its_flags_ask_for(tmp_path: Path) -> None:
    assert run_ranks(run_everything, 1, make_inputs(tmp_path)) == [FOLDERS]
