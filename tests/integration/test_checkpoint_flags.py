"""What each checkpoint flag of a training command leaves on disk, and what a resume finds there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from openrlhf.distributed.checkpoints import GIB
from openrlhf.distributed.manifest import num_bytes
from tests.distributed.spawn import run_ranks
from tests.integration.test_resume_methods import make_inputs, start
from tests.stopped_runs import records, stopping_behind

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
    "stopped": ["global_step5", "global_step6"],
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
    with stopping_behind(3):
        start(root, root / "stopped", CASE, *cap)
    found["at_stop"] = folders(root / "stopped")
    start(root, root / "stopped", CASE, *cap, "--load_checkpoint")
    found["stopped"] = folders(root / "stopped")
    again = [*RUNS["exports_only"].split(), "--load_checkpoint"]
    start(root, root / "exports_only", CASE, *again)
    found["exports_only_again"] = folders(root / "exports_only")
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("checkpoint_flags"))


@pytest.fixture(scope="module")
def found(root: Path) -> dict:
    [found] = run_ranks(run_everything, 1, root)
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_a_run_leaves_the_checkpoints_its_flags_ask_for(found: dict, name: str) -> None:
    assert found[name] == FOLDERS[name]


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_an_export_beside_a_checkpoint_is_the_model_of_its_step(root: Path, found: dict) -> None:
    run_dir = root / "exports_too"
    last, early = (adapter_of(run_dir / "ckpt" / f"global_step{step}_hf") for step in (6, 4))
    final = adapter_of(run_dir)
    assert all(torch.equal(last[name], final[name]) for name in final)
    assert any(not torch.equal(early[name], final[name]) for name in final)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run_dir / "ckpt" / "global_step4_hf")
    assert tokenizer("1+1").input_ids


def test_a_run_goes_on_from_the_newest_that_the_cap_left(root: Path, found: dict) -> None:
    assert found["at_stop"] == ["global_step2", "global_step3"]
    straight, resumed = root / "room_for_two", root / "stopped"
    assert records(straight) == records(resumed)
    expected, actual = adapter_of(straight), adapter_of(resumed)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_exports_alone_are_nothing_to_go_on_from(root: Path, found: dict) -> None:
    steps = [
        json.loads(line)["step"]
        for line in (root / "exports_only" / "metrics.jsonl").read_text().splitlines()
        if '"lr"' in line
    ]
    assert steps == [3, 6]  # of the second start, which began anew
    assert found["exports_only_again"] == ["aside-1", *FOLDERS["exports_only"]]
    aside = root / "exports_only" / "ckpt" / "aside-1"
    assert sorted(path.name for path in aside.iterdir()) == FOLDERS["exports_only"]
